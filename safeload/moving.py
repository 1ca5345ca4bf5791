"""Receive the function that an outer `.to()` or `.half()` wants to call on every tensor, follow its device alone.

A tower follows its model to another real device, as one move of the verified values with their dtypes. It follows no
cast, no move to the meta device and no `to_empty`, whose point is that what was there is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from safeload.keeping import Kept, Protection, rebase

__all__ = ["move"]

_WHOLE_SHARE = 0.9  # a storage of which the tower uses at least this share is moved in one piece


def _probe(fn: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.device:
    """Return the device to which the function takes a tensor of this dtype and device, found out on one element."""
    with torch.device(like.device):
        probe = torch.zeros(1, dtype=like.dtype, device=like.device)
    return fn(probe).device


def _view_on(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _move_storage(kept: list[Kept], device: torch.device) -> None:
    """Move all tensors on one storage, so that those that share bytes go on sharing them."""
    used = {(k.verified.storage_offset(), k.verified.shape, k.verified.stride()): k.verified.nbytes for k in kept}
    storage = kept[0].verified.untyped_storage()
    if sum(used.values()) >= _WHOLE_SHARE * storage.nbytes():
        with torch.device("cpu"):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        there = flat.to(device).untyped_storage()
        for one in kept:
            rebase(one, _view_on(there, one.verified))
        return
    moved: dict[tuple[object, ...], torch.Tensor] = {}
    for one in kept:
        place = (one.verified.dtype, one.verified.storage_offset(), one.verified.shape, one.verified.stride())
        if place not in moved:
            moved[place] = one.verified.to(device)
        rebase(one, moved[place])


@torch.no_grad()
def move(protection: Protection, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Move a tower to where the function takes its tensors, if that is another real device.

    Args:
        protection: The tower's record, mended before.
        fn: What `nn.Module._apply` was given. It is called on single-element tensors only.
    """
    targets: dict[tuple[torch.dtype, torch.device], torch.device] = {}
    groups: dict[tuple[int, torch.device], list[Kept]] = {}
    for kept in protection.kept:
        here = kept.verified.device
        kind = (kept.verified.dtype, here)
        target = targets.setdefault(kind, _probe(fn, kept.verified)) if kind not in targets else targets[kind]
        if target not in (torch.device("meta"), here):
            groups.setdefault((kept.verified.untyped_storage()._cdata, target), []).append(kept)
    if groups:
        protection.settle()
    for (_, target), group in groups.items():
        _move_storage(group, target)
    if groups:
        protection.armed = True
        protection.samples.clear()
