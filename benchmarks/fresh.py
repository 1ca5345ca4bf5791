"""What does memory cost that nobody has written to yet, by its size, and by how long it lay free?

    python -m benchmarks.fresh [--gigabytes 1,2,3,4] [--pauses 0,5] [--rounds 3] [--results FOLDER]

Every way to get weights onto a rank but a mapping fills fresh memory, so that this is a limit of theirs. Sealed memory
is filled by writes of 4 MiB, private memory by copies into a mapping, in pages of the kernel's own choice; the process
does nothing else. A virtual machine may give memory that lies free back to its host: what is free for a moment then
costs less than what has been free for seconds, and where more is asked for than lay free just before, the price of a
gigabyte rises with the size. Each kind is filled, freed, left for the pause, and filled again, the sizes in turn.
Prints a table; keeps JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from safeload.gauging import machine, versions, write_all

RESULTS = Path(__file__).parent / "results"
STEP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Seconds to fill one kind of memory, by round; `pause_s` is how long it lay free before."""

    kind: str
    gigabytes: int
    pause_s: float
    seconds: tuple[float, ...]

    @property
    def s_per_gb(self) -> float:
        """Median."""
        return statistics.median(self.seconds) / self.gigabytes


def time_sealed(size_bytes: int) -> float:
    """Return the seconds that it takes to write so many bytes to a new memfd.

    Args:
        size_bytes: A multiple of 4 MiB.
    """
    data = memoryview(os.urandom(STEP_BYTES))
    fd = os.memfd_create("fresh")
    try:
        start = time.perf_counter()
        write_all(fd, data, size_bytes)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def time_private(size_bytes: int) -> float:
    """Return the seconds that it takes to copy so many bytes into a new anonymous mapping.

    Args:
        size_bytes: A multiple of 4 MiB.
    """
    data = os.urandom(STEP_BYTES)
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE) as memory:
        start = time.perf_counter()
        for offset in range(0, size_bytes, STEP_BYTES):
            memory[offset : offset + STEP_BYTES] = data
        return time.perf_counter() - start


KINDS: dict[str, Callable[[int], float]] = {"sealed": time_sealed, "private": time_private}


def measure(sizes: list[int], pauses: list[float], rounds: int) -> list[Filled]:
    """Fill each kind in each size, after each pause.

    Args:
        sizes: In GB.
        pauses: Seconds.
        rounds: Of all sizes in turn; one more goes before the first, and is not kept.
    """
    found = []
    for kind, timed in KINDS.items():
        for pause_s in pauses:
            seconds: dict[int, list[float]] = {size: [] for size in sizes}
            for _ in range(rounds + 1):
                for size in sizes:
                    time.sleep(pause_s)
                    seconds[size].append(timed(size * 10**9 // STEP_BYTES * STEP_BYTES))
            found += [
                Filled(kind=kind, gigabytes=size, pause_s=pause_s, seconds=tuple(seconds[size][1:])) for size in sizes
            ]
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", default="1,2,3,4")
    parser.add_argument("--pauses", default="0,5", help="seconds that the memory lies free before it is filled")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    command = f"python -m benchmarks.fresh --gigabytes {args.gigabytes} --pauses {args.pauses} --rounds {args.rounds}"
    found = measure([*map(int, args.gigabytes.split(","))], [*map(float, args.pauses.split(","))], args.rounds)
    table = Table("memory", "lay free, s", "GB", "median s", "s a GB", "least, most s", title=command)
    for each in found:
        spread = f"{min(each.seconds):.2f}, {max(each.seconds):.2f}"
        cells = (f"{each.pause_s:g}", str(each.gigabytes), f"{statistics.median(each.seconds):.2f}")
        table.add_row(each.kind, *cells, f"{each.s_per_gb:.2f}", spread)
    Console(width=100).print(table)
    kept = {
        "command": command,
        "filled": [asdict(each) for each in found],
        "machine": machine(),
        "versions": versions(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"fresh-{date.today().isoformat()}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
