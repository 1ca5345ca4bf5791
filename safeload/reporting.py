"""Records of what a load did: bytes, seconds, memory, digest and where it came from; as text and as JSON."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["LoadReport", "MemoryMeter", "RankReport", "StageClock", "progress_bar", "pss_bytes"]

_SAMPLE_S: Final = 0.05
_SHARE: Final = 30  # pauses are so many times as long as a reading took
_STEP: Final = 0.02  # growth of anonymous memory that makes another sample worth its price, as a part of it
_DOUBT: Final = 0.03  # change of mapped memory that makes another reading worth its price, as a part of PSS
_JOIN_S: Final = 5.0
_MIB: Final = 1024**2
_BAR_AFTER_S: Final = 1.0  # a load that is over by then shows no bar


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


class StageClock:
    """Adds up the wall time of named stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside and add it to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextlib.contextmanager
def progress_bar(show: bool | None, text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes on stderr while a load reads.

    Args:
        show: True always, False never; None where stderr is a terminal and the load takes longer than a second.
        text: What is being done.

    Yields:
        A function to call with (bytes done, bytes in all), or None where nothing is shown.
    """
    if show is False:
        yield None
        return
    from tqdm import tqdm

    disable, delay_s = (False, 0.0) if show else (None, _BAR_AFTER_S)  # None: only on a terminal
    with tqdm(desc=text, unit="B", unit_scale=True, unit_divisor=1024, disable=disable, delay=delay_s) as bar:

        def advance(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        yield advance


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank did.

    Attributes:
        rank: Global rank.
        host: Name of its host.
        read_bytes: Bytes read from the checkpoint's files; 0 on every rank but the source.
        files_opened: Files of the checkpoint that it opened; none on every rank but the source.
        sent_bytes: Payload bytes handed to the process group or to the host's other ranks.
        received_bytes: Payload bytes taken from them.
        memory_before_bytes: PSS when the load began; None where the system does not tell.
        memory_peak_bytes: Highest PSS while it ran, sampled.
        memory_after_bytes: PSS at its end.
        device: Where the tower is.
    """

    rank: int
    host: str
    read_bytes: int
    files_opened: tuple[str, ...]
    sent_bytes: int
    received_bytes: int
    memory_before_bytes: int | None
    memory_peak_bytes: int | None
    memory_after_bytes: int | None
    device: str

    def to_json(self) -> bytes:
        """Return the record as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> RankReport:
        """Read what `to_json` wrote on another rank."""
        fields = json.loads(raw)
        return cls(**{**fields, "files_opened": tuple(fields["files_opened"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, on every rank.

    Attributes:
        tower: Class name of the tower.
        origin: What the caller asked for.
        repo_id: Repository, where it came from the Hub.
        commit: Its pinned commit.
        source_rank: Global rank that read the files.
        world_size: Ranks in the group.
        transport: How the bytes moved: "none" (one rank), "broadcast" or "shared".
        transport_reason: Why that one.
        memory: "sealed", "private" or "mapped": what holds the bytes on the source.
        built: "early" where the tower's library built it while the weights were still being read, "late" where it
            needed them for that: such a load takes longer.
        verdict: When the bytes were verified: "load", "first_use", or "pending" until then; `digest`, `files` and
            `provenance` are empty as long as it is pending.
        digest: sha256 over the lines "sha256  name" of all files that were loaded.
        provenance: Where the expected digests came from: "pinned", "hub", "cache", "local", "none"; "off" if unasked.
        provenance_detail: The file or address of the expected digests.
        files: sha256 by file name.
        tensors: Number of tensors, ties counted once.
        tower_bytes: Bytes of all tensors.
        dtypes: Number of tensors by dtype.
        seconds: Wall time by stage, on this rank.
        ranks: One record a rank.
    """

    tower: str
    origin: str
    repo_id: str | None
    commit: str | None
    source_rank: int
    world_size: int
    transport: str
    transport_reason: str
    memory: str
    built: str
    verdict: str
    digest: str
    provenance: str
    provenance_detail: str
    files: Mapping[str, str]
    tensors: int
    tower_bytes: int
    dtypes: Mapping[str, int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[RankReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        verified = f"{self.provenance} ({self.provenance_detail})" if self.provenance_detail else self.provenance
        timed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        dtypes = ", ".join(f"{count} {name}" for name, count in sorted(self.dtypes.items()))
        lines = [
            f"{self.tower} from {self.origin}" + (f" at {self.commit}" if self.commit else ""),
            f"  tensors   {self.tensors} ({dtypes}), {_mib(self.tower_bytes)}",
            f"  sha256    {self.digest}",
            f"  checked   {verified}",
            f"  transport {self.transport}: {self.transport_reason}; bytes held in {self.memory} memory",
            f"  built     {self.built}",
            f"  seconds   {timed}",
        ]
        return "\n".join(lines + [_rank_line(report, self.source_rank) for report in self.ranks])


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / _MIB:.1f} MiB"


def _rank_line(report: RankReport, source_rank: int) -> str:
    role = " (source)" if report.rank == source_rank else ""
    return (
        f"  rank {report.rank}{role} on {report.host}, {report.device}: read {_mib(report.read_bytes)}, "
        f"sent {_mib(report.sent_bytes)}, received {_mib(report.received_bytes)}, "
        f"PSS {_mib(report.memory_before_bytes)} -> {_mib(report.memory_after_bytes)}, "
        f"peak {_mib(report.memory_peak_bytes)}"
    )
