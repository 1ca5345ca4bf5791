"""The usual ways to bring a tower to every rank, as one writes them by hand; `safeload bench` compares with them.

Each takes the tower's class, its folder and a folder for files of its own, and returns the tower, on the cpu. Libraries
are imported where they are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from safeload.errors import SafeLoadError
from safeload.skeletons import Peer, empty_module, fill_module, meta_module, weight_files
from safeload.streamers import STREAMERS

__all__ = ["PEERS", "hash_files"]

_BUCKET_BYTES: Final = 250 * 1024**2  # what FSDP and DDP use
_CHUNK_BYTES: Final = 1024**2  # what fits into a core's own cache


def hash_files(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the sha256 of each file, as `hashlib` gives it, one pass after the other.

    Args:
        paths: The files.
    """
    found = []
    buffer = bytearray(_CHUNK_BYTES)
    for path in paths:
        hasher = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
        found.append(hasher.hexdigest())
    return tuple(found)


def _quiet(model_class: Any, folder: str, **kwargs: Any) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: nn.Module = model_class.from_pretrained(folder, **kwargs)
    return loaded


def _every_rank(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder)


def _every_rank_bf16(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder, torch_dtype=torch.bfloat16)


def _hash_everywhere(model_class: Any, folder: str) -> nn.Module:
    """Check the files before they are opened for the load: of what is opened then, it says nothing."""
    hash_files(weight_files(folder))
    return _quiet(model_class, folder)


def _hash_on_first(model_class: Any, folder: str) -> nn.Module:
    if dist.get_rank() == 0:
        hash_files(weight_files(folder))
    dist.barrier()
    return _quiet(model_class, folder)


def _first_or_empty(model_class: Any, folder: str) -> nn.Module:
    return _quiet(model_class, folder) if dist.get_rank() == 0 else empty_module(model_class, folder)


@torch.no_grad()
def _broadcast(model_class: Any, folder: str) -> nn.Module:
    module = _first_or_empty(model_class, folder)
    for value in (*module.parameters(), *module.buffers()):
        dist.broadcast(value, 0)
    return module


@torch.no_grad()
def _broadcast_async(model_class: Any, folder: str) -> nn.Module:
    module = _first_or_empty(model_class, folder)
    works = [dist.broadcast(value, 0, async_op=True) for value in (*module.parameters(), *module.buffers())]
    for work in works:
        if work is not None:
            work.wait()
    return module


@torch.no_grad()
def _sync_module_states(model_class: Any, folder: str) -> nn.Module:
    from torch.distributed.utils import _sync_params_and_buffers

    module = _first_or_empty(model_class, folder)
    values = [value.detach() for value in (*module.parameters(), *module.buffers())]
    world = dist.group.WORLD
    if world is None:
        raise SafeLoadError("this way needs a process group")
    _sync_params_and_buffers(world, values, _BUCKET_BYTES, 0)
    return module


def _dcp(model_class: Any, folder: str) -> nn.Module:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    module = meta_module(model_class, folder)
    state: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for path in weight_files(folder):
            state |= load_file(path)
        state = {name: state[name] for name in module.state_dict() if name in state} or state
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return fill_module(module, {})


def _by_hand(load: Callable[[Any, str], nn.Module]) -> Peer:
    return Peer(load=lambda model_class, folder, work: load(model_class, folder))


PEERS: Final[Mapping[str, Peer]] = {
    "from_pretrained": _by_hand(_every_rank),
    "from_pretrained-bf16": _by_hand(_every_rank_bf16),
    "hash-everywhere": _by_hand(_hash_everywhere),
    "hash-on-first": _by_hand(_hash_on_first),
    "broadcast": _by_hand(_broadcast),
    "broadcast-async": _by_hand(_broadcast_async),
    "sync_module_states": _by_hand(_sync_module_states),
    "dcp": _by_hand(_dcp),
    **STREAMERS,
}
