"""Nothing of ours may stop the engine: hooks that fail give a legal answer instead."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["guarded"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def guarded(
    fallback: Callable[..., Any],
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Decorate a hook: if it raises, log once per hook and cause, count it, and answer with
    `fallback(self, *args)`. The owner offers `on_hook_error(hook, error) -> bool` (log it?)."""

    def decorate(hook: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Answer:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # whatever it is, the engine goes on without us
                if self.on_hook_error(hook.__name__, error):
                    logger.exception("kvquilt: %s failed; the engine goes on without it", hook.__name__)
                answer: Answer = fallback(self, *args, **kwargs)
                return answer

        return call

    return decorate
