"""The only door to torch.distributed: one group of ranks that load together.

Receives a process group, or none; gives a `Group` whose methods every rank calls in the same order. Promises:
- a failure on any rank is the same typed error on every rank, whose process group works again where its members live;
- ranks wait for each other over the store, never inside a collective, so that work may take longer than the process
  group's own timeout; collectives only start when every rank is there for them;
- a rank that has died is noticed within 10 s, silence ends at `timeout`, and both name the rank.

Ranks are ranks in the group here; those in errors are global ranks.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from safeload.errors import GroupError
from safeload.grouping import Group
from safeload.meeting import RankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "join_group"]

_TIMEOUT: Final = timedelta(minutes=30)


def join_group(group: ProcessGroup | None = None, *, source_rank: int = 0, timeout: timedelta = _TIMEOUT) -> Group:
    """Return the group to load in, to be entered with `with`.

    Args:
        group: A process group, or a one-dimensional device mesh; None is the default group, if there is one.
        source_rank: Rank in the group that reads.
        timeout: How long the ranks wait for each other to come, and again for the whole load to end.

    Returns:
        A group of one, which needs no torch.distributed, where there is no process group.

    Raises:
        GroupError: This process is not a member. Where there is no such `source_rank`, or `timeout` is no time,
            entering the group raises it, on every rank.

    Ranks: called on every rank of `group`, in the same order.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _raise(_refusal(source_rank, timeout, size=1))
        _warn_if_alone()
        rank = os.environ.get("RANK", "")  # as torchrun names this process, for errors
        return Group(global_rank=int(rank) if rank.isdecimal() else 0, timeout=timeout)
    group = _resolve(group)
    size = dist.get_world_size(group)
    refusal = _refusal(source_rank, timeout, size=size)
    if size == 1:
        _raise(refusal)
        return Group(global_rank=dist.get_rank(), timeout=timeout)
    if refusal is not None:  # the other ranks may have been called rightly: they are met, and told
        return RankGroup.of(group, source_rank=0, timeout=_TIMEOUT, refusal=refusal)
    return RankGroup.of(group, source_rank=source_rank, timeout=timeout)


def _refusal(source_rank: int, timeout: timedelta, *, size: int) -> GroupError | None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        return GroupError(f"timeout is {timeout!r}: expected a positive datetime.timedelta, as timedelta(minutes=30)")
    if size > 1 and not (isinstance(source_rank, int) and 0 <= source_rank < size):
        return GroupError(
            f"source_rank is {source_rank!r}, but the group has ranks 0 to {size - 1} (ranks in the group)"
        )
    return None


def _raise(refusal: GroupError | None) -> None:
    if refusal is not None:
        raise refusal


def _warn_if_alone() -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"WORLD_SIZE is {size} but there is no process group yet, so every rank loads and verifies for itself. "
            "Call torch.distributed.init_process_group() (or make the Accelerator, or the Trainer's arguments) first, "
            "and one rank reads for all.",
            UserWarning,
            stacklevel=3,
        )


def _resolve(group: Any) -> ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # set, since the default group is initialised
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise GroupError(
                f"group is a device mesh of {group.ndim} dimensions {group.mesh_dim_names}; pass the one to load in, "
                "as mesh['name'], or mesh.get_group('name'), or a process group"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            f"rank {dist.get_rank()} is not a member of the group it loads in; only members may call",
            rank=dist.get_rank(),
        )
    if not isinstance(group, dist.ProcessGroup):
        raise GroupError(f"group is {group!r}: expected a process group, a one-dimensional device mesh, or None")
    return group
