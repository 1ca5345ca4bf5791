"""Receive tensors of a tower, say whether a few values of each are still the verified ones, in microseconds.

What is written through `.data` is in none of torch's counts: initialisers, averaged copies and optimizers of one's own
do it. Where a tower is in the memory of the host, a few values of every tensor are therefore compared before each use.
On an accelerator that would make the host wait for the device, and is left to the first use and to `check_towers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from safeload.fingerprinting import few_values
from safeload.keeping import Kept, Protection

__all__ = ["agrees"]

_LEAST_BYTES: Final = 1  # float8 and the like cannot be joined on the CPU; no tower is of them
Sample = list[tuple[list[torch.Tensor], torch.Tensor]]  # for each dtype: views of the tensors, and what is expected


def agrees(protection: Protection, path: str, tensors: Iterable[Kept]) -> bool:
    """Compare a few values of each tensor that is in the host's memory.

    Args:
        protection: The tower's record; it has its glimpses, and its tensors have the storage that was verified.
        path: Name of the part whose tensors these are; "" for all.
        tensors: Those of the part.
    """
    sample = protection.samples.get(path)
    if sample is None:
        sample = protection.samples[path] = _take(tensors)
    return all(torch.equal(torch.cat(views).view(torch.uint8), expected) for views, expected in sample)


@torch.no_grad()
def _take(tensors: Iterable[Kept]) -> Sample:
    views: dict[torch.dtype, list[torch.Tensor]] = {}
    expected: dict[torch.dtype, list[bytes]] = {}
    for kept in {id(kept.tensor): kept for kept in tensors}.values():
        plain, dtype = kept.verified, kept.verified.dtype
        joins = not dtype.is_floating_point or dtype.itemsize > _LEAST_BYTES
        if not kept.renewed and plain.device.type == "cpu" and plain.numel() and plain.is_contiguous() and joins:
            views.setdefault(dtype, []).append(few_values(plain))
            expected.setdefault(dtype, []).append(kept.glimpse)
    return [
        (few, torch.frombuffer(bytearray(b"".join(expected[dtype])), dtype=torch.uint8)) for dtype, few in views.items()
    ]
