"""The usual ways to bring a tower to every rank, as one writes them by hand; `safeload bench` compares with them.

Each takes the tower's class and folder and returns the tower, on the cpu. Libraries are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from safeload.errors import SafeLoadError

__all__ = ["PEERS", "load_class"]

_BUCKET_BYTES: Final = 250 * 1024**2  # what FSDP and DDP use


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


def _quiet(model_class: Any, folder: str, **kwargs: Any) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: nn.Module = model_class.from_pretrained(folder, **kwargs)
    return loaded


def _every_rank(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder)


def _every_rank_bf16(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder, torch_dtype=torch.bfloat16)


def _skeleton(model_class: Any, folder: str) -> nn.Module:
    """Construct without weights: parameters empty on the cpu, buffers as the constructor makes them."""
    config = model_class.config_class.from_pretrained(folder)
    with torch.device("meta"):
        module: nn.Module = model_class(config)
    made = {name: torch.empty_like(value, device="cpu") for name, value in module.state_dict().items()}
    module.load_state_dict(made, assign=True)
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is not None and value.is_meta:
                owner._buffers[name] = torch.zeros_like(value, device="cpu")
    return module


def _first_or_skeleton(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder) if dist.get_rank() == 0 else _skeleton(model_class, folder)


@torch.no_grad()
def _broadcast(model_class: Any, folder: str) -> nn.Module:
    module = _first_or_skeleton(model_class, folder)
    for value in (*module.parameters(), *module.buffers()):
        dist.broadcast(value, 0)
    return module


@torch.no_grad()
def _broadcast_async(model_class: Any, folder: str) -> nn.Module:
    module = _first_or_skeleton(model_class, folder)
    works = [dist.broadcast(value, 0, async_op=True) for value in (*module.parameters(), *module.buffers())]
    for work in works:
        if work is not None:
            work.wait()
    return module


@torch.no_grad()
def _sync_module_states(model_class: Any, folder: str) -> nn.Module:
    from torch.distributed.utils import _sync_params_and_buffers

    module = _first_or_skeleton(model_class, folder)
    values = [value.detach() for value in (*module.parameters(), *module.buffers())]
    world = dist.group.WORLD
    if world is None:
        raise SafeLoadError("this way needs a process group")
    _sync_params_and_buffers(world, values, _BUCKET_BYTES, 0)
    return module


def _dcp(model_class: Any, folder: str) -> nn.Module:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    config = model_class.config_class.from_pretrained(folder)
    with torch.device("meta"):
        module: nn.Module = model_class(config)
    state: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for path in sorted(Path(folder).glob("*.safetensors")):
            state |= load_file(path)
        state = {name: state[name] for name in module.state_dict() if name in state} or state
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is not None and value.is_meta:
                owner._buffers[name] = torch.zeros_like(value, device="cpu")
    return module


PEERS: Final[Mapping[str, Callable[[Any, str], nn.Module]]] = {
    "from_pretrained": _every_rank,
    "from_pretrained-bf16": _every_rank_bf16,
    "broadcast": _broadcast,
    "broadcast-async": _broadcast_async,
    "sync_module_states": _sync_module_states,
    "dcp": _dcp,
}
