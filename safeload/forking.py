"""Have verdicts that are still out be there before this process is forked.

A forked child has none of the parent's threads, so that nobody would hash for it; and the word that a rank reads once
would be taken by the child alone. Receives the records of towers whose verdict is out; gives nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref

from safeload.errors import SafeLoadError
from safeload.keeping import Protection

__all__ = ["settle_before_forks"]

_pending: weakref.WeakSet[Protection] = weakref.WeakSet()


def settle_before_forks(protection: Protection) -> None:
    """Have a fork wait for the verdict of a tower; what it raises is raised at the tower's use, in either process.

    Args:
        protection: The tower's record.
    """
    _pending.add(protection)
    _listen()


@functools.cache
def _listen() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_settle_all)


def _settle_all() -> None:
    for protection in tuple(_pending):
        _pending.discard(protection)
        with contextlib.suppress(SafeLoadError):
            protection.settle()
