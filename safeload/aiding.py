"""A thread that helps with memory while a load goes on: where it does not come to its end that costs time, no more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import torch

__all__ = ["Aid"]

_JOIN_S: Final = 5.0


class Aid:
    """Does `_run` in a thread until that has ended, or its `with` block ends.

    Args:
        segments: uint8 tensors `[size_bytes]`, kept until then.
        name: Of the thread.
    """

    def __init__(self, segments: Sequence[torch.Tensor], *, name: str) -> None:
        self._segments = tuple(segments)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Aid:
        """Begin; without a thread to be had nothing is done."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_JOIN_S)
        self._segments = ()

    def _run(self) -> None:
        raise NotImplementedError
