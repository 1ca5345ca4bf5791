"""Give fresh memory its pages ahead of the bytes that are received into it, of the kind that costs less just now.

A fresh page costs more than the bytes that go into it. As a rule huge pages cost least by far; but what is free in them
is what a virtual machine gives back to its host, which has to find memory for every part of such a page again: then
they cost five times as much as small ones. Nobody says beforehand which it is, so each step is timed, and where huge
pages are dear small ones are taken. Linux only, and from 5.14 on: elsewhere pages are made as the bytes arrive.

Receives memory that nobody has written to yet; changes no byte of it, also where bytes have arrived meanwhile.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from safeload.aiding import Aid
from safeload.mapping import ALIGN_BYTES
from safeload.paging import HUGE, POPULATE_WRITE, SMALL, advise

__all__ = ["Populating"]

_HUGE_PAGE_BYTES: Final = 2 * 1024**2
_STEP_BYTES: Final = 2 * _HUGE_PAGE_BYTES  # small: so much is lost where huge pages turn out to be dear
_MEASURED: Final = 2  # steps in small pages, to know what those cost
_DEAR_STEPS: Final = 2  # in a row: one alone may be chance


class Populating(Aid):
    """Populates memory in a thread until all of it has pages, or its `with` block ends.

    Args:
        segments: uint8 tensors `[size_bytes]`, one behind the other in memory that was mapped for them alone.
    """

    def __init__(self, segments: Sequence[torch.Tensor]) -> None:
        super().__init__(segments, name="safeload-populate")

    def _run(self) -> None:
        begin, end = _span(self._segments)
        try:
            self._populate(begin, end)
        finally:  # no page is made by this: it lets the kernel join small ones later, where that is configured
            if begin < end and sys.platform == "linux":
                advise(*_pages(begin, end), HUGE)

    def _populate(self, begin: int, end: int) -> None:
        choice = _Choice()
        for at, stop in _steps(begin, end) if sys.platform == "linux" else ():
            if self._stop.is_set():
                return
            start_s = time.thread_time()
            advise(at, stop, HUGE if choice.huge else SMALL)
            if not advise(at, stop, POPULATE_WRITE):  # a kernel that cannot, or no memory: told by who writes
                return
            if stop - at == _STEP_BYTES:  # else no measure for a step
                choice.note(time.thread_time() - start_s)


class _Choice:
    """Which pages to take next, from what the last ones have cost this thread."""

    def __init__(self) -> None:
        self._small_s: list[float] = []
        self._dear = 0

    @property
    def huge(self) -> bool:
        return len(self._small_s) >= _MEASURED and self._dear < _DEAR_STEPS

    def note(self, seconds: float) -> None:
        if not self.huge:
            self._small_s = [*self._small_s, seconds][:_MEASURED]
            return
        self._dear = self._dear + 1 if seconds > min(self._small_s) else 0


def _span(segments: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return where the memory of segments begins and ends; nothing where it is not one piece."""
    spans = [(segment.data_ptr(), segment.data_ptr() + segment.numel()) for segment in segments]
    if any(not 0 <= after[0] - before[1] < ALIGN_BYTES for before, after in pairwise(spans)):
        return 0, 0
    return (spans[0][0], spans[-1][1]) if spans else (0, 0)


def _pages(begin: int, end: int) -> tuple[int, int]:
    """Return the beginning of the first page of some memory and the end of the last."""
    return begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _steps(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut memory at multiples of a step, from the beginning of a page to the end of one."""
    if begin == end:
        return []
    first, last = _pages(begin, end)
    inner = range((first // _STEP_BYTES + 1) * _STEP_BYTES, last, _STEP_BYTES)
    return list(pairwise([first, *inner, last]))
