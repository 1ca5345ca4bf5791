"""Drop files from the page cache, so that a load meets a cold disk; look how much is there; and read them anew.

It needs no rights beyond being able to open the files, unlike `/proc/sys/vm/drop_caches`, and touches no other file:
`posix_fadvise(DONTNEED)` asks the kernel to let go of a file's clean pages, which after `fsync` are all. It is no
order: pages that a process maps stay, so every process has to have let go of them before. How much is left is asked of
`mincore`, which reads nothing. The disk's own cache, and a hypervisor's, are out of reach.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Final

from safeload.advising import libc

__all__ = ["drop", "read_anew", "resident_share"]

_READ_BYTES: Final = 4 << 20


def drop(paths: Iterable[str]) -> None:
    """Ask the kernel to forget the pages of files.

    Args:
        paths: The files; what was written to them goes to the disk first.

    Raises:
        NotImplementedError: The system has no such call.
        OSError: A file cannot be opened, or what was written to it does not reach the disk.
    """
    if not hasattr(os, "posix_fadvise"):
        raise NotImplementedError("this system has no posix_fadvise: a cold load cannot be measured here")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_anew(paths: Iterable[str]) -> None:
    """Drop files and read them from the disk, from beginning to end, as a load does.

    What a writer leaves in the page cache are pages as small as its writes, which every mapping of them pays for: with
    this, files are in memory in the same way whoever has written them.

    Args:
        paths: The files; those that a process maps stay as they are.

    Raises:
        NotImplementedError: The system can drop no files.
        OSError: A file cannot be read.
    """
    found = tuple(paths)
    drop(found)
    buffer = bytearray(_READ_BYTES)
    for path in found:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass


def resident_share(paths: Iterable[str]) -> float | None:
    """Return the share of the files' pages that are in memory; None where the system does not tell.

    Args:
        paths: The files.
    """
    pages = resident = 0
    for path in paths:
        found = _mincore(path)
        if found is None:
            return None
        pages += len(found)
        resident += sum(each & 1 for each in found)
    return resident / pages if pages else 0.0


def _mincore(path: str) -> bytes | None:
    """Ask by a mapping that is never looked at. Writable and private, as ctypes takes the address of no other."""
    size_bytes = os.stat(path).st_size
    if not size_bytes:
        return b""
    if not hasattr(libc(), "mincore"):
        return None
    flags = bytes(-(-size_bytes // mmap.PAGESIZE))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        answer = libc().mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), flags)
        del start  # a mapping with a reference into it can not be closed
    return flags if answer == 0 else None
