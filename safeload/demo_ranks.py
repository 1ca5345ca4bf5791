"""What the demo does inside its processes: prepare in one, load and train in several."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from safeload.demo_model import (
    Model,
    model_config,
    text_inputs,
    tower_class_of,
    tower_inputs,
    write_small_tower,
)
from safeload.demo_records import WAYS, LoadRow, Setting, TrainRow
from safeload.loading import load_report
from safeload.metering import pss_bytes
from safeload.observing import observe_opens
from safeload.resolving import resolve

__all__ = ["load_plainly", "load_safely", "prepare"]

_STEPS: Final = 4
_BATCH: Final = 1
_LEARNING_RATE: Final = 1e-2
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
_ERROR_TEXT: Final = 200


def prepare(tower: str | None, work: str) -> Setting:
    """Make what all ranks work with; runs in a process of its own, so that it sees what one process alone loads.

    Args:
        tower: Folder or repository; None makes a small tower.
        work: Folder to write to.
    """
    folder = str(resolve(tower).folder) if tower else str(write_small_tower(Path(work, "tower")))
    tower_class, width = tower_class_of(folder)
    outer = Path(work, "outer")
    Model(model_config(width=width)).save_pretrained(outer)
    alone: Any = getattr(transformers, tower_class).from_pretrained(folder)
    tensors = _tensors(alone)
    return Setting(
        tower=folder,
        origin=tower or folder,
        tower_class=type(alone).__name__,
        width=width,
        outer=str(outer),
        weight_files=tuple(str(path) for path in sorted(Path(folder).iterdir()) if path.suffix in _WEIGHT_SUFFIXES),
        tower_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        reference={name: _digest(tensor) for name, tensor in tensors.items()},
        buffers=tuple(name for name, _ in alone.named_buffers()),
        versions=_versions(),
    )


def load_plainly(setting: Setting, way: str) -> LoadRow:
    """Make the model with plain `from_pretrained`; what it raises is part of what the demo shows.

    Args:
        setting: From `prepare`.
        way: One of `WAYS`.

    Ranks: every rank.
    """
    with observe_opens(map(Path, setting.weight_files)) as opened:
        try:
            return _make(setting, way, safe=False)[0]
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:_ERROR_TEXT]
    return LoadRow(rank=dist.get_rank(), way=way, tensors=len(setting.reference), opened=opened.names, error=text)


def load_safely(setting: Setting, way: str) -> tuple[LoadRow, TrainRow, dict[str, Any]]:
    """Make the model with safeload and train it.

    Args:
        setting: From `prepare`.
        way: One of `WAYS`.

    Returns:
        What was loaded, what training left of it, and the load report as plain values.

    Ranks: every rank.
    """
    gc.collect()  # a forked process copies a page when it first counts references there: not in the load's figures
    row, model = _make(setting, way, safe=True)
    report = load_report(model.vision_tower)
    own = report.ranks[dist.get_rank()]
    row = replace(
        row,
        before_bytes=own.memory_before_bytes,
        peak_bytes=own.memory_peak_bytes,
        after_bytes=own.memory_after_bytes,
    )
    return row, _train(model, way), report.to_dict()


# --- one way to make the model ---


def _model(setting: Setting, way: str, *, safe: bool) -> Model:
    config = model_config(
        setting.origin if safe else setting.tower, tower_class=setting.tower_class, width=setting.width, safe=safe
    )
    torch.manual_seed(0)
    if way == WAYS[0]:
        return Model(config)
    model: Model = Model.from_pretrained(setting.outer, config=config)
    return model


def _make(setting: Setting, way: str, *, safe: bool) -> tuple[LoadRow, Model]:
    with observe_opens(map(Path, setting.weight_files)) as opened:
        model = _model(setting, way, safe=safe)
    tensors = _tensors(model.vision_tower)
    wrong = [name for name, digest in setting.reference.items() if _digest(tensors.get(name)) != digest]
    row = LoadRow(
        rank=dist.get_rank(),
        way=way,
        tensors=len(setting.reference),
        wrong_parameters=tuple(name for name in wrong if name not in setting.buffers),
        wrong_buffers=tuple(name for name in wrong if name in setting.buffers),
        example=f"{wrong[0]} = {_first_values(tensors.get(wrong[0]))}" if wrong else None,
        opened=opened.names,
    )
    return row, model


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest(tensor: torch.Tensor | None) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes, of this rank's shard of it; a word where it has none."""
    if tensor is None or tensor.is_meta:
        return "missing" if tensor is None else "meta"
    raw = _local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw.tobytes()).hexdigest()


def _first_values(tensor: torch.Tensor | None) -> str:
    if tensor is None or tensor.is_meta:
        return "nothing" if tensor is None else "nothing (on the meta device)"
    return ", ".join(f"{value:.3g}" for value in tensor.detach().flatten()[:3].tolist())


# --- training ---


def _train(model: Model, way: str) -> TrainRow:
    """Shard the trainable part with FSDP2, train a few steps, and compare the tower with what it was."""
    tower = model.vision_tower
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        dist.broadcast(parameter.data, src=0)  # as training scripts do: this environment may leave them different
    before = _Snapshot.of(tower)
    features = _features(tower)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    start = {name: _digest(parameter) for name, parameter in named.items()}
    losses = _steps(model)
    after = _Snapshot.of(tower)
    return TrainRow(
        rank=dist.get_rank(),
        way=way,
        losses=losses,
        features=features,
        same_memory=after.addresses == before.addresses,
        same_objects=all(a is b for a, b in zip(after.objects, before.objects, strict=True)),
        same_values=after.digests == before.digests,
        sharded=sum(isinstance(parameter, DTensor) for parameter in named.values()),
        trainable=len(trainable),
        changed=sum(_digest(parameter) != start[name] for name, parameter in named.items()),
        memory_bytes=pss_bytes(),
    )


class _Snapshot(NamedTuple):
    objects: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    digests: tuple[str, ...]

    @classmethod
    def of(cls, tower: nn.Module) -> _Snapshot:
        tensors = tuple(_tensors(tower).values())
        return cls(tensors, tuple(t.data_ptr() for t in tensors), tuple(map(_digest, tensors)))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _features(tower: nn.Module) -> str:
    inputs = tower_inputs(tower, batch=_BATCH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return _digest(tower(**inputs).last_hidden_state)


def _steps(model: Model) -> tuple[float, ...]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = tower_inputs(model.vision_tower, batch=_BATCH, generator=generator)
    text = text_inputs(batch=_BATCH, generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE)
    losses = []
    model.train()
    for _ in range(_STEPS):
        loss = model(inputs, text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return tuple(losses)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "safetensors")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}
