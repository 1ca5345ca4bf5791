"""Notice ranks that put their towers on one and the same accelerator because nobody told them which is theirs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from safeload.sharing import Answer

__all__ = ["device_unit", "warn_of_shared_device"]


def device_unit(device: torch.device) -> str:
    """Return a text that names the hardware itself: `cuda:0` is another one in each process that sees only one.

    Args:
        device: With its index.

    Returns:
        Its UUID; an empty text where there is none to be had, as for the cpu.

    Ranks: local.
    """
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def warn_of_shared_device(answers: Sequence[Answer], rank: int) -> None:
    """Warn where this rank and others have taken the same accelerator by default.

    Args:
        answers: One a rank, with the `unit` of its device where it did not choose one with `device=`.
        rank: This rank, in the group.

    Ranks: local.
    """
    own = answers[rank]
    crowd = [number for number, each in enumerate(answers) if own.unit and each.unit == own.unit]
    if len(crowd) > 1:
        warnings.warn(
            f"ranks {', '.join(map(str, crowd))} of the group put the tower on one and the same {own.device} "
            f"({own.unit}), every process's default. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
            "the load, or pass device=.",
            UserWarning,
            stacklevel=2,
        )
