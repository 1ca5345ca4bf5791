"""Enter the pages of mapped memory into this process's page table while the load waits anyway.

A page that is in memory still costs a fault when a process first looks at it: a tenth of a second a gigabyte, which the
first forward would pay. Receives segments and who knows whether their bytes are there; has their pages entered behind
whoever fills the memory and never before it: a page that is not there yet would be made, or read from a disk out of
turn. Where the kernel cannot be asked for that, one byte is looked at in each window that it enters together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from safeload.advising import MADV_POPULATE_READ, advise, knows, whole_pages
from safeload.aiding import Aid
from safeload.mapping import WINDOW_BYTES

__all__ = ["Touching"]

_STEP_BYTES: Final = 32 * 1024**2  # entered at a time: the address space is locked meanwhile
_PAUSE_S: Final = 0.005


class Touching(Aid):
    """Looks at memory in a thread until all of it was looked at, or its `with` block ends.

    Args:
        segments: uint8 tensors `[size_bytes]`, views of mapped memory.
        is_there: Says of a segment, by number, whether its bytes are in memory.
    """

    def __init__(self, segments: Sequence[torch.Tensor], is_there: Callable[[int], bool]) -> None:
        super().__init__(segments, name="safeload-touch")
        self._is_there = is_there

    def _run(self) -> None:
        for number, segment in enumerate(self._segments):
            while not self._is_there(number):
                if self._stop.wait(_PAUSE_S):
                    return
            for begin in range(0, segment.numel(), _STEP_BYTES):
                _enter(segment[begin : begin + _STEP_BYTES])
                if self._stop.is_set():
                    return


def _enter(segment: torch.Tensor) -> None:
    begin, end = segment.data_ptr(), segment.data_ptr() + segment.numel()
    if knows(MADV_POPULATE_READ):  # a file that was cut short is an error of this, where a look would end the process
        advise(*whole_pages(begin, end), MADV_POPULATE_READ)
    else:
        segment[::WINDOW_BYTES].sum()
