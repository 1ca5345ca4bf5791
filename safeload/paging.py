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
import errno
import functools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from safeload.advising import MADV_COLLAPSE, advise, libc
from safeload.holding import write_at

__all__ = ["Backed", "Trial", "Window", "huge_page_bytes"]

_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LARGEST_BYTES: Final = 32 * 1024**2  # on arm64 a huge page may have 512 MiB: no use for towers
_PROT_NONE: Final = 0
_MAP_FIXED_NOREPLACE: Final = 0x100000  # since Linux 4.17; before that the address is a wish, and may not be granted
_MAP_NOTHING: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | 0x4000  # MAP_NORESERVE
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_TRIES: Final = 8  # to be the first to map something at an address that was free
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


class Window:
    """A mapping of memory from its beginning, at an address that huge pages can be mapped at where there is one free.

    `buffer` are the bytes; the mapping ends with the last object that uses the buffer.

    Args:
        fd: The memory, or a file; may be closed afterwards.
        size_bytes: How much of it.
        shared: Whether what is written reaches the memory; else it stays in this mapping.
        writable: Whether it may be written to.

    Raises:
        OSError: The system does not map it. Nothing is left of it then.
    """

    def __init__(self, fd: int, size_bytes: int, *, shared: bool = False, writable: bool = True) -> None:
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.size_bytes = size_bytes
        self.address = _map_aligned(fd, size_bytes, access, flags)
        self.buffer = (ctypes.c_char * size_bytes).from_address(self.address)
        end = weakref.finalize(self.buffer, libc().munmap, self.address, size_bytes)
        end.atexit = False  # tensors may be in use until the process is gone


def _map_aligned(fd: int, size_bytes: int, access: int, flags: int) -> int:
    """Map a file at a multiple of a huge page's size; anywhere where there are none, or others always take the place.

    Never over what is mapped already, not even a placeholder: where such a call fails, the kernel may have unmapped
    that before, and what another thread maps there next would be unmapped along with the placeholder.
    """
    align_bytes = huge_page_bytes()
    for _ in range(_TRIES if align_bytes else 0):
        place = _free_place(size_bytes, align_bytes)
        address = libc().mmap(place, size_bytes, access, flags | _MAP_FIXED_NOREPLACE, fd, 0)
        if address != _MAP_FAILED:
            return int(address)
        if ctypes.get_errno() != errno.EEXIST:
            raise _error()
    return _mapped(None, size_bytes, access, flags, fd, 0)


def _free_place(size_bytes: int, align_bytes: int) -> int:
    """Return an address at which nothing is mapped just now."""
    room_bytes = size_bytes + align_bytes
    begin = _mapped(None, room_bytes, _PROT_NONE, _MAP_NOTHING, -1, 0)
    libc().munmap(begin, room_bytes)
    return -(-begin // align_bytes) * align_bytes


def _mapped(*arguments: int | None) -> int:
    address = libc().mmap(*arguments)
    if address == _MAP_FAILED:
        raise _error()
    return int(address)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class Trial:
    """Huge pages on trial: they are taken until some steps in a row cost more than small pages would.

    As a rule they cost least by far. But what is free in them is what a virtual machine gives back to its host, which
    has to find memory for every part of such a page again: then they cost five times as much as small ones, and will
    for the rest of a load. Nobody says beforehand which it is, so steps are timed.

    Args:
        most_s_per_byte: What small pages cost. More than that is dear.
        patience: The number of dear steps in a row that ends the trial.
    """

    def __init__(self, most_s_per_byte: float, *, patience: int) -> None:
        self._most_s_per_byte, self._patience = most_s_per_byte, patience
        self._dear = 0
        self.goes_on = True

    def note(self, seconds: float, size_bytes: int) -> None:
        """Take note of what a step in huge pages has cost.

        Args:
            seconds: How long it took.
            size_bytes: How much memory it was.
        """
        self._dear = self._dear + 1 if seconds > self._most_s_per_byte * size_bytes else 0
        self.goes_on = self.goes_on and self._dear < self._patience


class Backed:
    """Memory that is backed by huge pages just before it is filled; may be used by several threads.

    Whoever makes it closes it, when none of them writes to it any more.

    Args:
        fd: The memory, which must stay open as long as this is.
        ranges: What of it will be filled, begin and end in bytes. A huge page that is not wholly in one of them stays
            in small ones, so that no memory is used beyond what is wanted.
        owns_fd: Whether the descriptor is closed along with it.
    """

    def __init__(self, fd: int, ranges: Sequence[tuple[int, int]], *, owns_fd: bool = False) -> None:
        self._fd, self._owns_fd, self._lock = fd, owns_fd, threading.Lock()
        page = huge_page_bytes()
        found = [number for begin, end in ranges for number in range(-(-begin // page), end // page)] if page else []
        self._due = set(found)
        self._window: Window | None = None
        self._end = max(found, default=-1) + 1
        # What small pages cost is a constant here and not measured: they are made by the write itself, and those of a
        # measurement would stay small for every process that maps them. One dear step ends it, and it is the time that
        # has passed which counts: whoever reads and hashes waits for it.
        self._trial = Trial(_MOST_S_PER_BYTE, patience=1)

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
        """Give back the mapping, and the descriptor if it is its own; the pages stay. Twice is as once."""
        with self._lock:
            self._give_up()
            fd, self._fd = self._fd, -1
        if self._owns_fd and fd >= 0:
            os.close(fd)

    def _collapse(self, first: int) -> None:
        """Back a run of pages that are due, from `first` on; ask for none any more where that fails or takes long."""
        stop = first
        while stop in self._due and stop < first + _AHEAD_PAGES:
            stop += 1
        start = time.perf_counter()
        try:
            self._ask_for(first, stop)
        except OSError:  # a kernel that cannot, or not now; no huge page left; no memory left, as the write will tell
            self._give_up()
            return
        self._due.difference_update(range(first, stop))
        self._trial.note(time.perf_counter() - start, (stop - first) * huge_page_bytes())
        if not self._trial.goes_on:
            self._give_up()

    def _ask_for(self, first: int, stop: int) -> None:
        page = huge_page_bytes()
        if self._window is None:
            self._window = Window(self._fd, self._end * page, writable=False)
        for number in range(first, stop):
            os.posix_fallocate(self._fd, number * page, 1)
        base = self._window.address
        if not advise(base + first * page, base + stop * page, MADV_COLLAPSE):
            raise _error()

    def _give_up(self) -> None:
        self._due.clear()
        self._window = None
