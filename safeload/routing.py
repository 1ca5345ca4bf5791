"""Where the bytes of one weight file go, as they are read: to memory of its own, cast into the arena, or nowhere.

Receives the chunks of a file, in order, from the thread that reads it; and from another thread, at some time, what is
wanted of it. Until then all of it is kept. Each byte is at its place when `Target.is_ready` says so.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

import torch

from safeload.advising import punch
from safeload.holding import Memory, write_at
from safeload.paging import Backed
from safeload.reading import OpenedFile

__all__ = ["Cast", "Target", "Wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Elements of a file that are wanted as another dtype: `begin` and `end` in the file, `target` in the arena.

    `begin` is a multiple of the element's size, and so is the end of every chunk but the last.
    """

    begin: int
    end: int
    source_dtype: torch.dtype
    target: int
    target_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of one file: `ranges` of bytes as they are, sorted and apart from each other; and casts."""

    ranges: tuple[tuple[int, int], ...]
    casts: tuple[Cast, ...] = ()


class Target:
    """Where the bytes of one file go; called by the thread that reads it.

    Args:
        file: The file.
        memory: Where it is copied to; None where the file itself is mapped.
        start: What was read of it when it was opened, and is in the memory already.
        stopped: Set when nobody wants any of it any more.
    """

    def __init__(self, file: OpenedFile, memory: Memory | None, start: bytearray, stopped: threading.Event) -> None:
        self.file, self.memory, self.start, self._stopped = file, memory, start, stopped
        self._opened = os.fstat(file.fd)
        self.memory_fd = None if memory is None else memory.fd
        self.decided = threading.Event()
        self.news = threading.Condition()
        self._filled = 0  # bytes from the beginning that were taken
        self._behind = 0  # bytes from the beginning that were kept as they are before it was known what is wanted
        self._wanted: Wanted | None = None
        self._backed: Backed | None = None  # not as long as somebody may look at it: the kernel tells by small pages
        self._arena: Backed | None = None
        self._next_cast = 0

    def want(self, wanted: Wanted, arena: Backed) -> None:
        """Say what is wanted of the file.

        Args:
            wanted: What.
            arena: Where casts are written to; whoever gave it closes it.
        """
        with self.news:
            self._wanted, self._arena = wanted, arena
            self._back(wanted.ranges)
        self.decided.set()

    def want_all(self) -> None:
        """Keep all bytes as they are."""
        with self.news:
            if self._wanted is None:
                self._back(((0, self.file.size_bytes),))
        self.decided.set()

    def _back(self, ranges: Sequence[tuple[int, int]]) -> None:
        if self.memory_fd is not None:
            self._backed = Backed(self.memory_fd, ranges)

    def is_ready(self, end: int) -> bool:
        """Whether the bytes up to `end` are where they are wanted."""
        return self._filled >= end and (self._wanted is None or not self._behind)

    def describe(self) -> str:
        """Say how far the reading is."""
        return f"{self.file.path} is read, {self._filled} of {self.file.size_bytes} bytes so far"

    def __call__(self, offset: int, chunk: memoryview) -> None:
        """Bring the next bytes to where they are wanted.

        Args:
            offset: Where in the file they begin.
            chunk: The bytes.

        Raises:
            SourceError: There is no memory left for them.
            CancelledError: Nobody wants them any more.
        """
        self._refuse_late()
        with self.news:
            wanted = self._wanted
            if wanted is None:
                self._keep(offset, chunk)
        if wanted is not None:
            self._catch_up(wanted)
            self._copy(wanted, offset, chunk)
            self._cast(wanted, offset, chunk)
        with self.news:
            self._filled = offset + len(chunk)
            self.news.notify_all()

    def settle(self) -> None:
        """Finish after the last chunk, when it is decided what is wanted.

        Raises:
            CancelledError: Nobody wants it any more.
        """
        self.decided.wait()
        self._refuse_late()
        if self._wanted is not None:
            self._catch_up(self._wanted)
        self.close()
        with self.news:
            self.news.notify_all()

    def close(self) -> None:
        """Give back what helps to write, when the thread writes no more; the bytes stay. Twice is as once."""
        if self._backed is not None:
            self._backed.close()

    def has_changed(self) -> bool:
        """Whether something has written to the file since it was opened."""
        now = os.fstat(self.file.fd)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            return True
        # A file that is renamed over, unlinked, linked or given other rights has a new ctime, and its bytes as before.
        return now.st_ctime_ns != self._opened.st_ctime_ns and _entries_of(now) == _entries_of(self._opened)

    def _refuse_late(self) -> None:
        if self._stopped.is_set():  # a read that came back when nobody waited for it any more: the arena may be gone
            raise CancelledError

    def _keep(self, offset: int, chunk: memoryview) -> None:
        self._behind = offset + len(chunk)
        self._write(chunk, offset)

    def _write(self, data: memoryview, offset: int) -> None:
        if self._backed is not None:
            self._backed.write(data, offset, path=self.file.path)
        elif self.memory_fd is not None:
            write_at(self.memory_fd, data, offset, path=self.file.path)

    def _catch_up(self, wanted: Wanted) -> None:
        """Cast what was read before it was known to be wanted, and give back what is not wanted."""
        if not self._behind:
            return
        fd = self.file.fd if self.memory_fd is None else self.memory_fd
        if wanted.casts:
            private = mmap.MAP_PRIVATE
            with mmap.mmap(fd, self._behind, flags=private) as mapping, memoryview(mapping) as kept:
                self._cast(wanted, 0, kept)
        if self.memory_fd is not None:
            _punch(self.memory_fd, wanted.ranges, self._behind)
        self._behind = 0

    def _copy(self, wanted: Wanted, offset: int, chunk: memoryview) -> None:
        if self.memory_fd is None:
            return
        for begin, end in wanted.ranges:
            first, last = max(begin, offset), min(end, offset + len(chunk))
            if first < last:
                self._write(chunk[first - offset : last - offset], first)

    def _cast(self, wanted: Wanted, offset: int, chunk: memoryview) -> None:
        casts, at, stop = wanted.casts, self._next_cast, offset + len(chunk)
        while at < len(casts) and casts[at].begin < stop:
            first, last = max(casts[at].begin, offset), min(casts[at].end, stop)
            self._cast_piece(casts[at], first, chunk[first - offset : last - offset])
            if casts[at].end > stop:
                break
            at += 1
        self._next_cast = at

    def _cast_piece(self, cast: Cast, first: int, piece: memoryview) -> None:
        size = cast.source_dtype.itemsize  # chunks end at multiples of it: see `Cast`
        cast_bytes = torch.frombuffer(piece, dtype=cast.source_dtype).to(cast.target_dtype).view(torch.uint8)
        at = cast.target + (first - cast.begin) // size * cast.target_dtype.itemsize
        if self._arena is None:
            raise AssertionError("a cast that is wanted in no arena")
        self._arena.write(cast_bytes.numpy().data, at, path=self.file.path)


def _punch(fd: int, keep: Sequence[tuple[int, int]], end: int) -> None:
    """Give back the pages before `end` that none of the ranges touches."""
    at = 0
    for first, last in (*keep, (end, end)):
        begin, stop = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, min(first, end) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < stop:
            punch(fd, begin, stop)  # failing costs memory, nothing else
        at = max(at, last)


def _entries_of(info: os.stat_result) -> tuple[int, ...]:
    """Return what changes a file's ctime without a byte being written: its links, rights and owner."""
    return info.st_nlink, info.st_mode, info.st_uid, info.st_gid
