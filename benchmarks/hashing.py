"""Does it cost more to read, hash and seal a checkpoint than `sha256sum` takes to hash it? Seconds, best of N, warm.

    python -m benchmarks.hashing [--size-mib 512] [--rounds 5] [--results FOLDER]

The files are in the page cache (cold is not possible without rights to drop it). Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from safeload.digests import Manifest
from safeload.resolving import resolve
from safeload.sealing import seal

RESULTS = Path(__file__).parent / "results"
NOTHING = Manifest(provenance="none", source="nothing")


def write_checkpoint(folder: Path, *, size_mib: int, shards: int) -> None:
    """Write seeded random weights, as one file or as shards with an index."""
    draw = random.Random(size_mib)
    weight_map = {}
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard}.safetensors"
        size_bytes = (size_mib << 20) // shards
        header = json.dumps({f"t{shard}": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}})
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            for _ in range(size_bytes >> 20):
                file.write(draw.randbytes(1 << 20))
        weight_map[f"t{shard}"] = name
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(run: Callable[[], object], rounds: int) -> dict[str, float]:
    """Wall and processor seconds: the best of the rounds, and how far the worst was from it."""
    walls, cpus = [], []
    for _ in range(rounds):
        before, start = os.times(), time.perf_counter()
        run()
        walls.append(time.perf_counter() - start)
        cpus.append(sum(os.times()[:4]) - sum(before[:4]))
    return {"wall_s": min(walls), "spread_s": max(walls) - min(walls), "cpu_s": min(cpus)}


def ways(folder: Path) -> dict[str, Callable[[], object]]:
    """What is compared."""
    paths = sorted(map(str, folder.glob("*.safetensors")))

    def sealed(memory: Literal["sealed", "mapped"]) -> None:
        seal(resolve(folder), NOTHING, memory=memory).close()

    return {
        "sha256sum, one core": lambda: subprocess.run(["sha256sum", *paths], check=True, stdout=subprocess.DEVNULL),
        "cat to nowhere": lambda: subprocess.run(["cat", *paths], check=True, stdout=subprocess.DEVNULL),
        "safeload, hash only (mapped)": lambda: sealed("mapped"),
        "safeload, hash and copy (sealed)": lambda: sealed("sealed"),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    table = Table("layout", "way", "seconds", "worst", "processor s", "times sha256sum")
    rows: list[dict[str, Any]] = []
    for shards in (1, 4):
        with tempfile.TemporaryDirectory() as place:
            write_checkpoint(Path(place), size_mib=args.size_mib, shards=shards)
            measured = {name: measure(run, args.rounds) for name, run in ways(Path(place)).items()}
        base = measured["sha256sum, one core"]["wall_s"]
        for name, found in measured.items():
            rows.append({"files": shards, "way": name, "times_sha256sum": found["wall_s"] / base, **found})
            cells = (f"{found['wall_s']:.3f}", f"+{found['spread_s']:.3f}", f"{found['cpu_s']:.2f}")
            table.add_row(f"{shards} files", name, *cells, f"{found['wall_s'] / base:.2f}")
    Console().print(table)
    result = {
        "size_mib": args.size_mib,
        "rounds": args.rounds,
        "cache": "warm",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "rows": rows,
    }
    args.results.mkdir(exist_ok=True, parents=True)
    (args.results / f"hashing-{date.today()}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
