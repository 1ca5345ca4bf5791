"""One file of the source: open it once, read it once, hash it while its bytes go elsewhere.

Receives a path; gives an `OpenedFile` (checked to be a regular file, never blocking) and then, from `copy_hashed`, its
digests. Each chunk is hashed from the buffer that is written to the target.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from safeload.errors import SourceError
from safeload.holding import write_at
from safeload.indexes import fold_name

__all__ = [
    "OnChunk",
    "OpenedFile",
    "Sink",
    "announce",
    "copy_hashed",
    "open_regular",
    "read_at",
    "read_start",
    "writes_to",
]

_CHUNK_BYTES: Final = 4 << 20  # few enough turns at the interpreter lock, which a build beside it holds for long
_BUFFERS: Final = 3

OnChunk = Callable[[memoryview], None]
Sink = Callable[[int, memoryview], None]  # where a chunk begins in the file, and its bytes, valid during the call only


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """A regular file, open for reading; `link` is where its folder entry pointed when it was a symbolic link."""

    name: str
    path: Path
    fd: int
    size_bytes: int
    link: str | None


def open_regular(path: Path, *, name: str) -> OpenedFile:
    """Open a file of the source for reading, once.

    Args:
        path: Where it is.
        name: What the checkpoint calls it.

    Returns:
        The opened file; the caller closes `fd`.

    Raises:
        SourceError: Missing, unreadable, or not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise SourceError(f"{path}: not a regular file but {_kind_of(info.st_mode)}.", path=str(path))
    return OpenedFile(name=name, path=path, fd=fd, size_bytes=info.st_size, link=_link_of(path))


def writes_to(fd: int, *, path: Path) -> Sink:
    """Return a sink that writes every chunk to where it was in the file.

    Args:
        fd: Memory from `new_memory`.
        path: The file, for messages.
    """
    return lambda offset, chunk: write_at(fd, chunk, offset, path=path)


def read_start(source: OpenedFile, size_bytes: int) -> bytearray:
    """Read the first bytes of a file, and leave the descriptor behind them: `copy_hashed` goes on from there.

    Args:
        source: The file, at its beginning.
        size_bytes: How many; fewer where the file is shorter.

    Raises:
        SourceError: The file cannot be read.
    """
    start = bytearray(min(size_bytes, source.size_bytes))
    del start[len(_read_chunk(source, start)) :]
    return start


def copy_hashed(
    source: OpenedFile,
    sink: Sink | None,
    *,
    start: bytearray | None = None,
    git_sha1: bool = False,
    on_chunk: Sequence[OnChunk] = (),
) -> dict[str, str]:
    """Read a file to its end, once; hash each chunk from the very buffer that is given to the sink.

    Args:
        source: The file, at its beginning or behind `start`.
        sink: Where the bytes go; None hashes only.
        start: What `read_start` has read of it already.
        git_sha1: Compute git's blob id beside sha256.
        on_chunk: Called with each chunk, which is only valid meanwhile. What they raise ends the copy.

    Returns:
        The digests in hexadecimal by algorithm: "sha256", and "git-sha1" when asked for.

    Raises:
        SourceError: The file cannot be read, or it grew or shrank meanwhile.
    """
    hashers: dict[str, Any] = {"sha256": hashlib.sha256()}
    if git_sha1:
        hashers["git-sha1"] = hashlib.sha1(b"blob %d\0" % source.size_bytes, usedforsecurity=False)
    at = 0
    with _HashingThread(tuple(hashers.values()), chunk_bytes=min(_CHUNK_BYTES, source.size_bytes + 1)) as hashing:
        chunk = memoryview(start) if start else _read_chunk(source, hashing.free_buffer())
        while chunk:
            _check_size(source, at + len(chunk), at_end=False)
            hashing.update(chunk)
            if sink is not None:
                sink(at, chunk)
            for call in on_chunk:
                call(chunk)
            at += len(chunk)
            chunk = _read_chunk(source, hashing.free_buffer())
    _check_size(source, at, at_end=True)
    return {algorithm: hasher.hexdigest() for algorithm, hasher in hashers.items()}


class _HashingThread:
    """Hashes buffers in order while the caller reads and writes the next ones; a buffer is free once it was hashed."""

    def __init__(self, hashers: tuple[Any, ...], *, chunk_bytes: int) -> None:
        self._hashers = hashers
        self._buffers = [bytearray(chunk_bytes) for _ in range(_BUFFERS)]
        self._pending: deque[Future[None]] = deque()
        self._turn = 0

    def __enter__(self) -> _HashingThread:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="safeload-hash")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            for future in self._pending:
                future.result()

    def free_buffer(self) -> bytearray:
        if len(self._pending) == _BUFFERS:
            self._pending.popleft().result()
        self._turn = (self._turn + 1) % _BUFFERS
        return self._buffers[self._turn]

    def update(self, chunk: memoryview) -> None:
        self._pending.append(self._pool.submit(self._update, chunk))

    def _update(self, chunk: memoryview) -> None:
        for hasher in self._hashers:
            hasher.update(chunk)


def _read_chunk(source: OpenedFile, buffer: bytearray) -> memoryview:
    """Fill the buffer; what is returned is shorter at the end of the file only."""
    view, size_bytes = memoryview(buffer), 0
    try:
        file = io.FileIO(source.fd, closefd=False)
        while size_bytes < len(view) and (count := file.readinto(view[size_bytes:])):
            size_bytes += count
    except OSError as error:
        raise _unreadable(source.path, error) from error
    return view[:size_bytes]


def read_at(fd: int, size_bytes: int, offset: int) -> bytes:
    """Read from a place in an open file, not moving its position where the system can do that.

    Args:
        fd: The descriptor.
        size_bytes: How many bytes; fewer are read at the end of the file.
        offset: Where to begin.

    Returns:
        The bytes.
    """
    parts = []
    while size_bytes > 0 and (part := _read_part(fd, min(size_bytes, 1 << 30), offset)):
        parts.append(part)
        offset += len(part)
        size_bytes -= len(part)
    return b"".join(parts)


def announce(fd: int, places: Iterable[int]) -> None:
    """Have single pages of a file brought to memory, all together, behind whoever asks.

    Who looks at one page after the other in a file that is not in memory waits for the disk each time, and for as much
    around each page as the system reads ahead: megabytes. What is announced is there when it is looked at, or soon.

    Args:
        fd: The file.
        places: Offsets in it.
    """
    if hasattr(os, "posix_fadvise"):
        for place in places:
            os.posix_fadvise(fd, place, 1, os.POSIX_FADV_WILLNEED)


def _read_part(fd: int, size_bytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, size_bytes, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows
    return os.read(fd, size_bytes)


def _check_size(source: OpenedFile, read_bytes: int, *, at_end: bool) -> None:
    if read_bytes > source.size_bytes or (at_end and read_bytes != source.size_bytes):
        what = "grew" if read_bytes > source.size_bytes else "shrank"
        raise SourceError(
            f"{source.path}: {what} while it was read ({source.size_bytes} bytes when opened, {read_bytes} read): "
            "something writes to it.",
            path=str(source.path),
        )


def _unreadable(path: Path, error: Exception) -> SourceError:
    if isinstance(error, FileNotFoundError):
        return SourceError(f"{str(path)[:300]}: no such file.{_near(path)}", path=str(path), looked_for=[str(path)])
    text = error.strerror if isinstance(error, OSError) else str(error)
    return SourceError(f"{str(path)[:300]}: cannot be read: {text}.", path=str(path), looked_for=[str(path)])


def _near(path: Path) -> str:
    """Name the entries that differ from the one wanted only in case or Unicode form, or a link that leads nowhere."""
    if path.is_symlink():
        return f" It is a link to {_link_of(path)}, which is not there."
    try:
        near = [name for name in os.listdir(path.parent) if fold_name(name) == fold_name(path.name)]
    except OSError:
        return ""
    return f" There is {', '.join(map(ascii, near))}: names are compared byte for byte." if near else ""


def _link_of(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _kind_of(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((text for test, text in kinds.items() if test(mode)), "a device")
