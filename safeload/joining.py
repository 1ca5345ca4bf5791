"""Processes that can meet in a store and broadcast to each other: a process group's members, or some of them.

Receives a process group, or some ranks and a store; gives `Members`. A part of a group gets a backend of its own, which
ends with the load that made it. Torch does not know it as a process group: `new_group` for some ranks alone chooses its
name by how many groups each rank is in, so that ranks of more groups than others would wait for ever; and it uses the
name of one that was destroyed again, with its old addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from safeload.waiting import Workers
from safeload.wiring import Store, control_store, device_types, own_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Members", "members_of", "part_of"]

_PATIENCE_S: Final = 0.3  # for a backend to end: one that is stuck in a transfer is left to a daemon thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Processes that can meet.

    Attributes:
        global_ranks: Theirs, by rank among them.
        rank: This process's rank among them.
        devices: Types of device whose tensors `begin` takes, the cpu first.
        begin: Begins to broadcast a tensor from a rank among them.
        open_store: Returns the store they share. Ranks: every one of them.
        close: Ends what was made for them alone.
    """

    global_ranks: tuple[int, ...]
    rank: int
    devices: tuple[str, ...]
    begin: Callable[[torch.Tensor, int], Work | None]
    open_store: Callable[[], Store]
    close: Callable[[], None]


def members_of(group: ProcessGroup, *, timeout: timedelta) -> Members:
    """Return the members of a process group.

    Args:
        group: The process group.
        timeout: For making a store where the group's own can not be had.

    Ranks: local.
    """
    ranks = tuple(dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group)))

    def begin(tensor: torch.Tensor, source_rank: int) -> Work | None:
        return cast("Work | None", dist.broadcast(tensor, src=ranks[source_rank], group=group, async_op=True))

    return Members(
        global_ranks=ranks,
        rank=dist.get_rank(group),
        devices=device_types(group),
        begin=begin,
        open_store=lambda: control_store(group, timeout=timeout),
        close=lambda: None,
    )


def part_of(global_ranks: tuple[int, ...], global_rank: int, store: Store, *, timeout: timedelta) -> Members:
    """Connect some processes; waits for all of them.

    Args:
        global_ranks: Theirs, in any order.
        global_rank: This one's.
        store: Which they share, under a prefix of their own.
        timeout: For connecting, and again for each broadcast.

    Returns:
        Them, in that order; in rank order where there is no such backend.

    Raises:
        RuntimeError: They could not connect.

    Ranks: called on all of these, and on no other.
    """
    if "ProcessGroupGloo" not in vars(dist):
        return _new_group_of(global_ranks, timeout=timeout)
    rank = global_ranks.index(global_rank)
    line = own_line(store)  # connecting waits in it
    backends = [_connect(line, rank, len(global_ranks), timeout)]

    def begin(tensor: torch.Tensor, source_rank: int) -> Work | None:
        options: Any = vars(dist)["BroadcastOptions"]()
        options.rootRank, options.rootTensor = source_rank, 0
        return cast("Work", backends[0].broadcast([tensor], options))

    def end() -> None:
        line.delete_key(_address_key(rank))  # every rank has read it, or has failed
        backends.clear()

    def close() -> None:
        ending = Workers(1, name="safeload-part")
        try:
            ending.submit(end)
        except RuntimeError:  # no room for a thread
            end()
        ending.close(patience_s=_PATIENCE_S)

    return Members(
        global_ranks=global_ranks, rank=rank, devices=("cpu",), begin=begin, open_store=lambda: store, close=close
    )


def _new_group_of(global_ranks: tuple[int, ...], *, timeout: timedelta) -> Members:
    """Do it by public means, with what the module's docstring says of them."""
    group: Any = dist.new_group(sorted(global_ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
    return replace(members_of(group, timeout=timeout), close=lambda: dist.destroy_process_group(group))


def _connect(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a gloo backend; private API of torch.distributed, as is the name of its key in `_address_key`."""
    return vars(dist)["ProcessGroupGloo"](store, rank, size, timeout)


def _address_key(rank: int) -> str:
    return f"0/{rank}"  # the address of the backend's only device, of this rank
