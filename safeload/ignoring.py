"""Receive a model, give its towers in the forms that FSDP and Accelerate take as arguments.

Nobody needs these: a protected tower is passed by without a line in the user's code. They are the public road, for
those who want to see it written down, and the one that remains should torch's private mark move.
"""

from __future__ import annotations

import re
from typing import Final

from torch import nn

from safeload.checking import plain_name
from safeload.errors import ProtectionError
from safeload.protecting import frozen_towers

__all__ = ["ignored_modules", "ignored_modules_pattern", "ignored_parameters"]

_WRAPPER: Final = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)"  # compile, FSDP1, checkpointing
_PREFIX: Final = rf"(?:(?:base_model\.model|module|{_WRAPPER})\.)*"  # PEFT, DDP and the same
_PEFT: Final = "base_model.model."


def _towers(model: nn.Module) -> dict[str, nn.Module]:
    towers = frozen_towers(model)
    if not towers:
        raise ProtectionError(
            f"there is no protected tower in this {type(model).__name__}, so there is nothing to ignore. Load the "
            "tower with safe_from_pretrained and ask after it is part of the model."
        )
    return towers


def ignored_modules(model: nn.Module) -> list[nn.Module]:
    """Return the towers, for `ignored_modules` of FSDP1 and of Accelerate's plugin.

    Args:
        model: A model with protected towers, wrapped or not.

    Returns:
        The towers in the order of `named_modules`; what is inside them goes with them.

    Raises:
        ProtectionError: The model has no protected tower.
    """
    return list(_towers(model).values())


def ignored_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the towers' parameters, for `ignored_params` of FSDP2's `fully_shard`.

    Pass the same set in every call of `fully_shard`, the nested ones too.

    Args:
        model: A model with protected towers, wrapped or not.

    Returns:
        The Parameter objects, each once.

    Raises:
        ProtectionError: The model has no protected tower.
    """
    return {parameter for tower in _towers(model).values() for parameter in tower.parameters()}


def ignored_modules_pattern(model: nn.Module) -> str:
    """Return a regular expression that matches the full names of the towers, for `fsdp_ignored_modules` in YAML.

    It matches the same towers after PEFT, DDP, FSDP1, checkpointing or `torch.compile` have put their prefixes in, and
    where it was made with those in place, without them.

    Args:
        model: A model with protected towers, wrapped or not.

    Returns:
        A pattern for `re.fullmatch`.

    Raises:
        ProtectionError: The model has no protected tower, or is itself one: then there is nothing to shard.
    """
    names = sorted({_unwrapped(name) for name in _towers(model)})
    if "" in names:
        raise ProtectionError(f"this {type(model).__name__} is itself a tower: do not give it to FSDP at all.")
    return rf"{_PREFIX}(?:{'|'.join(_tolerant(name) for name in names)})(?:\.{_WRAPPER})*"


def _unwrapped(name: str) -> str:
    plain = plain_name(name)
    while plain.startswith((_PEFT, "module.")):
        plain = plain.removeprefix(_PEFT).removeprefix("module.")
    return plain


def _tolerant(name: str) -> str:
    return rf"\.(?:{_WRAPPER}\.)*".join(re.escape(part) for part in name.split("."))
