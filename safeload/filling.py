"""Read the weight files once, behind the caller's back, and bring their bytes to where they are wanted.

Receives an `OpenedCheckpoint`. Each chunk that is read is hashed, and written from the same buffer: into the file's own
memory, or cast and written into the arena. What is wanted may be told while the reading goes on (`want`), since it is
known only when the tower has been built; until then everything is kept.

`Filling.seen` is what the tower's library may look at meanwhile: memory that holds the whole header and, behind it,
nothing yet. Whoever lets it look has to make sure that it did not look further (`safeload.mapping.Mapped.looked_at`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch

from safeload.chunking import ChunkHasher, ChunkList
from safeload.errors import SourceError
from safeload.headers import HeaderWatch, parse_header_size
from safeload.holding import Memory, freeze, new_memory, require_memory, write_at
from safeload.paging import Backed
from safeload.reading import OpenedFile, copy_hashed, read_start
from safeload.sealing import OnBytes, OpenedCheckpoint, Progress, SealedCheckpoint, SealedFile, header_watches, path_of
from safeload.waiting import Check, Workers, wait_for

__all__ = ["Cast", "Filling", "Wanted"]

_THREADS: Final = 4  # files at a time; each has one more thread that hashes
_PATIENCE_S: Final = 1.0  # for a read that goes on when nobody wants it any more
_START_ROUND_BYTES: Final = 1 << 17  # twice the 64 KiB that the kernel enters along with a page that is read
_PEEK_BYTES: Final = 512
_PUNCH: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_PAGE_BYTES: Final = 4096


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


class _Target:
    """Where the bytes of one file go; called by the thread that reads it."""

    def __init__(self, file: OpenedFile, memory: Memory | None, start: bytearray, stopped: threading.Event) -> None:
        self.file, self.memory, self.start, self._stopped = file, memory, start, stopped
        self.stamp = _stamp(file.fd)
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
        """Finish after the last chunk, when it is decided what is wanted."""
        self.decided.wait()
        self._refuse_late()
        if self._wanted is not None:
            self._catch_up(self._wanted)
        if self._backed is not None:
            self._backed.close()
        with self.news:
            self.news.notify_all()

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
    libc = ctypes.CDLL(None, use_errno=True)
    at = 0
    for first, last in (*keep, (end, end)):
        begin, stop = -(-at // _PAGE_BYTES) * _PAGE_BYTES, min(first, end) // _PAGE_BYTES * _PAGE_BYTES
        if begin < stop:  # failing costs memory, nothing else
            libc.fallocate(fd, _PUNCH, ctypes.c_longlong(begin), ctypes.c_longlong(stop - begin))
        at = max(at, last)


class Filling:
    """Reads all weight files of an opened checkpoint, once, in threads of its own; a context manager.

    Args:
        opened: The checkpoint.
        on_bytes: Called with the weight bytes read so far and their total, from several threads, one at a time.
        headers: Whether `seen` is to show the headers of the weight files, so that they can be looked at early.
        chunks: Whether to compute the digests of the files' chunks on the way: see `chunk_lists`.

    Raises:
        SourceError: A file cannot be read.
        CheckpointError: A weight file does not begin as a safetensors file does.

    Ranks: source only.
    """

    def __init__(
        self, opened: OpenedCheckpoint, *, on_bytes: OnBytes | None = None, headers: bool = True, chunks: bool = False
    ) -> None:
        self._opened, self.headers, self._chunks = opened, headers, chunks
        self.chunk_lists: dict[str, ChunkList] = {}
        if opened.copies:
            require_memory(sum(file.size_bytes for file in opened.shards), what=str(opened.source.checkpoint.folder))
        self._progress = Progress(total_bytes=sum(file.size_bytes for file in opened.shards), on_bytes=on_bytes)
        self._targets = tuple(self._prepare(file) for file in opened.shards)
        self._workers = Workers(min(_THREADS, len(self._targets)), name="safeload-read")
        self._futures: list[Future[SealedFile]] = []
        self.seen = SealedCheckpoint(
            checkpoint=opened.source.checkpoint,
            files=(*opened.small, *(self._seen(target) for target in self._targets)),
            index=opened.index,
            owner=opened.source.owner,
        )

    @property
    def copies(self) -> bool:
        """Whether the weights are copied into memory of their own; else the library looks at the files themselves."""
        return self._opened.copies

    @property
    def header_bytes(self) -> tuple[int, ...]:
        """How much of each weight file may be looked at before all of it is there."""
        return tuple(len(target.start) for target in self._targets)

    @property
    def memory_fds(self) -> tuple[int, ...]:
        """What the library maps, by weight file: sealed memory to be, or the file itself."""
        return tuple(file.fd for file in self.seen.files[len(self._opened.small) :])

    def _prepare(self, file: OpenedFile) -> _Target:
        start = bytearray()
        os.lseek(file.fd, 0, os.SEEK_SET)
        if self.headers:
            peek = os.pread(file.fd, _PEEK_BYTES, 0)
            length = parse_header_size(peek, path=str(file.path), size_bytes=file.size_bytes) + 8
            start = read_start(file, -(-length // _START_ROUND_BYTES) * _START_ROUND_BYTES + _START_ROUND_BYTES)
        memory = None
        if self._opened.copies:
            memory = new_memory(file.name, self._opened.source.owner)
            os.ftruncate(memory.fd, file.size_bytes)
            write_at(memory.fd, memoryview(start), 0, path=file.path)
        return _Target(file, memory, start, self._progress.stopped)

    def _seen(self, target: _Target) -> SealedFile:
        watches = header_watches(target.file) if self.headers else []
        for watch in watches:
            watch.add(memoryview(target.start))
        return _sealed(target, {}, watches)

    def start(self) -> None:
        """Begin to read; again and again does no harm."""
        if not self._futures:
            self._futures = [self._workers.submit(self._read, target) for target in self._targets]

    def want(self, wanted: Sequence[Wanted], arena: Backed) -> None:
        """Say what is wanted of each weight file, in their order; without it all bytes are kept as they are."""
        for target, each in zip(self._targets, wanted, strict=True):
            target.want(each, arena)

    def wait_until(self, number: int, end: int, *, check: Check | None = None) -> None:
        """Wait until the bytes of a weight file are where they are wanted, up to `end`.

        Args:
            number: The file's place among the weight files.
            end: In the file.
            check: Called now and then; what it raises ends the wait.
        """
        self.start()
        target = self._targets[number]
        with target.news:
            while not target.is_ready(end) and not self._futures[number].done():
                target.news.wait(0.5)
                if check is not None:
                    check(target.describe())
        if self._futures[number].done():
            self._futures[number].result()

    def finish(self, check: Check | None = None) -> SealedCheckpoint:
        """Wait until all is read and sealed; the first failure in the order of the files ends all.

        Args:
            check: Called now and then; what it raises ends the wait, also for a read that never returns.

        Returns:
            The checkpoint with the digests of what was read. The caller owns it.

        Raises:
            SourceError: A file cannot be read, or it was changed while it was read.
        """
        self.start()
        for target in self._targets:
            target.want_all()
        try:
            pairs = zip(self._futures, self._targets, strict=True)
            files = [wait_for(future, check=check, doing=target.describe) for future, target in pairs]
        finally:
            self.close()
        return self._opened.with_weights(files)

    def accept(self, sha256: Sequence[str]) -> SealedCheckpoint | None:
        """Take the files as read without reading them: others have compared their chunks.

        Args:
            sha256: What each weight file is known to have, in their order.

        Returns:
            The checkpoint, which the caller owns; None where a file has changed since it was opened.
        """
        if any(_stamp(target.file.fd) != target.stamp for target in self._targets):
            return None
        self.close()
        files = [
            replace(self._seen(target), digests=MappingProxyType({"sha256": digest}))
            for target, digest in zip(self._targets, sha256, strict=True)
        ]
        return self._opened.with_weights(files)

    def close(self) -> None:
        """Stop reading. A thread stuck in a read is left behind, and what it uses stays open until it returns."""
        if self._progress.stopped.is_set():
            return
        self._progress.stopped.set()
        for target in self._targets:
            target.decided.set()
        if not self._workers.close(patience_s=_PATIENCE_S):
            used = ExitStack()
            for stack in (self._opened.source.opened, self._opened.source.owner):
                used.push(stack.pop_all())
            self._workers.when_ended(used.close)

    def __enter__(self) -> Filling:
        """Return itself; the reading begins with `start`."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop reading."""
        self.close()

    def _read(self, target: _Target) -> SealedFile:
        file = target.file
        hasher = ChunkHasher() if self._chunks else None
        watches = header_watches(file)
        if hasattr(os, "posix_fadvise"):  # cold files: let the kernel read far ahead
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digests = copy_hashed(
            file,
            target,
            start=target.start,
            git_sha1=self._opened.source.wants_git_sha1(file.name),
            on_chunk=[*(watch.add for watch in watches), *([hasher.add] if hasher else []), self._progress.add],
        )
        if hasher is not None:
            self.chunk_lists[file.name] = hasher.result()
        target.settle()
        if target.memory is None and _stamp(file.fd) != target.stamp:
            raise SourceError(f"{file.path}: changed while it was read: something writes to it.", path=str(file.path))
        if target.memory is not None:
            freeze(target.memory)
        return _sealed(target, digests, watches)


def _sealed(target: _Target, digests: Mapping[str, str], watches: Sequence[HeaderWatch]) -> SealedFile:
    file, memory = target.file, target.memory
    return SealedFile(
        name=file.name,
        fd=file.fd if memory is None else memory.fd,
        path=path_of(file) if memory is None else memory.path,
        size_bytes=file.size_bytes,
        digests=MappingProxyType(dict(digests)),
        link=file.link,
        header=watches[0].result() if watches else None,
    )


def _stamp(fd: int) -> tuple[int, int, int]:
    info = os.fstat(fd)
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns
