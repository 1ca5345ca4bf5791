"""Is a load's time linear in bytes, up to 4 GB in 4 shards, and does hashing use more than one core?

    python -m benchmarks.linear --work /tmp/towers [--size 1B] [--ranks 1,2] [--rounds 3] [--results FOLDER]

Towers of 1, 2, 3 and 4 shards, all made of the same layers, with seeded random weights; with size 1B a shard has 1 GB
(and the made towers take 11 GB of disk), with 0.01B it is quickly tried. For each way a straight line is fitted through
the four medians. Printed: how far the worst of them is from the line, as a part of what the line says there; the line's
slope beside that of one sha256 pass; the seconds that it begins with; and how busy the source's process was, in
processor seconds a second, with the smallest and the largest tower: one file is one chain of hashing. By one rank alone
it is told most plainly whether several files were hashed at a time, since the others take no processor away then.
Each tower is measured twice, from the smallest to the largest and back again, its ways in turn: a machine that slows
down evenly meanwhile does not bend the line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from safeload.benching import BenchReport, bench
from safeload.making import make_sharded_tower

RESULTS = Path(__file__).parent / "results"
SHARDS = (1, 2, 3, 4)
WAYS = ("sha256", "from_pretrained", "safeload", "safeload-mapped", "safeload-known")
MOST_DEVIATION = 0.15
LEAST_BUSY = 1.2  # well above one core; two are never full, as a load begins and ends on one


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A straight line through the times of one way.

    Attributes:
        way: Its name.
        ranks: Number of ranks.
        gigabytes: Of the towers.
        seconds: Medians, by tower.
        busy: The source's processor seconds a second, median, by tower.
        start_s: Where the line begins, at no bytes.
        s_per_gb: Its slope.
        deviation: How far the worst tower is from it, as a part of what the line says.
    """

    way: str
    ranks: int
    gigabytes: tuple[float, ...]
    seconds: tuple[float, ...]
    busy: tuple[float, ...]
    start_s: float
    s_per_gb: float
    deviation: float


def measure(towers: Sequence[Path], *, ranks: Sequence[int], rounds: int, work: Path) -> list[BenchReport]:
    """Measure the towers from the first to the last and back.

    Args:
        towers: Their folders.
        ranks: Numbers of ranks.
        rounds: In each of the two directions.
        work: As in `bench`.

    Returns:
        One report a tower.
    """
    there = [bench(tower, ways=WAYS, ranks=ranks, rounds=rounds, work=work) for tower in towers]
    back = [bench(tower, ways=WAYS, ranks=ranks, rounds=rounds, work=work) for tower in reversed(towers)]
    return [join(one, other) for one, other in zip(there, reversed(back), strict=True)]


def join(one: BenchReport, other: BenchReport) -> BenchReport:
    """Return one report with the rounds of both.

    Args:
        one: A report; its machine's limits and memory are kept.
        other: Of the same tower, ways and ranks.
    """
    both = []
    for each in one.measured:
        more = other.find(each.way, each.ranks)
        keys = ("seconds", "returned_s", "cpu_s", "source_cpu_s")
        both.append(replace(each, **{key: getattr(each, key) + getattr(more, key) for key in keys}))
    return replace(one, measured=tuple(both))


def fit(way: str, reports: Sequence[BenchReport], ranks: int) -> Line:
    """Fit a line through one way's medians.

    Args:
        way: Its name.
        reports: One a tower, of at least two sizes.
        ranks: Number of ranks.
    """
    found = [report.find(way, ranks) for report in reports]
    sizes = tuple(report.tower_bytes / 1e9 for report in reports)
    seconds = tuple(each.median_s for each in found)
    slope, start = statistics.linear_regression(sizes, seconds)
    deviation = max(abs(s - (start + slope * x)) / (start + slope * x) for x, s in zip(sizes, seconds, strict=True))
    busy = tuple(
        statistics.median(cpu / wall for cpu, wall in zip(each.source_cpu_s, each.seconds, strict=True))
        for each in found
    )
    return Line(
        way=way,
        ranks=ranks,
        gigabytes=sizes,
        seconds=seconds,
        busy=busy,
        start_s=start,
        s_per_gb=slope,
        deviation=deviation,
    )


def say_busy(line: Line) -> str:
    """Say whether several files were hashed at a time.

    Args:
        line: Of a way that hashes.
    """
    spread = "hashed on several cores at a time" if line.busy[-1] >= LEAST_BUSY else "NOT hashed on several cores"
    return (
        f"{line.way}, {line.ranks} ranks: {line.busy[0]:.2f} processor seconds a second at the source with 1 shard, "
        f"{line.busy[-1]:.2f} with {len(line.busy)}: {spread}."
    )


def line_table(lines: Sequence[Line], title: str) -> Table:
    """Return the lines as a table.

    Args:
        lines: From `fit`.
        title: Above it.
    """
    table = Table(title=title)
    sizes = (f"{size:.2f} GB" for size in lines[0].gigabytes)
    for heading in ("way", "ranks", *sizes, "s/GB", "start", "off by", "busy 1", f"busy {len(lines[0].seconds)}"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for line in lines:
        seconds = (f"{value:.3f}" for value in line.seconds)
        own = line.way.startswith("safeload")
        verdict = (" met" if line.deviation <= MOST_DEVIATION else " MISSED") if own else ""
        cells = (
            f"{line.s_per_gb:.3f}",
            f"{line.start_s:.3f}",
            f"{line.deviation:.1%}{verdict}",
            f"{line.busy[0]:.2f}",
            f"{line.busy[-1]:.2f}",
        )
        table.add_row(line.way, str(line.ranks), *seconds, *cells)
    return table


def line_picture(lines: Sequence[Line], path: Path, title: str) -> None:
    """Draw the medians and their lines, and how busy the source was.

    Args:
        lines: From `fit`.
        path: Where the PNG goes.
        title: Above it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for line in lines:
        (drawn,) = left.plot(line.gigabytes, line.seconds, "o", label=f"{line.way}, {line.ranks} ranks")
        ends = (0.0, line.gigabytes[-1])
        left.plot(ends, [line.start_s + line.s_per_gb * x for x in ends], "-", color=drawn.get_color(), lw=1)
        right.plot(line.gigabytes, line.busy, "-o", color=drawn.get_color())
    left.set(xlabel="tower, GB, in shards of the same size", ylabel="seconds until every rank has read its tower")
    right.set(xlabel="tower, GB", ylabel="processor seconds a second, source", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.set(xlim=(0, None), ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def keep(lines: Sequence[Line], reports: Sequence[BenchReport], folder: Path, name: str, command: str) -> None:
    """Write JSON and a picture.

    Args:
        lines: From `fit`.
        reports: What they were fitted to.
        folder: Where.
        name: Of both files.
        command: What was run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"command": command, "lines": [asdict(line) for line in lines]}
    kept["reports"] = [asdict(report) for report in reports]
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{package} {version}" for package, version in reports[-1].versions.items())
    line_picture(lines, folder / f"{name}.png", f"{command}; {reports[-1].machine['cores']} cores; {versions}")


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where made towers stay")
    parser.add_argument("--size", default="1B", help="whose layers the towers have (default: 1B, shards of 1.07 GB)")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3, help="in each direction (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    ranks = tuple(map(int, args.ranks.split(",")))
    towers = [make_sharded_tower(args.work, args.size, shards) for shards in SHARDS]
    reports = measure(towers, ranks=ranks, rounds=args.rounds, work=args.work / "cache")
    lines = [fit(way, reports, count) for count in ranks for way in WAYS]
    command = f"python -m benchmarks.linear --size {args.size} --ranks {args.ranks} --rounds {args.rounds}"
    Console(width=120).print(line_table(lines, command))
    print(say_busy(next(line for line in lines if line.way == "safeload")))
    keep(lines, reports, args.results, f"linear-{args.size}-{date.today().isoformat()}", command)


if __name__ == "__main__":
    main()
