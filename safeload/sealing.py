"""Open each file once, read it once, hash while copying into memory that nobody can change.

Receives a `Checkpoint` and its `Manifest`; gives a `SealedCheckpoint`, whose bytes are the bytes that were hashed, for
good: what happens to the folder afterwards does not matter. The index is parsed from its sealed bytes, and only shards
it names are read. Nothing is compared here but sizes, which are refused before a byte is read where they are known.

On Linux a file's bytes go into a memfd sealed against writing, shrinking and growing, and `open_folder` shows it to the
unmodified loader as a link to `/proc/self/fd/N`. Elsewhere they go into a private file (see `holding`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Literal

from safeload.comparing import compare, require_covered
from safeload.digests import Manifest, digest_of_all
from safeload.errors import CheckpointError, IntegrityError, SourceError
from safeload.headers import Header, HeaderWatch
from safeload.holding import Memory, freeze, has_sealed_memory, new_memory, require_memory, show
from safeload.indexes import WeightIndex, describe_junk, parse_index, parse_json
from safeload.reading import OpenedFile, copy_hashed, open_regular, read_at, writes_to
from safeload.resolving import Checkpoint, require_known_weights
from safeload.waiting import Workers

__all__ = [
    "OnBytes",
    "OpenedCheckpoint",
    "Progress",
    "SealedCheckpoint",
    "SealedFile",
    "SourceFolder",
    "header_watches",
    "open_checkpoint",
    "open_folder",
    "path_of",
    "seal",
]

OnBytes = Callable[[int, int], None]

_SHOWN: Final = 10
_THREADS: Final = 4  # files at a time; each has one more thread that hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """One file of the checkpoint in memory that nobody can change.

    `fd` is owned by the `SealedCheckpoint` and closed with it; a mapping made before stays valid. `path` is set where
    the memory is a private file. `link` is where the folder's entry pointed, when it was a symbolic link. `digests` are
    by algorithm, "git-sha1" where it was asked for. `header` is that of a safetensors file, or what is wrong with it,
    which `examine` raises.
    """

    name: str
    fd: int
    size_bytes: int
    digests: Mapping[str, str]
    path: Path | None = None
    link: str | None = None
    header: Header | CheckpointError | None = None

    @property
    def sha256(self) -> str:
        """The sha256 of the bytes, in hexadecimal."""
        return self.digests["sha256"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedCheckpoint:
    """All files of a load, each read once. Owns their descriptors until `close`, or the end of its `with` block."""

    checkpoint: Checkpoint
    files: tuple[SealedFile, ...]
    index: WeightIndex | None
    owner: ExitStack

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, as in the source folder."""
        return tuple(file.name for file in self.files)

    @property
    def weight_files(self) -> tuple[SealedFile, ...]:
        """The files that hold tensors, in the order of the index."""
        names = self.index.shards if self.index else (self.checkpoint.weights,)
        return tuple(self.file(str(name)) for name in names)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names in the folder that `open_folder` shows, of the files that hold tensors."""
        return tuple(_names_for_loader(self.checkpoint, file.name)[0] for file in self.weight_files)

    @property
    def bytes_read(self) -> int:
        """How many bytes were read from the source, all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """One sha256 for the whole: over the sorted lines `sha256  name` of its files, as `sha256sum` prints them."""
        return digest_of_all({file.name: file.sha256 for file in self.files})

    @property
    def digests(self) -> Mapping[str, Mapping[str, str]]:
        """The digests of what was read, by name and then by algorithm, for `verify`."""
        return {file.name: file.digests for file in self.files}

    def file(self, name: str) -> SealedFile:
        """Return the file of this name; `KeyError` when it is not part of the load."""
        for file in self.files:
            if file.name == name:
                return file
        raise KeyError(name)

    def read(self, name: str, *, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """Return the sealed bytes of a file.

        Args:
            name: Name in the source folder.
            offset: Where to begin.
            size_bytes: How many bytes at most; None is all that follow.

        Returns:
            The bytes, those that were hashed.
        """
        file = self.file(name)
        left_bytes = max(0, file.size_bytes - offset)
        return read_at(file.fd, left_bytes if size_bytes is None else min(left_bytes, size_bytes), offset)

    def close(self) -> None:
        """Close the descriptors. Tensors that map the sealed memory keep it alive and stay valid."""
        self.owner.close()

    def __enter__(self) -> SealedCheckpoint:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoint:
    """All files of a load, opened: the small ones read and sealed, the weights not read yet.

    `source` owns the descriptors. `copies` says whether the weights are to be copied into sealed memory.
    """

    source: SourceFolder
    small: tuple[SealedFile, ...]
    index: WeightIndex | None
    shards: tuple[OpenedFile, ...]
    copies: bool

    def with_weights(self, weights: Sequence[SealedFile]) -> SealedCheckpoint:
        """Return the checkpoint with its weight files; the caller owns it from here on."""
        return SealedCheckpoint(
            checkpoint=self.source.checkpoint,
            files=(*self.small, *weights),
            index=self.index,
            owner=self.source.owner.pop_all(),
        )


@contextmanager
def open_checkpoint(
    checkpoint: Checkpoint, manifest: Manifest, *, memory: Literal["sealed", "mapped"] = "sealed"
) -> Iterator[OpenedCheckpoint]:
    """Open every file that the load needs, once; read and seal all but the weights.

    Args:
        checkpoint: What is needed, by name.
        manifest: Sizes it gives are compared before anything is read; its algorithms are computed beside sha256.
        memory: "mapped" copies nothing and keeps the opened files themselves, for storage that nobody writes to.

    Yields:
        The opened files; those not passed on by `with_weights` are closed at the end.

    Raises:
        SourceError: A file is missing, not a regular file, unreadable, or changed its size while it was read.
        IntegrityError: A size is not the one in the manifest.
        CheckpointError: The index or the config is malformed.

    Ranks:
        Source rank only.
    """
    with ExitStack() as owner, ExitStack() as opened:
        source = SourceFolder(
            checkpoint=checkpoint, manifest=manifest, owner=owner, opened=owner if memory == "mapped" else opened
        )
        copies = memory == "sealed"
        small = source.read_all(source.open_all((*checkpoint.small, *filter(None, [checkpoint.index]))), copies=copies)
        first = SealedCheckpoint(checkpoint=checkpoint, files=small, index=None, owner=owner)
        compare(manifest, first.digests)  # before they are interpreted
        if "config.json" in first.names:
            require_known_weights(parse_json(first.read("config.json"), path="config.json"), checkpoint)
        index = parse_index(first.read(checkpoint.index), path=checkpoint.index) if checkpoint.index else None
        require_covered(manifest, index.shards if index else ())
        shards = source.open_all(index.shards if index else (str(checkpoint.weights),))
        yield OpenedCheckpoint(source=source, small=small, index=index, shards=tuple(shards), copies=copies)


def seal(
    checkpoint: Checkpoint,
    manifest: Manifest,
    *,
    memory: Literal["sealed", "mapped"] = "sealed",
    on_bytes: OnBytes | None = None,
) -> SealedCheckpoint:
    """Read every file that the load needs once, into memory that nobody can change, hashing on the way.

    Args:
        checkpoint: What is needed, by name.
        manifest: Sizes it gives are compared before anything is read; its algorithms are computed beside sha256.
        memory: "mapped" copies nothing and keeps the opened file itself, for storage that nobody writes to.
        on_bytes: Called with the weight bytes read so far and their total, from several threads, one at a time.

    Returns:
        The sealed files. The caller owns them: use it in a `with` block or call `close`.

    Raises:
        SourceError: A file is missing, not a regular file, unreadable, or changed its size while it was read; or there
            is not the memory for a copy.
        IntegrityError: A size, or the digest of a small file, is not the one in the manifest.
        CheckpointError: The index or the config is malformed.

    Ranks:
        Source rank only.
    """
    with open_checkpoint(checkpoint, manifest, memory=memory) as opened:
        if opened.copies:
            require_memory(sum(file.size_bytes for file in opened.shards), what=str(checkpoint.folder))
        return opened.with_weights(opened.source.read_all(opened.shards, copies=opened.copies, on_bytes=on_bytes))


@contextmanager
def open_folder(sealed: SealedCheckpoint) -> Iterator[Path]:
    """Show the sealed files as a folder that an unmodified `from_pretrained` loads from, and nothing else.

    Args:
        sealed: Must stay open while the folder is in use. Tensors that were mapped from it outlive both.

    Yields:
        A private folder (mode 0700) of links to the sealed memory, under the names the loaders look for. It is valid
        in this process only and removed at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="safeload-"))
    try:
        for file in sealed.files:
            for name in _names_for_loader(sealed.checkpoint, file.name):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                show(file.fd, file.path, target)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _names_for_loader(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    return checkpoint.load_as if name in (checkpoint.weights, checkpoint.index) else (name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFolder:
    """The source folder; `owner` owns the files opened there and the memory they were copied to."""

    checkpoint: Checkpoint
    manifest: Manifest
    owner: ExitStack
    opened: ExitStack

    def open_all(self, names: Sequence[str]) -> list[OpenedFile]:
        """Open all files and check their sizes before any is read; what is missing is listed all at once."""
        files: list[OpenedFile] = []
        missing: dict[str, SourceError] = {}
        for name in names:
            try:
                files.append(open_regular(self.checkpoint.folder / name, name=name))
            except SourceError as error:
                missing[str(self.checkpoint.folder / name)] = error
            else:
                self.opened.callback(os.close, files[-1].fd)
        if missing:
            message = " ".join(error.message for error in list(missing.values())[:_SHOWN])
            message += f" And {len(missing) - _SHOWN} more." if len(missing) > _SHOWN else ""
            first = next(iter(missing))
            raise SourceError(message, path=first, looked_for=list(missing)) from missing[first]
        for file in files:
            self._check_size(file)
        return files

    def _check_size(self, file: OpenedFile) -> None:
        expected = self.manifest.entries.get(file.name)
        if expected is None or expected.size_bytes in (None, file.size_bytes):
            return
        junk = describe_junk(read_at(file.fd, 512, 0))
        raise IntegrityError(
            f"{file.path}: {file.size_bytes} bytes, {self.manifest.source} says {expected.size_bytes}: "
            f"{f'this is {junk}' if junk else 'truncated, or another file; download it again'}.",
            path=str(file.path),
            algorithm="size",
            expected=str(expected.size_bytes),
            actual=str(file.size_bytes),
            provenance=self.manifest.provenance,
        )

    def read_all(
        self, files: Sequence[OpenedFile], *, copies: bool, on_bytes: OnBytes | None = None
    ) -> tuple[SealedFile, ...]:
        """Read opened files, several at a time; the first failure in their order ends them all."""
        progress = Progress(total_bytes=sum(file.size_bytes for file in files), on_bytes=on_bytes)
        targets = [new_memory(file.name, self.owner) if copies else None for file in files]
        workers = Workers(_THREADS, name="safeload-read")
        try:
            futures = [workers.submit(self._read, *pair, progress) for pair in zip(files, targets, strict=True)]
            return tuple(future.result() for future in futures)
        except BaseException:
            progress.stopped.set()
            raise
        finally:
            workers.close()

    def wants_git_sha1(self, name: str) -> bool:
        """Whether the manifest holds this file to git's blob id."""
        expected = self.manifest.entries.get(name)
        return expected is not None and expected.algorithm == "git-sha1"

    def _read(self, file: OpenedFile, target: Memory | None, progress: Progress) -> SealedFile:
        sink = None if target is None else writes_to(target.fd, path=file.path)
        watches = header_watches(file)
        chunks = [*(watch.add for watch in watches), progress.add]
        digests = copy_hashed(file, sink, git_sha1=self.wants_git_sha1(file.name), on_chunk=chunks)
        if target is not None:
            freeze(target)
        return SealedFile(
            name=file.name,
            fd=target.fd if target else file.fd,
            path=target.path if target else path_of(file),
            size_bytes=file.size_bytes,
            digests=MappingProxyType(digests),
            link=file.link,
            header=watches[0].result() if watches else None,
        )


def header_watches(file: OpenedFile) -> list[HeaderWatch]:
    """Return what has to see each chunk of a safetensors file; none for other files."""
    if not file.name.endswith(".safetensors"):
        return []
    return [HeaderWatch(path=str(file.path), size_bytes=file.size_bytes)]


class Progress:
    """Adds up what all threads have read; raises in every thread once one has failed."""

    def __init__(self, *, total_bytes: int, on_bytes: OnBytes | None) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._done_bytes, self._total_bytes, self._on_bytes = 0, total_bytes, on_bytes

    def add(self, chunk: memoryview) -> None:
        """Count a chunk."""
        if self.stopped.is_set():
            raise CancelledError
        if self._on_bytes is not None:
            with self._lock:
                self._done_bytes += len(chunk)
                self._on_bytes(self._done_bytes, self._total_bytes)


def path_of(file: OpenedFile) -> Path | None:
    """The way to a file that is mapped itself, where its descriptor is no name."""
    return None if has_sealed_memory() else file.path.absolute()
