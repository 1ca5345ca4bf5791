"""Does a verified load cost what it should, beside the usual ways? Medians of ratios within one run.

    python -m benchmarks.reach --work /tmp/towers [--size 0.3B] [--ranks 2,4] [--rounds 7] [--cold] [--results FOLDER]

Each target is a race of two: the way and what it is compared with take turns in the same processes (A B A B), and each
is held to the values that `from_pretrained` gives before anything is timed. Then all ways take turns, for the overview:
there a way also meets what the others have left, such as free memory that a virtual machine's host has taken back and
has to give again, which costs whoever is next more than the load. Prints a row a target and the machine's own limits,
and keeps JSON and a picture, named by size and date. Ways of libraries that are not installed (`pip install
'safeload[peers]'`) are left out, and their rows say so.

Warm files are in memory as a read from the disk leaves them, where the system can drop them before; what a program has
just written may lie in smaller pages, for which every mapping of them pays (`safeload.chilling.read_anew`).

`--cold` drops the tower's files from the page cache before each load: `fsync`, then `posix_fadvise(DONTNEED)`, which
needs no root and leaves other files alone. Pages that a process maps would stay, so every rank has let go of its tower
by then; `mincore` tells how many pages stayed nevertheless, and where it is more than one in a hundred the table says
that it was not cold. The disk's own cache, and a hypervisor's, are not reached: a cold read may still be faster than
the disk. It has a target of its own; the others are for warm files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from safeload.benching import BenchReport, bench
from safeload.making import make_tower
from safeload.plotting import bench_picture, bench_table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A way, what is measured of it and beside what, and the most that the ratio may be, by number of ranks.

    Attributes:
        way: One of safeload's own.
        of: "seconds"; "returns", until the call returned; "held" and "peak", memory of all ranks together.
        to: Another way's seconds; "" for memory, which is in bytes of the tower that `way` gives to one rank.
        most: The most that it may be, by number of ranks.
    """

    way: str
    of: Literal["seconds", "returns", "held", "peak"] = "seconds"
    to: str = ""
    most: Mapping[int, float]

    @property
    def text(self) -> str:
        """What is measured, in words."""
        return {
            "seconds": f"{self.way} : {self.to}",
            "returns": f"{self.way}, until it returns : {self.to}",
            "held": f"{self.way}, memory at the end : its tower",
            "peak": f"{self.way}, memory on the way : its tower",
        }[self.of]


TARGETS = (
    Target(way="safeload", to="sha256", most={2: 1.35, 4: 1.5}),
    Target(way="safeload", of="held", most={2: 1.05, 4: 1.05}),
    Target(way="safeload", of="peak", most={2: 2.2, 4: 2.2}),
    Target(way="safeload-mapped", to="sha256", most={2: 1.1, 4: 1.2}),
    Target(way="safeload-known", to="sha256", most={2: 0.5, 4: 0.5}),
    Target(way="safeload-known", to="from_pretrained", most={4: 0.85}),
    Target(way="safeload-first-use", of="returns", to="from_pretrained", most={2: 0.5, 4: 0.5}),
    Target(way="safeload-broadcast", to="broadcast-async", most={2: 1.1, 4: 1.1}),
    Target(way="safeload-broadcast", to="tensorizer-verified", most={2: 0.8, 4: 0.8}),
    Target(way="safeload-broadcast-mapped", to="broadcast-async", most={2: 1.1, 4: 1.1}),
    Target(way="safeload-broadcast-mapped", to="tensorizer-verified", most={2: 0.8, 4: 0.8}),
    Target(way="safeload-bf16", to="from_pretrained-bf16", most={2: 1.25, 4: 0.7}),
    Target(way="safeload-bf16", of="held", most={2: 1.05, 4: 1.05}),
)
COLD_TARGETS = (Target(way="safeload-mapped", to="from_pretrained", most={2: 0.95, 4: 0.95}),)
BESIDE = (  # shown, without a target
    "hash-everywhere",
    "hash-on-first",
    "broadcast",
    "sync_module_states",
    "dcp",
    "tensorizer",
    "fastsafetensors",
    "runai",
)
COLD_BESIDE = ("sha256", "safeload", "safeload-known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A row: a target with a number of ranks, and what came of it; `ratio` is None where it could not be measured."""

    what: str
    ranks: int
    ratio: float | None
    most: float
    verdict: str


def ways(targets: Sequence[Target], beside: Sequence[str]) -> tuple[str, ...]:
    """Return what has to be measured: each way right after what it is compared with, then what is only shown."""
    named = [name for target in targets for name in (target.to, target.way) if name]
    return tuple(dict.fromkeys([*named, *beside]))


def races(targets: Sequence[Target]) -> tuple[tuple[str, ...], ...]:
    """Return the ways that run against each other: what a target's way is compared with, and the way."""
    return tuple(dict.fromkeys((target.to, target.way) for target in targets if target.to))


def reached(reports: Sequence[BenchReport], targets: Sequence[Target], ranks: Sequence[int]) -> list[Reached]:
    """Hold reports to targets.

    Args:
        reports: Of the races. A target is held to the first one with its ways, also where they were left out.
        targets: Targets.
        ranks: Numbers of ranks that were measured.
    """
    return [
        _row(_report_of(reports, target), target, count)
        for target in targets
        for count in target.most
        if count in ranks
    ]


def _report_of(reports: Sequence[BenchReport], target: Target) -> BenchReport:
    wanted = {target.way, target.to} - {""}
    return next(report for report in reports if wanted <= {each.way for each in report.measured} | set(report.left_out))


def _row(report: BenchReport, target: Target, ranks: int) -> Reached:
    most = target.most[ranks]
    left_out = [report.left_out[name] for name in (target.way, target.to) if name in report.left_out]
    if left_out:
        return Reached(what=target.text, ranks=ranks, ratio=None, most=most, verdict=f"not measured: {left_out[0]}")
    ratio = _ratio(report, target, ranks)
    return Reached(what=target.text, ranks=ranks, ratio=ratio, most=most, verdict="met" if ratio <= most else "MISSED")


def _ratio(report: BenchReport, target: Target, ranks: int) -> float:
    if target.to:
        return report.ratio(target.way, target.to, ranks, returned=target.of == "returns")
    found = report.find(target.way, ranks)
    return (found.pss_bytes if target.of == "held" else found.peak_bytes) / found.loaded_bytes


def reach_table(rows: Sequence[Reached], title: str) -> Table:
    """Return the rows as a table.

    Args:
        rows: From `reached`.
        title: Above it.
    """
    table = Table(title=title)
    for heading in ("what : beside what", "ranks", "median ratio", "at most", ""):
        table.add_column(heading)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what, str(row.ranks), ratio, f"{row.most:.2f}", row.verdict)
    return table


def keep(
    report: BenchReport,
    rows: Sequence[Reached],
    folder: Path,
    name: str,
    command: str,
    *,
    raced: Sequence[BenchReport] = (),
) -> None:
    """Write JSON and a picture.

    Args:
        report: Of all ways in turn.
        rows: From `reached`.
        folder: Where.
        name: Of both files.
        command: What was run.
        raced: The reports behind the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"command": command, "reach": [asdict(row) for row in rows], **json.loads(report.to_json())}
    kept["races"] = [json.loads(each.to_json()) for each in raced]
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    bench_picture(report, folder / f"{name}.png")


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where made towers stay")
    parser.add_argument("--size", default="0.3B")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=7, help="of each race")
    parser.add_argument("--overview", type=int, default=3, help="rounds of all ways in turn")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    ranks = tuple(map(int, args.ranks.split(",")))
    targets, beside = (COLD_TARGETS, COLD_BESIDE) if args.cold else (TARGETS, BESIDE)
    folder = make_tower(args.work, args.size)

    def run(of: Sequence[str], rounds: int) -> BenchReport:
        work = args.work / "cache"
        return bench(folder, ways=of, ranks=ranks, rounds=rounds, work=work, cold=args.cold, optional=True)

    raced = [run(pair, args.rounds) for pair in races(targets)]
    report = run(ways(targets, beside), args.overview)
    cold = " --cold" if args.cold else ""
    rounds = f"--rounds {args.rounds} --overview {args.overview}"
    command = f"python -m benchmarks.reach --size {args.size} --ranks {args.ranks} {rounds}{cold}"
    rows = reached(raced, targets, ranks)
    for each in (*raced, report):
        print(bench_table(each))
    Console(width=100).print(reach_table(rows, f"reach, {report.tower}, {args.rounds} rounds"))
    name = f"reach-{args.size}{'-cold' if args.cold else ''}-{date.today().isoformat()}"
    keep(report, rows, args.results, name, command, raced=raced)


if __name__ == "__main__":
    main()
