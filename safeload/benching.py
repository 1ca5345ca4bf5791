"""What it costs to bring a tower to every rank, by several ways in turn, on this machine.

Receives the folder of a tower, numbers of ranks and names of ways; gives a `BenchReport`: wall time from a barrier to
the moment when all ranks hold a tower whose every page has been read, and the memory of all ranks together (PSS). All
ways run in the same processes, one after the other and again (A B C A B C), beside the machine's own limits, so that
what slows the machine down slows all of them down. Only ratios of one run mean anything.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from safeload.errors import SafeLoadError
from safeload.gauging import limits_s, machine, versions
from safeload.peers import PEERS
from safeload.racing import TIMEOUT, WAYS, Race
from safeload.skeletons import weight_files
from safeload.spawning import run_ranks

__all__ = ["WAYS", "BenchReport", "Measured", "bench", "choose_ways", "installed"]

_MOSTLY_COLD: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way with one number of ranks.

    Attributes:
        way: Its name.
        ranks: How many.
        seconds: From the barrier to the end, by round.
        returned_s: From the barrier until the call had returned on all ranks, by round.
        cpu_s: Processor time of all ranks together, by round; says less than `seconds`, but on a busy machine too.
        source_cpu_s: The first rank's part of it.
        pss_bytes: Memory that all ranks together hold more than before, in a load of its own.
        peak_bytes: The sum of the ranks' own peaks, in that load.
        loaded_bytes: Bytes of the tensors that one rank was given.
    """

    way: str
    ranks: int
    seconds: tuple[float, ...]
    returned_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    source_cpu_s: tuple[float, ...]
    pss_bytes: int
    peak_bytes: int
    loaded_bytes: int

    @property
    def median_s(self) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All that was measured, with the machine and the versions it was measured on.

    Attributes:
        tower: Name of its folder.
        tower_bytes: Bytes of its tensors, as stored.
        measured: A record for each way and number of ranks.
        limits_s: What the machine's own limits set for as many bytes, in seconds.
        machine: What it is.
        versions: Of python and the packages.
        page_cache: "warm", as a read from the disk leaves it, or "cold" where the files were dropped from it before
            each way.
        resident: Where cold, the largest share of the files that had stayed in memory; None where nobody can tell.
        left_out: Ways that were not measured, and why.
    """

    tower: str
    tower_bytes: int
    measured: tuple[Measured, ...]
    limits_s: Mapping[str, float]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    page_cache: Literal["warm", "cold"] = "warm"
    resident: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, way: str, to: str, ranks: int, *, returned: bool = False) -> float:
        """Return the median over the rounds of the ratio of two ways' times; `KeyError` where one was not measured.

        Args:
            way: A way.
            to: What it is compared with.
            ranks: Number of ranks.
            returned: Take the time until the call of `way` returned.
        """
        one, other = (self.find(name, ranks) for name in (way, to))
        times = one.returned_s if returned else one.seconds
        return statistics.median(a / b for a, b in zip(times, other.seconds, strict=True))

    def find(self, way: str, ranks: int) -> Measured:
        """Return one measurement; `KeyError` where there is none."""
        for each in self.measured:
            if (each.way, each.ranks) == (way, ranks):
                return each
        raise KeyError((way, ranks))

    def notes(self) -> tuple[str, ...]:
        """Return what has to be known to read the figures, a sentence each."""
        found = ["Only ratios within one run mean anything: other machines and other minutes give other seconds."]
        if self.page_cache == "cold":
            found.append(f"The files were dropped from the page cache before each way; {self._chilled()}.")
        found += [f"Left out: {way}, {reason}." for way, reason in self.left_out.items()]
        return tuple(found)

    def _chilled(self) -> str:
        if self.resident is None:
            return "whether they had gone, this system does not tell"
        if self.resident > _MOSTLY_COLD:
            return f"NOT COLD: up to {self.resident:.0%} of their pages stayed in memory"
        return f"at most {self.resident:.1%} of their pages stayed"

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))


def installed(ways: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Part ways from those whose library is not there.

    Args:
        ways: Names out of `WAYS`.

    Returns:
        Those that can run, in their order, and for each of the others why not.
    """
    missing = {way: PEERS[way].missing for way in ways if way in PEERS}
    left_out = {way: f"{package} is not installed" for way, package in missing.items() if package is not None}
    return tuple(way for way in ways if way not in left_out), left_out


def choose_ways(ways: Sequence[str], *, optional: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Part ways from those whose library is not there, before anything is measured.

    Args:
        ways: Names.
        optional: Leave out those whose library is not there.

    Returns:
        As `installed`.

    Raises:
        SafeLoadError: An unknown way, or one that is not installed and not optional.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise SafeLoadError(f"no such way: {', '.join(unknown)}; expected some of {', '.join(WAYS)}")
    there, left_out = installed(ways)
    if left_out and not optional:
        packages = sorted({PEERS[way].missing or "" for way in left_out})
        raise SafeLoadError(f"{', '.join(left_out)}: not installed here: pip install {' '.join(packages)}")
    return there, left_out


def bench(
    folder: Path,
    *,
    ways: Sequence[str],
    ranks: Sequence[int] = (1, 2, 4),
    rounds: int = 5,
    work: Path,
    cold: bool = False,
    optional: bool = False,
) -> BenchReport:
    """Measure.

    Args:
        folder: The tower's folder, with safetensors weights.
        ways: Names out of `WAYS`, in the order in which they take turns.
        ranks: Numbers of ranks.
        rounds: How often each way is measured with each number of ranks, after a load that warms up and is checked.
        work: A folder for lists of chunks, and for towers in formats of others.
        cold: Drop the files from the page cache before each way.
        optional: Leave out ways whose library is not installed; refuse them otherwise.

    Returns:
        The report.

    Raises:
        SafeLoadError: An unknown way, one that is not installed, or one that loads other values than from_pretrained.
    """
    there, left_out = choose_ways(ways, optional=optional)
    if not weight_files(str(folder)):
        raise SafeLoadError(f"{folder}: no safetensors files to measure with")
    what = Race(folder=str(folder), ways=there, rounds=rounds, work=str(work), cold=cold)
    env = {"XDG_CACHE_HOME": str(work), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    measured: list[Measured] = []
    resident: list[float | None] = []
    for count in ranks:
        results = run_ranks("safeload.racing.race", what, ranks=count, timeout=TIMEOUT, env=env)
        measured += [_combine(way, count, results) for way in there]
        resident.append(results[0]["resident"])
    tower_bytes = max(each.loaded_bytes for each in measured) or sum(map(_size_bytes, weight_files(str(folder))))
    return BenchReport(
        tower=folder.name,
        tower_bytes=tower_bytes,
        measured=tuple(measured),
        limits_s=limits_s(tower_bytes),
        machine=machine(),
        versions=versions(),
        page_cache="cold" if cold else "warm",
        resident=None if None in resident else max(each for each in resident if each is not None),
        left_out=left_out,
    )


def _size_bytes(path: str) -> int:
    return Path(path).stat().st_size


def _combine(way: str, ranks: int, results: Sequence[Mapping[str, Any]]) -> Measured:
    times, memory = ([result[key][way] for result in results] for key in ("ways", "memory"))

    def by_round(key: str, join: Callable[..., float]) -> tuple[float, ...]:
        return tuple(join(values) for values in zip(*(each[key] for each in times), strict=True))

    return Measured(
        way=way,
        ranks=ranks,
        seconds=by_round("seconds", max),
        returned_s=by_round("returned_s", max),
        cpu_s=by_round("cpu_s", sum),
        source_cpu_s=tuple(times[0]["cpu_s"]),
        pss_bytes=int(sum(each["pss_bytes"] for each in memory)),
        peak_bytes=int(sum(each["peak_bytes"] for each in memory)),
        loaded_bytes=int(max(each["loaded_bytes"] for each in memory)),
    )
