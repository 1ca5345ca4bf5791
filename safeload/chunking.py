"""Verify a file again on all cores: digests of its chunks, left by the pass that verified its sha256.

A sha256 over a whole file is one serial chain. The pass that found a file to have its expected sha256 leaves the
digests of its chunks in a private folder of this user, under that sha256. A later load that expects the same sha256 may
compare chunk by chunk instead, split among the ranks and threads of the node.

What this rests on. The list is used only where a sha256 is expected, from wherever that came, and never in the place of
it: no expected digest, no list. A damaged list, or one that belongs to other bytes, makes chunks differ: then the whole
file is hashed, and its sha256 decides. A forged list can pass off a forged file only together, from somebody who can
write to this user's private folder as well as to the file: a list is refused unless it and its folder belong to this
user and nobody else can write to them. Pinned manifests promise more than that, and do without lists unless asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["ChunkHasher", "ChunkList", "chunk_agrees", "find", "leave", "lists_folder", "new_buffer"]

CHUNK_BYTES: Final = 8 << 20  # 150 chunks a gigabyte: enough to split evenly, few enough to keep
_FORMAT: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_LIST_BYTES: Final = 64 << 20  # of the list's own file: eight terabytes of weights
_READ_BYTES: Final = 1 << 20  # a piece stays in the processor's cache between the read and the hash
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkList:
    """Digests of the chunks of one file, all of `chunk_bytes` but the last."""

    algorithm: str
    chunk_bytes: int
    size_bytes: int
    digests: tuple[str, ...]

    def to_fields(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ChunkList | None:
        """Read what `to_fields` gave; None where it is not a list that this version can use."""
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            made = cls(
                algorithm=str(fields["algorithm"]),
                chunk_bytes=int(fields["chunk_bytes"]),
                size_bytes=int(fields["size_bytes"]),
                digests=tuple(map(str, fields["digests"])),
            )
            whole = made.chunk_bytes >= _READ_BYTES and -(-made.size_bytes // made.chunk_bytes) == len(made.digests)
            if fields["format"] == _FORMAT and whole and _hasher_of(made.algorithm) is not None:
                return made
        return None


def _hasher_of(algorithm: str) -> Callable[[], Any] | None:
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm == "blake3":
        with contextlib.suppress(ImportError):
            from blake3 import blake3

            made: Callable[[], Any] = blake3
            return made
    return None


class ChunkHasher:
    """Hashes the chunks of a file while it is read from its beginning to its end.

    blake3 is several times as fast as sha256 and used where it is installed.
    """

    def __init__(self) -> None:
        self._algorithm = "sha256" if _hasher_of("blake3") is None else "blake3"
        make = _hasher_of(self._algorithm)
        self._make: Callable[[], Any] = make if make is not None else hashlib.sha256
        self._hasher, self._room, self._size_bytes = self._make(), CHUNK_BYTES, 0
        self._digests: list[str] = []

    def add(self, data: memoryview) -> None:
        """Take the next bytes."""
        while data:
            piece, data = data[: self._room], data[self._room :]
            self._hasher.update(piece)
            self._room -= len(piece)
            self._size_bytes += len(piece)
            if not self._room:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._digests.append(self._hasher.hexdigest())
        self._hasher, self._room = self._make(), CHUNK_BYTES

    def result(self) -> ChunkList:
        """Return the list, at the end of the file."""
        if self._room < CHUNK_BYTES:
            self._end_chunk()
        return ChunkList(
            algorithm=self._algorithm,
            chunk_bytes=CHUNK_BYTES,
            size_bytes=self._size_bytes,
            digests=tuple(self._digests),
        )


def lists_folder() -> Path:
    """Return the folder of the lists: `$XDG_CACHE_HOME/safeload/chunks`, else below `~/.cache`.

    Raises:
        RuntimeError: This user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "safeload" / "chunks"


def _is_private(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS


def find(sha256: str, *, size_bytes: int) -> ChunkList | None:
    """Look for the list of a file.

    Args:
        sha256: The expected one, 64 hexadecimal digits.
        size_bytes: Of the file.

    Returns:
        The list; None where there is none that this user alone can have written and that is of this size.

    Ranks: source only.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no home; JSON too deep to be read
        folder = lists_folder()
        if not _SHA256.fullmatch(sha256) or not _is_private(folder.stat()):
            return None
        fd = os.open(folder / f"{sha256}.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or not _is_private(info) or info.st_size > _MAX_LIST_BYTES:
                return None
            found = ChunkList.from_fields(json.load(file))
        return found if found is not None and found.size_bytes == size_bytes else None
    return None


def leave(sha256: str, chunks: ChunkList) -> None:
    """Keep the list of a file that was found to have this sha256; where that cannot be done nothing is lost.

    Args:
        sha256: Of the file.
        chunks: What the same pass computed.

    Ranks: source only.
    """
    with contextlib.suppress(OSError, RuntimeError):
        folder = lists_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(folder.stat()):
            return
        fd, name = tempfile.mkstemp(dir=folder, prefix=".new-")  # mode 0600
        try:
            with open(fd, "w", encoding="ascii") as file:
                json.dump(chunks.to_fields(), file)
            os.replace(name, folder / f"{sha256}.json")
        except BaseException:
            os.unlink(name)
            raise


def new_buffer() -> memoryview:
    """Return memory for `chunk_agrees`, to be used again: fresh memory for each chunk costs a tenth of the hash."""
    return memoryview(bytearray(_READ_BYTES))


def chunk_agrees(fd: int, chunks: ChunkList, number: int, *, buffer: memoryview) -> bool:
    """Compare one chunk of a file with its digest.

    Args:
        fd: The file; its position is left alone.
        chunks: The file's list.
        number: Of the chunk. The last one must also be the file's end.
        buffer: From `new_buffer`, for one thread at a time.

    Ranks: local.
    """
    make = _hasher_of(chunks.algorithm)
    begin = number * chunks.chunk_bytes
    end = min(begin + chunks.chunk_bytes, chunks.size_bytes)
    if make is None or (end == chunks.size_bytes and os.fstat(fd).st_size != end):
        return False
    return _hash_piece(fd, make(), begin, end, buffer) == chunks.digests[number]


def _hash_piece(fd: int, hasher: Any, begin: int, end: int, buffer: memoryview) -> str:
    while begin < end:
        count = os.preadv(fd, [buffer[: end - begin]], begin)
        if not count:
            break
        hasher.update(buffer[:count])
        begin += count
    digest: str = hasher.hexdigest()
    return digest
