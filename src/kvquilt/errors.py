"""Errors of this package. Each also is the builtin that it resembles."""

__all__ = [
    "BenchError",
    "ConfigError",
    "KVQuiltError",
    "LayoutError",
    "LeaseError",
    "SizingError",
    "StoreCorruptError",
    "TicketError",
    "TransferError",
]


class KVQuiltError(Exception):
    """Base of all errors that kvquilt raises on purpose."""


class ConfigError(KVQuiltError, ValueError):
    """An option is unknown, of the wrong type or out of range."""


class LayoutError(KVQuiltError, ValueError):
    """Cache groups that cannot be served; names the group, the value and the reason."""


class SizingError(KVQuiltError, ValueError):
    """A byte budget that cannot hold one boundary, or that the machine cannot hold.

    least_bytes: the least budget that works, where that is what is wrong.
    """

    def __init__(self, text: str, *, least_bytes: int | None = None) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class LeaseError(KVQuiltError, RuntimeError):
    """A lease that is expired, foreign or already released."""


class TicketError(KVQuiltError, RuntimeError):
    """A ticket that is unknown or already ended."""


class StoreCorruptError(KVQuiltError, RuntimeError):
    """`Store.audit()` found counts that do not add up."""


class TransferError(KVQuiltError, RuntimeError):
    """A copy between the engine's tensors and slots could not be done."""


class BenchError(KVQuiltError, RuntimeError):
    """A benchmark could not be carried out: an engine did not start or did not come to rest."""
