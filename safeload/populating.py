"""Give fresh memory its pages ahead of the bytes that are received into it, of the kind that costs less just now.

A fresh page costs more than the bytes that go into it, and a huge one less than small ones or far more: see
`safeload.paging.Trial`. So each step is timed, and where huge pages are dear small ones are taken. Linux only, and from
5.14 on: elsewhere pages are made as the bytes arrive.

Receives memory that nobody has written to yet; changes no byte of it, also where bytes have arrived meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from safeload.advising import MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise, whole_pages
from safeload.aiding import Aid
from safeload.mapping import ALIGN_BYTES
from safeload.paging import Trial, huge_page_bytes

__all__ = ["Populating"]

_STEP_PAGES: Final = 2  # huge ones; few: so much is lost where they turn out to be dear
_STEP_BYTES: Final = 4 * 1024**2  # where there are none
_MEASURED: Final = 2  # steps in small pages, to know what those cost
_PATIENCE: Final = 2  # dear steps in a row: nobody waits for this thread, and one alone may be chance


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
                advise(*whole_pages(begin, end), MADV_HUGEPAGE)

    def _populate(self, begin: int, end: int) -> None:
        choice, step_bytes = _Choice(), _step_bytes()
        for at, stop in _steps(begin, end, step_bytes) if sys.platform == "linux" else ():
            if self._stop.is_set():
                return
            start_s = time.thread_time()
            advise(at, stop, MADV_HUGEPAGE if choice.huge else MADV_NOHUGEPAGE)
            if not advise(at, stop, MADV_POPULATE_WRITE):  # a kernel that cannot, or no memory: told by who writes
                return
            if stop - at == step_bytes:  # else no measure for a step
                choice.note(time.thread_time() - start_s, step_bytes)


class _Choice:
    """Which pages to take next, from what the last ones have cost this thread: small ones first, to know what they do.

    The time of this thread counts: that it has to wait for others, on a machine that is busy, is no matter of pages.
    """

    def __init__(self) -> None:
        self._small_s: list[float] = []
        self._trial: Trial | None = None

    @property
    def huge(self) -> bool:
        return self._trial is not None and self._trial.goes_on

    def note(self, seconds: float, step_bytes: int) -> None:
        if self._trial is not None:
            self._trial.note(seconds, step_bytes)
        elif huge_page_bytes():
            self._small_s.append(seconds)
            if len(self._small_s) == _MEASURED:
                self._trial = Trial(min(self._small_s) / step_bytes, patience=_PATIENCE)


def _span(segments: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return where the memory of segments begins and ends; nothing where it is not one piece."""
    spans = [(segment.data_ptr(), segment.data_ptr() + segment.numel()) for segment in segments]
    if any(not 0 <= after[0] - before[1] < ALIGN_BYTES for before, after in pairwise(spans)):
        return 0, 0
    return (spans[0][0], spans[-1][1]) if spans else (0, 0)


def _step_bytes() -> int:
    return _STEP_PAGES * huge_page_bytes() or _STEP_BYTES


def _steps(begin: int, end: int, step_bytes: int) -> list[tuple[int, int]]:
    """Cut memory at multiples of a step, from the beginning of a page to the end of one."""
    if begin == end:
        return []
    first, last = whole_pages(begin, end)
    inner = range((first // step_bytes + 1) * step_bytes, last, step_bytes)
    return list(pairwise([first, *inner, last]))
