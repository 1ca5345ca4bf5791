"""How much memory this process holds while a load runs: its proportional share, read seldom, as a reading is dear.

Receives nothing; gives bytes before, at the peak and after, or None for each where the system does not tell (it is
Linux alone that does). What is read is this process's own; the shares of all ranks of a host add up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MemoryMeter", "pss_bytes"]

_SAMPLE_S: Final = 0.05  # shortest pause between two looks at how much memory of its own the process has
_SHARE: Final = 30  # pauses are so many times as long as a reading took
_STEP: Final = 0.02  # growth of anonymous memory that makes another sample worth its price, as a part of it
_DOUBT: Final = 0.03  # change of mapped memory that makes another reading worth its price, as a part of PSS
_JOIN_S: Final = 5.0  # a last reading takes tens of milliseconds: a load does not wait for one that never ends


def pss_bytes() -> int | None:
    """Return this process's proportional share of memory (PSS), in bytes; None where the system does not tell.

    A page that several ranks map counts once over all of them, so that shares add up, as RSS does not.
    Source: `/proc/self/smaps_rollup` of Linux.

    Ranks: local.
    """
    kib = _kib_by_name("smaps_rollup").get("Pss")
    return None if kib is None else kib * 1024


def _resident_kib() -> tuple[int, int]:
    """Return this process's resident memory, of which the kernel keeps count, unlike of PSS: anonymous and mapped."""
    found = _kib_by_name("status")
    return found.get("RssAnon", 0), found.get("RssFile", 0) + found.get("RssShmem", 0)


def _kib_by_name(file: str) -> dict[str, int]:
    """Return the numbers of KiB that `/proc/self` tells in lines `name: number kB`."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", file).read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value[:-3])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What the system told of this process's memory at one time."""

    pss_bytes: int
    anonymous_kib: int
    mapped_kib: int


class MemoryMeter:
    """Samples this process's PSS in a thread while a load runs; a context manager.

    A reading takes milliseconds, and tens of them where gigabytes are mapped, with the address space locked meanwhile:
    none is taken by the thread that loads, and none between the first and the last one but where memory of the
    process's own has grown. Mapped files count when they are all mapped, at the end. On the way growth of anonymous
    memory is taken for growth of PSS, where little else has changed since a reading; the last one is always taken.
    """

    def __init__(self) -> None:
        self.before_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.after_bytes: int | None = None
        self._anonymous_kib = 0
        self._last: _Reading | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safeload-memory", daemon=True)

    def _has_grown(self) -> bool:
        return _resident_kib()[0] > self._anonymous_kib * (1 + _STEP)

    def _sample(self, *, at_end: bool = False) -> int | None:
        anonymous_kib, mapped_kib = _resident_kib()
        self._anonymous_kib = max(self._anonymous_kib, anonymous_kib)
        last = self._last
        if at_end or last is None or abs(mapped_kib - last.mapped_kib) * 1024 > _DOUBT * last.pss_bytes:
            now = pss_bytes()
            if now is None:
                return None
            self._last = _Reading(pss_bytes=now, anonymous_kib=anonymous_kib, mapped_kib=mapped_kib)
        else:
            now = last.pss_bytes + (anonymous_kib - last.anonymous_kib) * 1024
        self.peak_bytes = max(now, self.peak_bytes or 0)
        return now

    def _run(self) -> None:
        self.before_bytes = self._sample()
        pause_s = _SAMPLE_S
        while not self._stop.wait(pause_s):
            start = time.perf_counter()
            if self._has_grown():
                self._sample()
            pause_s = max(_SAMPLE_S, _SHARE * (time.perf_counter() - start))
        self.after_bytes = self._sample(at_end=True)

    def __enter__(self) -> MemoryMeter:
        """Start the thread, which takes the first reading."""
        self._thread.start()
        return self

    def end(self) -> None:
        """Let the thread take the last reading, without waiting for it."""
        self._stop.set()

    def stop(self) -> None:
        """Let the thread take the last reading and wait for it; again and again does no harm."""
        self._stop.set()
        self._thread.join(timeout=_JOIN_S)

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        self.stop()
