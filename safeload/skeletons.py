"""Modules without weights, for ways to load that bring the tensors themselves; and what all such ways share."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safeload.errors import SafeLoadError

__all__ = ["Peer", "empty_module", "fill_module", "load_class", "meta_module", "weight_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way of others to bring a tower to every rank.

    Attributes:
        load: Called on every rank with the tower's class, its folder and a folder for files of its own.
        needs: What it imports beside safeload's own requirements, and the package's name for pip.
        prepare: Called once on the first rank, before anything is timed.
        file: The file of its own that it reads instead of the tower's, where it has one.
    """

    load: Callable[[Any, str, str], nn.Module]
    needs: tuple[str, str] | None = None
    prepare: Callable[[Any, str, str], None] | None = None
    file: Callable[[str, str], str] | None = None

    @property
    def missing(self) -> str | None:
        """The package that it needs and that is not installed."""
        if self.needs is None or importlib.util.find_spec(self.needs[0]) is not None:
            return None
        return self.needs[1]


def load_class(folder: str) -> Any:
    """Return the transformers class that a folder's configuration names.

    Args:
        folder: The tower's folder.

    Raises:
        SafeLoadError: It names none that this transformers has.
    """
    import transformers

    names = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    found = getattr(transformers, names[0], None) if names[0] else None
    if found is None:
        raise SafeLoadError(f"{folder}: its config.json names no class of transformers: architectures is {names}")
    return found


def weight_files(folder: str) -> list[str]:
    """Return the paths of a folder's safetensors files, sorted."""
    return sorted(str(path) for path in Path(folder).glob("*.safetensors"))


def meta_module(model_class: Any, folder: str) -> nn.Module:
    """Construct with parameters on meta, and buffers as the constructor fills them: no file holds all of those.

    The quickest way there is, so that nobody is held up by it: buffers are constructed at the first call alone.
    """
    config = model_class.config_class.from_pretrained(folder)
    with torch.device("meta"):
        module: nn.Module = model_class(config)
    for path, value in _constructed_buffers(model_class, folder).items():
        owner, _, name = path.rpartition(".")
        module.get_submodule(owner)._buffers[name] = value.clone()
    return module


@functools.cache
def _constructed_buffers(model_class: Any, folder: str) -> Mapping[str, torch.Tensor]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module: nn.Module = model_class(model_class.config_class.from_pretrained(folder))
    return dict(module.named_buffers())


def empty_module(model_class: Any, folder: str) -> nn.Module:
    """Construct with parameters whose memory is there and was never written, ready to be received into."""
    module = meta_module(model_class, folder)
    state = {name: torch.empty_like(value, device="cpu") for name, value in module.named_parameters()}
    module.load_state_dict(state, strict=False, assign=True)
    return module


def fill_module(module: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Give a module tensors by name, without a copy.

    Args:
        module: From `meta_module`.
        state: By the names that the module knows them by.

    Returns:
        The module.

    Raises:
        SafeLoadError: A parameter was not among them: the checkpoint's keys are not the module's own.
    """
    module.load_state_dict(dict(state), strict=False, assign=True)
    tie = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    missing = [name for name, value in module.named_parameters() if value.is_meta]
    if missing:
        raise SafeLoadError(
            f"{type(module).__name__}: the files have no tensor by the name of {', '.join(missing[:3])}"
            f"{' ...' if missing[3:] else ''}; this way to load renames no keys: compare without it"
        )
    return module
