"""Records of what a load did: bytes, seconds, memory, digest and where it came from; as text and as JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = ["LoadReport", "RankReport", "StageClock", "progress_bar"]

_MIB: Final = 1024**2
_BAR_AFTER_S: Final = 1.0  # a load that is over by then shows no bar


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
