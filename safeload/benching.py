"""What it costs to bring a tower to every rank, by several ways in turn, on this machine.

Receives the folder of a tower, numbers of ranks and names of ways; gives a `BenchReport`: wall time from a barrier to
the moment when all ranks hold a tower whose every page has been read, and the memory of all ranks together (PSS). All
ways run in the same processes, one after the other and again (A B C A B C), beside the machine's own limits, so that
what slows the machine down slows all of them down. Only ratios of one run mean anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import SafeLoadError
from safeload.peers import PEERS, load_class
from safeload.reporting import MemoryMeter, pss_bytes
from safeload.spawning import run_ranks

__all__ = ["SIZES", "WAYS", "BenchReport", "Measured", "bench", "make_tower"]

SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "0.01B": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4},
    "0.3B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1B": {"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
    "6B": {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48, "num_attention_heads": 25},
}
_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "safeload": {},
    "safeload-mapped": {"memory": "mapped", "chunk_digests": False},
    "safeload-known": {"memory": "mapped", "chunk_digests": True},
    "safeload-first-use": {"memory": "mapped", "chunk_digests": False, "verdict": "first_use"},
    "safeload-broadcast": {"transport": "broadcast"},
    "safeload-broadcast-mapped": {"transport": "broadcast", "memory": "mapped", "chunk_digests": False},
    "safeload-bf16": {"dtype": "bfloat16"},
}
WAYS: Final = ("sha256", *PEERS, *_OWN)
_PAGE_BYTES: Final = 4096
_TIMEOUT: Final = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way with one number of ranks.

    Attributes:
        way: Its name.
        ranks: How many.
        seconds: From the barrier to the end, by round.
        returned_s: From the barrier until the call had returned on all ranks, by round.
        cpu_s: Processor time of all ranks together, by round; says less than `seconds`, but on a busy machine too.
        pss_bytes: Memory that all ranks together hold more than before; median.
        peak_bytes: The highest such sum of the ranks' own peaks; median.
    """

    way: str
    ranks: int
    seconds: tuple[float, ...]
    returned_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    pss_bytes: int
    peak_bytes: int

    @property
    def median_s(self) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All that was measured, with the machine and the versions it was measured on."""

    tower: str
    tower_bytes: int
    measured: tuple[Measured, ...]
    limits_s: Mapping[str, float]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    def ratio(self, way: str, to: str, ranks: int, *, returned: bool = False) -> float:
        """Return the median over the rounds of the ratio of two ways' times."""
        one, other = (self.find(name, ranks) for name in (way, to))
        times = one.returned_s if returned else one.seconds
        return statistics.median(a / b for a, b in zip(times, other.seconds, strict=True))

    def find(self, way: str, ranks: int) -> Measured:
        """Return one measurement; `KeyError` where there is none."""
        for each in self.measured:
            if (each.way, each.ranks) == (way, ranks):
                return each
        raise KeyError((way, ranks))

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))


def make_tower(folder: Path, size: str) -> Path:
    """Write a CLIP vision tower with seeded random weights, float32; leave one that is there.

    Args:
        folder: Where; it is made below it, by the name of the size.
        size: One of `SIZES`.

    Returns:
        The tower's folder.

    Raises:
        SafeLoadError: There is no such size.
    """
    if size not in SIZES:
        raise SafeLoadError(f"size {size!r}: expected one of {', '.join(SIZES)}")
    from transformers import CLIPVisionConfig, CLIPVisionModel

    target = folder / f"clip-vision-{size}"
    if not (target / "SHA256SUMS").exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = CLIPVisionModel(CLIPVisionConfig(patch_size=14, image_size=224, **SIZES[size]))
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(target, max_shard_size="1500MB")
        lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(target.iterdir())]
        (target / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        hasher, buffer = hashlib.sha256(), bytearray(1 << 20)
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
        return hasher.hexdigest()


def bench(
    folder: Path, *, ways: Sequence[str], ranks: Sequence[int] = (1, 2, 4), rounds: int = 5, work: Path
) -> BenchReport:
    """Measure.

    Args:
        folder: The tower's folder, with safetensors weights.
        ways: Names out of `WAYS`, in the order in which they take turns.
        ranks: Numbers of ranks.
        rounds: How often each way runs with each number of ranks; the first is for warming up and not counted.
        work: A folder for lists of chunks.

    Returns:
        The report.

    Raises:
        SafeLoadError: An unknown way.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise SafeLoadError(f"no such way: {', '.join(unknown)}; expected some of {', '.join(WAYS)}")
    measured: list[Measured] = []
    sizes: list[int] = []
    for count in ranks:
        results = run_ranks(
            "safeload.benching.run_ways",
            str(folder),
            tuple(ways),
            rounds,
            ranks=count,
            timeout=_TIMEOUT,
            env={"XDG_CACHE_HOME": str(work), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        sizes.append(results[0]["tower_bytes"])
        measured += [_combine(way, count, [result["ways"][way] for result in results]) for way in ways]
    return BenchReport(
        tower=folder.name,
        tower_bytes=sizes[0],
        measured=tuple(measured),
        limits_s=_limits(sizes[0]),
        machine=_machine(),
        versions=_versions(),
    )


def _combine(way: str, ranks: int, of: Sequence[Mapping[str, Sequence[float]]]) -> Measured:
    def over(key: str, join: Callable[..., float]) -> tuple[float, ...]:
        return tuple(join(values) for values in zip(*(each[key] for each in of), strict=True))

    return Measured(
        way=way,
        ranks=ranks,
        seconds=over("seconds", max),
        returned_s=over("returned_s", max),
        cpu_s=over("cpu_s", sum),
        pss_bytes=int(statistics.median(over("pss_bytes", sum))),
        peak_bytes=int(statistics.median(over("peak_bytes", sum))),
    )


# --- on every rank ---


def run_ways(folder: str, ways: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Run the ways in turn; called on every rank.

    Args:
        folder: The tower's folder.
        ways: Names.
        rounds: How often; the first is not counted.

    Ranks: every rank.
    """
    torch.set_num_threads(1)
    _meet_over_tcp()
    model_class = load_class(folder)
    runs: dict[str, dict[str, list[float]]] = {
        way: {"seconds": [], "returned_s": [], "cpu_s": [], "pss_bytes": [], "peak_bytes": []} for way in ways
    }
    tower_bytes = 0
    for number in range(rounds + 1):
        for way in ways:
            values, size_bytes = _run_once(_load_by(way, model_class, folder))
            tower_bytes = max(size_bytes, tower_bytes)
            for key, value in values.items():
                runs[way][key] += [value] if number else []
    return {"ways": runs, "tower_bytes": tower_bytes}


def _meet_over_tcp() -> None:
    """Make the group anew over a TCP store, as a launcher does; a store in a file answers ten times as slowly."""
    import torch.distributed as dist

    store_class = vars(dist)["TCPStore"]
    rank, size = dist.get_rank(), dist.get_world_size()
    store = store_class("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [store.port if store is not None else 0]
    dist.broadcast_object_list(ports, 0)
    dist.destroy_process_group()
    if store is None:
        store = store_class("127.0.0.1", ports[0], size, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)


def _load_by(way: str, model_class: Any, folder: str) -> Callable[[], nn.Module | None]:
    if way == "sha256":
        return lambda: _hash_on_first_rank(folder)
    if way in PEERS:
        return lambda: PEERS[way](model_class, folder)
    from safeload.loading import safe_from_pretrained

    own = dict(_OWN[way])
    return lambda: safe_from_pretrained(model_class, folder, device="cpu", progress=False, **own)


def _hash_on_first_rank(folder: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        for path in sorted(Path(folder).glob("*.safetensors")):
            _sha256(path)


def _run_once(load: Callable[[], nn.Module | None]) -> tuple[dict[str, float], int]:
    import torch.distributed as dist

    _give_back_memory()
    dist.barrier()
    before = pss_bytes() or 0
    with MemoryMeter() as meter:
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        module = load()
        returned = time.perf_counter() - start
        size_bytes = _touch(module) if module is not None else 0
        cpu_s = time.process_time() - start_cpu
        dist.barrier()
        seconds = time.perf_counter() - start
        meter.stop()  # all ranks still hold what they have loaded
        dist.barrier()
    held = max(0, (meter.after_bytes or 0) - before)
    peak = max(0, (meter.peak_bytes or 0) - before)
    times = {"seconds": seconds, "returned_s": returned, "cpu_s": cpu_s}
    return times | {"pss_bytes": float(held), "peak_bytes": float(peak)}, size_bytes


def _give_back_memory() -> None:
    """Let nothing of the way before count for this one: what it has freed goes back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _touch(module: nn.Module) -> int:
    """Read a value of every page; wait for a verdict that is still out."""
    size_bytes = 0
    for value in (*module.parameters(), *module.buffers()):
        raw = value.detach().reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
        raw[::_PAGE_BYTES].sum()
        size_bytes += value.nbytes
    module.state_dict()
    return size_bytes


# --- the machine ---


def _limits(size_bytes: int) -> dict[str, float]:
    """Seconds that this machine's own limits set for so many bytes, on one core: best of three."""
    sample = min(size_bytes, 256 << 20)
    filled = torch.ones(sample, dtype=torch.uint8)
    other = torch.ones(sample, dtype=torch.uint8)
    raw = filled.numpy().data

    def fresh() -> None:
        torch.empty(sample, dtype=torch.uint8).copy_(filled)

    ways: dict[str, Callable[[], object]] = {
        "copy between pages that are there": lambda: other.copy_(filled),
        "copy into fresh pages": fresh,
        "sha256": lambda: hashlib.sha256(raw).digest(),
    }
    try:
        from blake3 import blake3

        ways["blake3"] = lambda: blake3(raw).digest()
    except ImportError:
        pass
    if hasattr(os, "memfd_create"):
        ways["copy into fresh sealed memory"] = lambda: _fill_memory(raw)
    return {name: min(_timed(way) for _ in range(3)) * size_bytes / sample for name, way in ways.items()}


def _fill_memory(raw: memoryview) -> None:
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, len(raw))
        at = 0
        while at < len(raw):
            at += os.pwrite(fd, raw[at : at + (4 << 20)], at)
    finally:
        os.close(fd)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cores": cores, "system": platform.platform(), "machine": platform.machine(), "load_at_end": load}


def _versions() -> dict[str, str]:
    names = (
        "safeload",
        "torch",
        "transformers",
        "safetensors",
        "accelerate",
        "blake3",
        "tensorizer",
        "fastsafetensors",
    )
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
