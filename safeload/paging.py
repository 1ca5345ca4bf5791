"""Huge pages: memory that the kernel gives out, and maps, two megabytes at a time.

A fresh page of 4 KiB costs a process more than the bytes that go into it, and filled memory costs every process that
maps it a fault for each few pages. Receives descriptors of memory and the ranges that will be filled. What is asked for
here the kernel may refuse at any time, and then all is as it would be without: slower.

For memory with a descriptor Linux gives huge pages by MADV_COLLAPSE (since 6.1, whatever is configured for shared
memory), where one page of the two megabytes is there already and the mapping lies in the address space as the bytes lie
in the file, modulo two megabytes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from safeload.holding import write_at

__all__ = ["HUGE", "POPULATE_READ", "POPULATE_WRITE", "SMALL", "Backed", "Window", "advise", "huge_page_bytes", "knows"]

HUGE: Final = 14  # advice of Linux's madvise(2), by its number: python's mmap does not name all of it
SMALL: Final = 15
POPULATE_READ: Final = 22  # since Linux 5.14, as the next
POPULATE_WRITE: Final = 23
_COLLAPSE: Final = 25

_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LARGEST_BYTES: Final = 32 * 1024**2  # on arm64 a huge page may have 512 MiB: no use for towers
_MAP_FIXED: Final = 0x10
_PLACEHOLDER: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | 0x4000  # MAP_NORESERVE
_AHEAD_PAGES: Final = 4  # asked for at a time: each call takes its time, and makes the kernel drain lists on every core
_MOST_S_PER_BYTE: Final = 0.3e-9  # less than small pages cost: a virtual machine may have to ask its host for huge ones


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of this system's huge pages; 0 where it has none, or none of a useful size."""
    try:
        size_bytes = int(_SIZE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return size_bytes if size_bytes <= _LARGEST_BYTES else 0


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def advise(begin: int, end: int, advice: int) -> bool:
    """Advise the kernel of memory of this process, and let other threads run meanwhile, as `mmap.madvise` does not.

    Args:
        begin: Address; a multiple of the page's size.
        end: Where it ends.
        advice: One of those above.

    Returns:
        Whether the kernel has taken it.
    """
    return int(_libc().madvise(begin, end - begin, advice)) == 0


@functools.cache
def knows(advice: int) -> bool:
    """Return whether this kernel knows an advice."""
    return sys.platform == "linux" and advise(0, 0, advice)  # of no memory at all


class Window:
    """A mapping of memory from its beginning, at an address that huge pages can be mapped at.

    `buffer[shift : shift + size_bytes]` are the bytes; the mapping ends with the last object that uses the buffer.

    Args:
        fd: The memory, or a file; may be closed afterwards.
        size_bytes: How much of it.
        shared: Whether what is written reaches the memory; else it stays in this mapping.
        writable: Whether it may be written to.

    Raises:
        OSError: The system does not map it.
    """

    def __init__(self, fd: int, size_bytes: int, *, shared: bool = False, writable: bool = True) -> None:
        align_bytes = huge_page_bytes() or mmap.PAGESIZE
        self.size_bytes = size_bytes
        # A place in the address space, which python gives back as a whole when nobody uses it any more.
        self.buffer = mmap.mmap(-1, size_bytes + align_bytes, flags=_PLACEHOLDER)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.address = -(-begin // align_bytes) * align_bytes
        self.shift = self.address - begin
        flags = _MAP_FIXED | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc().mmap(self.address, size_bytes, access, flags, fd, 0) != self.address:
            raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class Backed:
    """Memory that is backed by huge pages just before it is filled; may be used by several threads.

    Args:
        fd: The memory, which must stay open as long as this is used.
        ranges: What of it will be filled, begin and end in bytes. A huge page that is not wholly in one of them stays
            in small ones, so that no memory is used beyond what is wanted.
    """

    def __init__(self, fd: int, ranges: Sequence[tuple[int, int]]) -> None:
        self._fd, self._lock = fd, threading.Lock()
        page = huge_page_bytes()
        found = [number for begin, end in ranges for number in range(-(-begin // page), end // page)] if page else []
        self._due = set(found)
        self._window: Window | None = None
        self._end = max(found, default=-1) + 1

    def write(self, data: memoryview, offset: int, *, path: Path) -> None:
        """Write bytes to their place.

        Args:
            data: Contiguous bytes.
            offset: Where in the memory.
            path: What is copied, for messages.

        Raises:
            SourceError: There is no memory left for it.
        """
        self.prepare(offset, offset + len(data))
        write_at(self._fd, data, offset, path=path)

    def prepare(self, begin: int, end: int) -> None:
        """Have huge pages behind a range, as far as the kernel gives any. What is there already stays as it is."""
        if not self._due:
            return
        page = huge_page_bytes()
        with self._lock:
            for number in range(begin // page, -(-end // page)):
                if number in self._due:
                    self._collapse(number)

    def close(self) -> None:
        """Give back the mapping; the pages stay."""
        with self._lock:
            self._give_up()

    def _collapse(self, first: int) -> None:
        """Back a run of pages that are due, from `first` on; ask for none any more where that fails or takes long."""
        stop = first
        while stop in self._due and stop < first + _AHEAD_PAGES:
            stop += 1
        start = time.perf_counter()
        try:
            self._ask_for(first, stop)
        except OSError:  # a kernel that cannot, or no huge page left; no memory left, as the write will tell
            self._give_up()
        else:
            self._due.difference_update(range(first, stop))
            if time.perf_counter() - start > _MOST_S_PER_BYTE * (stop - first) * huge_page_bytes():
                self._give_up()

    def _ask_for(self, first: int, stop: int) -> None:
        page = huge_page_bytes()
        if self._window is None:
            self._window = Window(self._fd, self._end * page, writable=False)
        for number in range(first, stop):
            os.posix_fallocate(self._fd, number * page, 1)
        base = self._window.address
        if not advise(base + first * page, base + stop * page, _COLLAPSE):
            raise _error()

    def _give_up(self) -> None:
        self._due.clear()
        self._window = None
