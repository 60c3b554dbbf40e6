"""Keeps the engine's chatter out of the result: JSON on stdout stays JSON."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

__all__ = ["quiet_environment", "stdout_to_stderr"]


def quiet_environment() -> None:
    """Set what the engine and torch read when they are first imported; what the user set stays."""
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    # What is said before the engine reads its logging level.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # The engine's own use of deprecated names, which nobody who reads a table can mend.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Whatever is written to file descriptor 1 meanwhile, by Python or by C, goes to 2."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
