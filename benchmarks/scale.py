"""How long does a load take on 8 to 1,024 ranks, and what must the source's host hold and send?

    python -m benchmarks.scale [--measure] [--plot benchmarks/scale.png]

A model, and what it is checked against. The model has three parts: reading and hashing on the source; the control
plane, whose cost grows with the ranks; the payload, whose cost is what the busiest link must carry.
- tree: torch's gloo broadcast to every rank, simulated send by send (a binomial tree over the ranks, in
  rank order, so that the ranks of one host each send to ranks of all the others).
- one copy a host: the same tree over one rank of each host; the others map that rank's memory.
- ring: a chain over the hosts, pipelined in buckets, as NCCL broadcasts do.
- each reads: no safeload; every host reads the files from shared storage, hashing nothing.
`--measure` (Linux, root) makes 2, 3 and 4 hosts out of network namespaces whose links are shaped to one rate, loads
over them, and compares bytes and seconds with the tree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.hosts import Cluster, hosts
from tests.ranks import run_on_ranks

BUCKET_BYTES, PACKED_BYTES = 32 * 1024**2, 1024**2  # as in safeload.broadcasting
STAGES = 16  # ends of stages with an agreement in one load
STORE_OP_S = 25e-6  # one operation of a TCPStore's server, measured below with --measure
SHAPED_RATE_BITS = 200e6
FRAMING = 1.045  # bytes on an Ethernet link for each byte of payload: headers and acknowledgements


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the model needs to know about a place."""

    name: str
    link_bytes_s: float
    read_bytes_s: float  # the source: read, hash and copy
    storage_bytes_s: float  # the shared storage, all readers together


SITES = (
    Site(name="10 Gbit/s", link_bytes_s=1.25e9, read_bytes_s=1.5e9, storage_bytes_s=2.5e9),
    Site(name="100 Gbit/s", link_bytes_s=12.5e9, read_bytes_s=2.0e9, storage_bytes_s=20e9),
)


def tree_sends(size: int) -> list[tuple[int, int]]:
    """Return the sends of gloo's broadcast from rank 0, as (from, to): first to the neighbour, then twice as far..."""
    sends = []
    distance = 1
    while distance < size:
        sends += [(rank, rank + distance) for rank in range(distance) if rank + distance < size]
        distance *= 2
    return sends


def link_copies(host_of: Sequence[int]) -> tuple[Counter[int], Counter[int]]:
    """Return how many copies of the payload each host's link sends, and receives, in a tree over the ranks."""
    crossing = [(host_of[a], host_of[b]) for a, b in tree_sends(len(host_of)) if host_of[a] != host_of[b]]
    return Counter(a for a, _ in crossing), Counter(b for _, b in crossing)


def tree_s(buckets: Sequence[float], host_of: Sequence[int], link_bytes_s: float) -> float:
    """Seconds of a tree, bucket by bucket: a rank forwards what it has, one send after another on its host's links."""
    sends = tree_sends(len(host_of))
    out_free, in_free = Counter[int](), Counter[int]()  # when a host's link can send, and receive, the next bucket
    free = Counter[int]()  # when a rank has made all its sends of the bucket before
    for size_bytes in buckets:
        has = {0: free[0]}
        for a, b in sends:
            out, into = host_of[a], host_of[b]
            has[b] = begins = max(has[a], free[b])
            if out != into:
                begins = max(begins, out_free[out], in_free[into])
                has[b] = out_free[out] = in_free[into] = begins + size_bytes / link_bytes_s
        for a, b in sends:
            free[a], free[b] = max(free[a], has[b]), max(free[b], has[b])
    return max(free.values(), default=0.0)


def cut(size_bytes: float) -> list[float]:
    """Cut a payload of large tensors into buckets."""
    whole, rest = divmod(size_bytes, BUCKET_BYTES)
    return [float(BUCKET_BYTES)] * int(whole) + [rest] * (rest > 0)


def ring_s(size_bytes: float, host_count: int, link_bytes_s: float) -> float:
    """Seconds of a pipelined chain: the payload once, and a bucket's way along it."""
    if host_count < 2:
        return 0.0
    return (size_bytes + (host_count - 2) * min(BUCKET_BYTES, size_bytes)) / link_bytes_s


def control_s(rank_count: int, bucket_windows: int = 1) -> float:
    """Seconds of agreement: each rank states, asks and is told, in every stage, and the store serves one at a time."""
    questions = 4 * STAGES + 2 * bucket_windows  # a statement, its deletion, and about two looks for the verdict
    return rank_count * questions * STORE_OP_S


def predict(size_bytes: float, host_count: int, ranks_a_host: int, site: Site) -> dict[str, float]:
    """Seconds of a whole load, by way of moving the payload."""
    every_rank = [rank // ranks_a_host for rank in range(host_count * ranks_a_host)]
    control = control_s(len(every_rank), math.ceil(size_bytes / 1024**3))
    base = size_bytes / site.read_bytes_s + control
    return {
        "tree": base + tree_s(cut(size_bytes), every_rank, site.link_bytes_s),
        "one copy a host": base + tree_s(cut(size_bytes), range(host_count), site.link_bytes_s),
        "ring": base + ring_s(size_bytes, host_count, site.link_bytes_s),
        "each reads": host_count * size_bytes / site.storage_bytes_s,
    }


def sent_by_source(size_bytes: float, host_count: int, ranks_a_host: int) -> dict[str, float]:
    """Bytes that the source's host sends, by way."""
    every_rank = [rank // ranks_a_host for rank in range(host_count * ranks_a_host)]
    return {
        "tree": link_copies(every_rank)[0][0] * size_bytes,
        "one copy a host": link_copies(range(host_count))[0][0] * size_bytes,
        "ring": size_bytes * (host_count > 1),
    }


# --- what the model is checked against ---


def make_tower(folder: Path) -> Path:
    """Write a tower of about 20 MB, so that a shaped link takes about a second for a copy."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(3)
    config = CLIPVisionConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, image_size=64
    )
    CLIPVisionModel(config).save_pretrained(folder)
    return folder


def tower_buckets(tower: Path) -> list[int]:
    """Return the buckets that a tower is sent in: large tensors each for themselves, small ones packed."""
    from safetensors import safe_open

    with safe_open(tower / "model.safetensors", "pt") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 (not a dict)
    large = [size for size in sizes if size > PACKED_BYTES]
    return [*large, sum(sizes) - sum(large)]


def time_loads(tower: Path, cluster: Cluster, repeats: int) -> list[dict[str, Any]]:
    """Load a few times over shaped links. Ranks: every rank."""
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import load_report, safe_from_pretrained

    rows = []
    for attempt in range(repeats + 1):
        dist.barrier()
        before = [(cluster.sent_bytes(host), cluster.received_bytes(host)) for host in range(len(cluster.names))]
        began = time.monotonic()
        module = safe_from_pretrained(CLIPVisionModel, tower, device="cpu", verify="off", transport="broadcast")
        seconds = time.monotonic() - began
        dist.barrier()
        after = [(cluster.sent_bytes(host), cluster.received_bytes(host)) for host in range(len(cluster.names))]
        report = load_report(module)
        moved = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
        row = {"seconds": seconds, "payload_s": report.seconds["broadcast"], "moved": moved}
        if attempt:  # the first makes the connections
            rows.append(row | {"tower_bytes": report.tower_bytes})
    return rows


def measure(layouts: Sequence[Sequence[int]], repeats: int = 3) -> list[dict[str, Any]]:
    """Load on hosts made of network namespaces; a row a layout, beside the model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tower = make_tower(Path(folder))
        buckets = tower_buckets(tower)
        for layout in layouts:
            with hosts(max(layout) + 1) as cluster:
                for host in range(max(layout) + 1):
                    cluster.slow_down(host, rate=f"{SHAPED_RATE_BITS / 1e6:.0f}mbit", limit_bytes=2_000_000)
                options = cluster.options(host_of=layout)
                results = run_on_ranks(len(layout), time_loads, tower, cluster, repeats, timeout_s=300, **options)
            for result in results:
                if not result.ok:
                    raise RuntimeError(result.describe())
            rows.append(_compare(layout, results[0].value, buckets))
    return rows


def _compare(layout: Sequence[int], runs: list[dict[str, Any]], buckets: Sequence[int]) -> dict[str, Any]:
    size_bytes = runs[0]["tower_bytes"]
    sent, received = link_copies(layout)
    seconds = sorted(run["payload_s"] for run in runs)
    return {
        "layout": list(layout),
        "tower_bytes": size_bytes,
        "sent_copies": [sent[host] for host in range(max(layout) + 1)],
        "received_copies": [received[host] for host in range(max(layout) + 1)],
        "measured_sent": [round(moved[0] / size_bytes, 2) for moved in runs[0]["moved"]],
        "measured_received": [round(moved[1] / size_bytes, 2) for moved in runs[0]["moved"]],
        "model_s": tree_s([FRAMING * each for each in buckets], layout, SHAPED_RATE_BITS / 8),
        "best_s": seconds[0],
        "median_s": statistics.median(seconds),
        "worst_s": seconds[-1],
    }


def time_store(repeats: int = 20_000) -> float:
    """Seconds of one operation of a TCPStore, through a socket, one client."""
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10), wait_for_workers=False)
    began = time.monotonic()
    for _ in range(repeats):
        client.check(["none"])
    return (time.monotonic() - began) / repeats


# --- what is shown ---

HOST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
RANKS_A_HOST = 8
TOWER_BYTES = 9.5e9  # a T5-XXL text encoder in bf16


def show_predictions() -> list[dict[str, Any]]:
    """Print the model's table and return it."""
    rows = []
    for site in SITES:
        print(
            f"\n{TOWER_BYTES / 1e9:.1f} GB tower, {RANKS_A_HOST} ranks a host, links of {site.name}: seconds of a load"
        )
        print(
            f"{'ranks':>6} {'hosts':>6} {'tree':>8} {'one copy':>9} {'ring':>8} {'each reads':>11} {'control':>8}"
            "   GB sent by the source's host"
        )
        for host_count in HOST_COUNTS:
            ranks = host_count * RANKS_A_HOST
            seconds = predict(TOWER_BYTES, host_count, RANKS_A_HOST, site)
            sent = sent_by_source(TOWER_BYTES, host_count, RANKS_A_HOST)
            control = control_s(ranks, math.ceil(TOWER_BYTES / 1024**3))
            print(
                f"{ranks:>6} {host_count:>6} {seconds['tree']:>8.1f} {seconds['one copy a host']:>9.1f} "
                f"{seconds['ring']:>8.1f} {seconds['each reads']:>11.1f} {control:>8.2f}   "
                + ", ".join(f"{way} {each / 1e9:.0f}" for way, each in sent.items())
            )
            rows.append({"site": site.name, "ranks": ranks, "hosts": host_count, "seconds": seconds, "sent": sent})
    held_gb = TOWER_BYTES / 1e9
    print(f"\nThe source's host holds {held_gb:.1f} GB sealed, and the module's own copy where a dtype is cast.")
    return rows


def show_measured(rows: list[dict[str, Any]]) -> None:
    """Print measured beside predicted."""
    print(f"\nmeasured over links of {SHAPED_RATE_BITS / 1e6:.0f} Mbit/s, payload stage")
    print(f"{'host of each rank':>24} {'model s':>8} {'best s':>8} {'median s':>9} {'worst s':>8}   copies sent")
    for row in rows:
        layout = " ".join(map(str, row["layout"]))
        print(
            f"{layout:>24} {row['model_s']:>8.2f} {row['best_s']:>8.2f} {row['median_s']:>9.2f} {row['worst_s']:>8.2f}"
            f"   model {row['sent_copies']}, measured {row['measured_sent']}"
        )


def draw(predicted: list[dict[str, Any]], measured: list[dict[str, Any]], path: Path) -> None:
    """Plot the model for each site, and measured against predicted."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(SITES) + 1, figsize=(15, 4.5))
    for axis, site in zip(axes, SITES, strict=False):
        rows = [row for row in predicted if row["site"] == site.name]
        for way in rows[0]["seconds"]:
            axis.plot([row["ranks"] for row in rows], [row["seconds"][way] for row in rows], marker="o", label=way)
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a load (model)")
        axis.set_title(f"{TOWER_BYTES / 1e9:.1f} GB, {RANKS_A_HOST} ranks a host, {site.name}")
        axis.set_xticks([row["ranks"] for row in rows], [str(row["ranks"]) for row in rows])
        axis.legend()
    axis = axes[-1]
    for row in measured:
        bars = [[row["median_s"] - row["best_s"]], [row["worst_s"] - row["median_s"]]]
        axis.errorbar(row["model_s"], row["median_s"], yerr=bars, fmt="o", capsize=3)
        axis.annotate(" ".join(map(str, row["layout"])), (row["model_s"], row["median_s"]), fontsize=7)
    top = 1.2 * max([row["worst_s"] for row in measured] + [row["model_s"] for row in measured], default=1)
    axis.plot([0, top], [0, top], color="grey", linewidth=0.8)
    axis.set(xlabel="model (s)", ylabel="measured (s)", title="the payload on 2, 3 and 4 hosts (host of each rank)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Print the model, and what it was checked against."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    measured: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    if options.measure:
        one_each = [list(range(count)) for count in (2, 3, 4)]
        two_each = [list(itertools.chain.from_iterable((host, host) for host in range(count))) for count in (2, 3, 4)]
        facts["store_op_s"] = time_store()
        print(f"one store operation: {facts['store_op_s'] * 1e6:.0f} us here, {STORE_OP_S * 1e6:.0f} us in the model")
        measured = measure([*one_each, *two_each])
        show_measured(measured)
    predicted = show_predictions()
    if options.plot:
        draw(predicted, measured, options.plot)
    sites = [asdict(site) for site in SITES]
    print(json.dumps({"sites": sites, "measured": measured, "predicted": predicted, **facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
