"""Does a verified load cost what it should, beside the usual ways? Medians of ratios within one run.

    python -m benchmarks.reach --work /tmp/towers [--size 0.3B] [--ranks 2,4] [--rounds 7] [--results FOLDER]

Prints a row a target and the machine's own limits, and keeps JSON and a picture, named by size and date.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from safeload.benching import BenchReport, bench, make_tower
from safeload.plotting import bench_picture, bench_table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A way, what it is compared with, and the most that the ratio may be, by number of ranks."""

    way: str
    to: str
    most: dict[int, float]
    returned: bool = False


TARGETS = (
    Target(way="safeload", to="sha256", most={2: 1.35, 4: 1.5}),
    Target(way="safeload-mapped", to="sha256", most={2: 1.1, 4: 1.2}),
    Target(way="safeload-known", to="sha256", most={2: 0.5, 4: 0.5}),
    Target(way="safeload-known", to="from_pretrained", most={4: 0.85}),
    Target(way="safeload-first-use", to="from_pretrained", most={2: 0.5, 4: 0.5}, returned=True),
    Target(way="safeload-broadcast", to="broadcast-async", most={2: 1.1, 4: 1.1}),
    Target(way="safeload-broadcast-mapped", to="broadcast-async", most={2: 1.1, 4: 1.1}),
    Target(way="safeload-bf16", to="from_pretrained-bf16", most={2: 1.25, 4: 0.7}),
)
WAYS = tuple(dict.fromkeys(name for target in TARGETS for name in (target.to, target.way)))
MEMORY = {"safeload": 1.05, "safeload-bf16": 1.05}  # of all ranks together at the end, in towers
PEAK = {"safeload": 2.2}


def rows(report: BenchReport, ranks: tuple[int, ...]) -> list[tuple[str, str, str, str]]:
    """Hold a report to the targets: what, ranks, measured, at most."""
    found = []
    for target in TARGETS:
        for count, most in target.most.items():
            if count in ranks:
                ratio = report.ratio(target.way, target.to, count, returned=target.returned)
                what = f"{target.way}{' (returns)' if target.returned else ''} : {target.to}"
                found.append((what, str(count), f"{ratio:.2f}", f"{most:.2f} {'met' if ratio <= most else 'MISSED'}"))
    for (name, most), what in [
        *((item, "at the end") for item in MEMORY.items()),
        *((item, "on the way") for item in PEAK.items()),
    ]:
        for count in ranks:
            each = report.find(name, count)
            size_bytes = report.tower_bytes / (2 if name.endswith("bf16") else 1)
            share = (each.pss_bytes if what == "at the end" else each.peak_bytes) / size_bytes
            verdict = "met" if share <= most else "MISSED"
            found.append((f"{name}: memory {what}, towers", str(count), f"{share:.2f}", f"{most:.2f} {verdict}"))
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where made towers stay")
    parser.add_argument("--size", default="0.3B")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    ranks = tuple(map(int, args.ranks.split(",")))
    folder = make_tower(args.work, args.size)
    report = bench(folder, ways=WAYS, ranks=ranks, rounds=args.rounds, work=args.work / "cache")
    table = Table(title=f"reach, {report.tower}, {args.rounds} rounds")
    for heading in ("what : beside what", "ranks", "median ratio", "at most"):
        table.add_column(heading)
    reached = rows(report, ranks)
    for row in reached:
        table.add_row(*row)
    print(bench_table(report))
    Console(width=110).print(table)
    args.results.mkdir(parents=True, exist_ok=True)
    name = f"reach-{args.size}-{date.today().isoformat()}"
    kept = {"reach": reached, **json.loads(report.to_json())}
    (args.results / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    bench_picture(report, args.results / f"{name}.png")


if __name__ == "__main__":
    main()
