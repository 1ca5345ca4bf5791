"""What is asked of Linux's memory that python has no words for: advice for what is mapped, and pages given back.

Receives addresses of this process, or descriptors of memory; says whether the kernel has done what it was asked.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any, Final

__all__ = [
    "MADV_COLLAPSE",
    "MADV_HUGEPAGE",
    "MADV_NOHUGEPAGE",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "advise",
    "knows",
    "libc",
    "punch",
    "whole_pages",
]

MADV_HUGEPAGE: Final = 14  # of Linux's madvise(2), by number: python's mmap does not name all of them
MADV_NOHUGEPAGE: Final = 15
MADV_POPULATE_READ: Final = 22  # since Linux 5.14, as the next
MADV_POPULATE_WRITE: Final = 23
MADV_COLLAPSE: Final = 25

_PUNCH: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


def whole_pages(begin: int, end: int) -> tuple[int, int]:
    """Return the beginning of the first page of a range and the end of the last.

    Args:
        begin: Address, or place in a file.
        end: Where it ends.
    """
    return begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


@functools.cache
def libc() -> Any:
    """Return the C library of this process, which keeps `errno` for `ctypes.get_errno`."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def advise(begin: int, end: int, advice: int) -> bool:
    """Advise the kernel of memory of this process, and let other threads run meanwhile, as `mmap.madvise` does not.

    Args:
        begin: Address; a multiple of the page's size.
        end: Where it ends.
        advice: One of those above.

    Returns:
        Whether the kernel has taken it.
    """
    return int(libc().madvise(begin, end - begin, advice)) == 0


@functools.cache
def knows(advice: int) -> bool:
    """Return whether this kernel knows an advice.

    "madvise(0, 0, advice) will return zero iff advice is supported by the kernel and can be relied on to probe for
    support", says madvise(2) of Linux, which looks at the advice before it finds that there is nothing to be done.

    Args:
        advice: Its number.
    """
    return sys.platform == "linux" and advise(0, 0, advice)


def punch(fd: int, begin: int, end: int) -> bool:
    """Give back pages of memory that has a descriptor; what is read there then is zeros.

    Args:
        fd: The memory.
        begin: A multiple of the page's size.
        end: As well.

    Returns:
        Whether the system has done so.
    """
    return int(libc().fallocate(fd, _PUNCH, ctypes.c_longlong(begin), ctypes.c_longlong(end - begin))) == 0
