"""Run ways to load a tower in turn, on every rank of a group, and measure each; `safeload.benching` starts the ranks.

Before anything is timed the files are read from the disk, once, and each way loads once, which warms it up. What it
loaded is compared with what `from_pretrained` gives, value by value: what is fast and wrong would be no yardstick.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from safeload.chilling import drop, read_anew, resident_share
from safeload.errors import SafeLoadError
from safeload.peers import PEERS, hash_files
from safeload.skeletons import load_class, weight_files
from safeload.weighing import give_back_memory, let_malloc_map, time_once, weigh_once

__all__ = ["TIMEOUT", "WAYS", "Race", "race"]

TIMEOUT: Final = timedelta(minutes=60)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What to run.

    Attributes:
        folder: The tower's folder.
        ways: Names out of `WAYS`, in the order in which they take turns.
        rounds: How often each is measured.
        work: A folder for what ways keep.
        cold: Let the files be dropped from the page cache before each way.
    """

    folder: str
    ways: tuple[str, ...]
    rounds: int
    work: str
    cold: bool = False

    def files(self) -> list[str]:
        """Return all that the ways read: the tower's files, and those in a format of a way's own."""
        others = [PEERS[way].file for way in self.ways if way in PEERS]
        own = {find(self.folder, self.work) for find in others if find is not None}
        return [*weight_files(self.folder), *(path for path in sorted(own) if Path(path).exists())]


def race(what: Race) -> dict[str, Any]:
    """Run the ways in turn.

    Args:
        what: What to run; the same on every rank.

    Returns:
        `ways`, what was measured by way: lists by round. `memory`: of one load by each way. `resident`: in a cold race
        the largest share of the files that was still in memory after they had been dropped, None where the system does
        not tell.

    Raises:
        SafeLoadError: A way did not load what `from_pretrained` loads.

    Ranks: every rank of the default group.
    """
    torch.set_num_threads(1)
    let_malloc_map()
    _meet_over_tcp()
    model_class = load_class(what.folder)
    _prepare(model_class, what)
    _warm(what.files())
    loads = {way: _load_by(way, model_class, what) for way in what.ways}
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in what.ways}
    weights: dict[str, dict[str, float]] = {}
    for way, load in loads.items():
        _compare(way, load(), model_class, what.folder)
        give_back_memory()
        weights[way] = weigh_once(load)
    resident: list[float | None] = []
    for _ in range(what.rounds):
        for way, load in loads.items():
            give_back_memory()
            resident += [_chill(what.files())] if what.cold else []
            runs[way].append(time_once(load))
    shares = [share for share in resident if share is not None]
    return {
        "ways": {way: {key: [each[key] for each in rows] for key in rows[0]} for way, rows in runs.items()},
        "memory": weights,
        "resident": max(shares) if shares and len(shares) == len(resident) else None,
    }


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
        store = store_class("127.0.0.1", ports[0], size, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _prepare(model_class: Any, what: Race) -> None:
    """Let ways that read files of their own write them, on the first rank; the others wait."""
    import torch.distributed as dist

    for prepare in dict.fromkeys(PEERS[way].prepare for way in what.ways if way in PEERS):
        if prepare is not None and dist.get_rank() == 0:
            prepare(model_class, what.folder, what.work)
    dist.barrier()


def _warm(paths: Sequence[str]) -> None:
    """Let the first rank read the files from the disk, where the system can drop them before; the others wait."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with contextlib.suppress(NotImplementedError):
            read_anew(paths)
    dist.barrier()


def _load_by(way: str, model_class: Any, what: Race) -> Callable[[], nn.Module | None]:
    if way == "sha256":
        return lambda: _hash_on_first_rank(what.folder)
    if way in PEERS:
        return lambda: PEERS[way].load(model_class, what.folder, what.work)
    from safeload.loading import safe_from_pretrained

    own = dict(_OWN[way])
    return lambda: safe_from_pretrained(model_class, what.folder, device="cpu", progress=False, **own)


def _hash_on_first_rank(folder: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        hash_files(weight_files(folder))


def _compare(way: str, module: nn.Module | None, model_class: Any, folder: str) -> None:
    """Hold what a way loaded to what `from_pretrained` gives, cast where the way casts."""
    if module is None:
        return
    module.state_dict()  # waits for a verdict that is still out: what reads on behind would still hold the memory
    got, want = (_tensors(each) for each in (module, model_class.from_pretrained(folder)))
    wrong = sorted(
        name
        for name in got.keys() | want.keys()
        if name not in got or name not in want or not torch.equal(got[name], want[name].to(got[name].dtype))
    )
    if wrong:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise SafeLoadError(f"{way}: {wrong[0]}{others} is not what from_pretrained gives: no yardstick for this tower")


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def _chill(paths: Sequence[str]) -> float | None:
    """Drop the files, which no rank maps any more, and return the share that has stayed."""
    import torch.distributed as dist

    share = None
    if dist.get_rank() == 0:
        drop(paths)
        share = resident_share(paths)
    dist.barrier()
    return share
