"""Does anything grow? 200 loads in one process group, alternating towers and failures.

    python -m benchmarks.soak [--loads 200] [--ranks 2] [--plot benchmarks/soak.png]

After every load each rank counts its private memory (USS), descriptors and threads, and rank 0 the keys in the store.
Prints a table and, as the last line, JSON. Level means: the second half's median is not above the first half's by more
than the noise within the first half.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_on_ranks

WARM_UP = 10  # loads after which caches, pools and lazily imported modules are there


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rank after one load."""

    load: int
    outcome: str
    seconds: float
    memory_bytes: int
    descriptors: int
    threads: int
    keys: int


def make_towers(folder: Path) -> dict[str, Path]:
    """Write two towers of different families, and one whose file does not match its SHA256SUMS."""
    import torch
    from transformers import BertConfig, BertModel, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(1)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    towers = {name: folder / name for name in ("clip", "bert", "corrupt")}
    CLIPVisionModel(CLIPVisionConfig(image_size=64, patch_size=16, **size)).save_pretrained(towers["clip"])
    BertModel(BertConfig(vocab_size=1000, **size)).save_pretrained(towers["bert"])
    CLIPVisionModel(CLIPVisionConfig(image_size=64, patch_size=16, **size)).save_pretrained(towers["corrupt"])
    for name, tower in towers.items():
        _write_sums(tower)
        if name == "corrupt":
            _flip_a_byte(tower / "model.safetensors")
    return towers


def _write_sums(tower: Path) -> None:
    import hashlib

    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(tower.iterdir())]
    (tower / "SHA256SUMS").write_text("".join(lines))


def _flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def soak(towers: dict[str, Path], loads: int) -> list[dict[str, Any]]:
    """Load again and again; a sample each time. Ranks: every rank."""
    samples = []
    for load in range(loads):
        began = time.monotonic()
        outcome = _load_once(towers, load)
        samples.append(asdict(_sample(load, outcome, time.monotonic() - began)))
    return samples


def _load_once(towers: dict[str, Path], load: int) -> str:
    """Load one tower, or fail in one of four ways; every fourth load fails."""
    from transformers import BertModel, CLIPVisionModel

    from safeload.errors import SafeLoadError
    from safeload.loading import safe_from_pretrained

    rank = int(os.environ["RANK"])
    towers_in_turn = [(CLIPVisionModel, towers["clip"]), (BertModel, towers["bert"])]
    model_class, path = towers_in_turn[load % 2]
    failure = ("", "", "", ("corrupt", "missing", "mismatch", "local"))[load % 4]
    kind = failure[load // 4 % 4] if failure else ""
    if kind == "corrupt":
        model_class, path = CLIPVisionModel, towers["corrupt"]
    elif kind == "missing":
        path = path / "nowhere"
    elif kind == "mismatch" and rank == 0:
        model_class, path = towers_in_turn[1 - load % 2]
    device = "meta" if kind == "local" and rank == 1 else "cpu"
    try:
        safe_from_pretrained(model_class, path, device=device)
    except SafeLoadError as error:
        if not kind:
            raise
        return type(error).__name__
    if kind:
        raise AssertionError(f"load {load} was to fail: {kind}")
    return "loaded"


def _sample(load: int, outcome: str, seconds: float) -> Sample:
    import psutil
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gc.collect()
    dist.barrier()
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    sample = Sample(
        load=load,
        outcome=outcome,
        seconds=seconds,
        memory_bytes=psutil.Process().memory_full_info().uss,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        keys=store.num_keys() if dist.get_rank() == 0 else 0,
    )
    dist.barrier()
    return sample


def judge(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compare the first with the second half after the warm-up, for each thing counted."""
    kept = samples[WARM_UP:]
    half = len(kept) // 2
    verdicts = {}
    for name in ("memory_bytes", "descriptors", "threads", "keys"):
        first, second = ([each[name] for each in part] for part in (kept[:half], kept[half:]))
        medians = statistics.median(first), statistics.median(second)
        noise = max(first) - min(first)
        verdicts[name] = {
            "first": medians[0],
            "second": medians[1],
            "noise": noise,
            "level": medians[1] - medians[0] <= max(noise, 0.01 * medians[0] if name == "memory_bytes" else 0),
        }
    return verdicts


def draw(by_rank: list[list[dict[str, Any]]], path: Path) -> None:
    """Plot what was counted over the loads, a line a rank."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [("memory_bytes", "USS (MB)", 1e6), ("descriptors", "descriptors", 1), ("threads", "threads", 1)]
    figure, axes = pyplot.subplots(len(rows) + 1, 1, sharex=True, figsize=(9, 9))
    for axis, (name, label, unit) in zip(axes, rows, strict=False):
        for rank, samples in enumerate(by_rank):
            axis.plot([each["load"] for each in samples], [each[name] / unit for each in samples], label=f"rank {rank}")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="lower right")
    axes[0].set_title(f"{len(by_rank[0])} loads in one process group; dots: the loads that were made to fail")
    axes[-1].plot([each["load"] for each in by_rank[0]], [each["seconds"] for each in by_rank[0]], linewidth=0.8)
    failed = [each for each in by_rank[0] if each["outcome"] != "loaded"]
    axes[-1].scatter([each["load"] for each in failed], [each["seconds"] for each in failed], s=8, color="tab:red")
    axes[-1].set_ylabel("seconds")
    axes[-1].set_xlabel("load")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Run the soak; exit status 1 when something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        towers = make_towers(Path(folder))
        results = run_on_ranks(options.ranks, soak, towers, options.loads, store="tcp", timeout_s=10 * options.loads)
    for result in results:
        if not result.ok:
            print(result.describe(), file=sys.stderr)
            return 1
    by_rank = [result.value for result in results]
    if options.plot:
        draw(by_rank, options.plot)
    return report(by_rank)


def report(by_rank: list[list[dict[str, Any]]]) -> int:
    """Print the table and the JSON line."""
    import torch
    import transformers

    outcomes = [each["outcome"] for each in by_rank[0]]
    print(", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))))
    print(f"{'rank':>4} {'what':>12} {'first half':>14} {'second half':>14} {'noise':>12}  level")
    verdicts = [judge(samples) for samples in by_rank]
    for rank, verdict in enumerate(verdicts):
        for name, row in verdict.items():
            line = f"{rank:>4} {name:>12} {row['first']:>14,.0f} {row['second']:>14,.0f} {row['noise']:>12,.0f}"
            print(f"{line}  {'yes' if row['level'] else 'NO'}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"loads": len(outcomes), "ranks": len(by_rank), "verdicts": verdicts, "versions": versions}))
    return 0 if all(row["level"] for verdict in verdicts for row in verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
