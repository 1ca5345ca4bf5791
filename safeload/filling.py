"""Read the weight files once, behind the caller's back, and bring their bytes to where they are wanted.

Receives an `OpenedCheckpoint`. Each chunk that is read is hashed, and written from the same buffer: into the file's own
memory, or cast and written into the arena. What is wanted may be told while the reading goes on (`want`), since it is
known only when the tower has been built; until then everything is kept.

`Filling.seen` is what the tower's library may look at meanwhile: memory that holds the whole header and, behind it,
nothing yet. Whoever lets it look has to make sure that it did not look further (`safeload.mapping.Mapped.looked_at`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from safeload.chunking import ChunkHasher, ChunkList
from safeload.errors import SourceError
from safeload.headers import HeaderWatch, parse_header_size
from safeload.holding import freeze, new_memory, require_memory, write_at
from safeload.paging import Backed
from safeload.reading import OpenedFile, copy_hashed, read_start
from safeload.routing import Target, Wanted
from safeload.sealing import OnBytes, OpenedCheckpoint, Progress, SealedCheckpoint, SealedFile, header_watches, path_of
from safeload.waiting import Check, Workers, wait_for

__all__ = ["Filling"]

_THREADS: Final = 4  # files at a time; each has one more thread that hashes
_PATIENCE_S: Final = 1.0  # for a read that goes on when nobody wants it any more
_START_ROUND_BYTES: Final = 1 << 17  # twice the 64 KiB that the kernel enters along with a page that is read
_PEEK_BYTES: Final = 512


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
        self._arena: Backed | None = None
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

    def _prepare(self, file: OpenedFile) -> Target:
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
        return Target(file, memory, start, self._progress.stopped)

    def _seen(self, target: Target) -> SealedFile:
        watches = header_watches(target.file) if self.headers else []
        for watch in watches:
            watch.add(memoryview(target.start))
        return _sealed(target, {}, watches)

    def start(self) -> None:
        """Begin to read; again and again does no harm."""
        if not self._futures:
            self._futures = [self._workers.submit(self._read, target) for target in self._targets]

    def want(self, wanted: Sequence[Wanted], arena: Backed) -> None:
        """Say what is wanted of each weight file, in their order; without it all bytes are kept as they are.

        Args:
            wanted: What.
            arena: Where casts are written to. It is closed when the reading has ended, however that ends.
        """
        self._arena = arena
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
        if any(target.has_changed() for target in self._targets):
            return None
        self.close()
        files = [
            replace(self._seen(target), digests=MappingProxyType({"sha256": digest}))
            for target, digest in zip(self._targets, sha256, strict=True)
        ]
        return self._opened.with_weights(files)

    def close(self) -> None:
        """Stop reading, and close what helped to write.

        A thread stuck in a read is left behind, and what it uses stays open until it returns.
        """
        if self._progress.stopped.is_set():
            return
        self._progress.stopped.set()
        for target in self._targets:
            target.decided.set()
        used = ExitStack()
        for target in self._targets:
            used.callback(target.close)
        if self._arena is not None:
            used.callback(self._arena.close)
        if not self._workers.close(patience_s=_PATIENCE_S):
            for stack in (self._opened.source.opened, self._opened.source.owner):
                used.push(stack.pop_all())
        self._workers.when_ended(used.close)  # now, as a rule

    def __enter__(self) -> Filling:
        """Return itself; the reading begins with `start`."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop reading."""
        self.close()

    def _read(self, target: Target) -> SealedFile:
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
        if target.memory is None and target.has_changed():
            raise SourceError(f"{file.path}: changed while it was read: something writes to it.", path=str(file.path))
        if target.memory is not None:
            freeze(target.memory)
        return _sealed(target, digests, watches)


def _sealed(target: Target, digests: Mapping[str, str], watches: Sequence[HeaderWatch]) -> SealedFile:
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
