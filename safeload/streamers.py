"""Loads by other libraries, each rank for itself, on the cpu; `safeload bench` compares with them.

Each library is imported where it is used, and need not be there. All of them are asked for tensors in memory of their
own, since that is what they are made for, and given a module whose parameters are on meta.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from safeload.skeletons import Peer, fill_module, meta_module, weight_files

__all__ = ["STREAMERS"]


def _tensorizer_file(folder: str, work: str) -> str:
    """Return where the tower lies in tensorizer's own format; another one when the tower's files have changed."""
    marks = [os.stat(path) for path in weight_files(folder)]
    changed_ns = max((mark.st_mtime_ns for mark in marks), default=0)
    return str(Path(work, f"{Path(folder).name}-{sum(mark.st_size for mark in marks)}-{changed_ns}.tensors"))


def _write_tensorizer_file(model_class: Any, folder: str, work: str) -> None:
    from tensorizer import TensorSerializer

    path = Path(_tensorizer_file(folder, work))
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    serializer = TensorSerializer(str(unfinished))
    serializer.write_module(model_class.from_pretrained(folder))
    serializer.close()
    unfinished.replace(path)


def _tensorizer(model_class: Any, folder: str, work: str, *, verify_hash: bool) -> nn.Module:
    from tensorizer import TensorDeserializer

    module = meta_module(model_class, folder)
    with TensorDeserializer(_tensorizer_file(folder, work), device="cpu", verify_hash=verify_hash) as deserializer:
        deserializer.load_into_module(module)
    return module


def _tensorizer_plain(model_class: Any, folder: str, work: str) -> nn.Module:
    return _tensorizer(model_class, folder, work, verify_hash=False)


def _tensorizer_verified(model_class: Any, folder: str, work: str) -> nn.Module:
    return _tensorizer(model_class, folder, work, verify_hash=True)


def _fastsafetensors(model_class: Any, folder: str, work: str) -> nn.Module:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(weight_files(folder), device="cpu", nogds=True) as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    return fill_module(meta_module(model_class, folder), state)


def _runai(model_class: Any, folder: str, work: str) -> nn.Module:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(weight_files(folder))
        state = dict(streamer.get_tensors())  # its own: it gives them away unless asked for views
    return fill_module(meta_module(model_class, folder), state)


_TENSORIZER: Final = ("tensorizer", "tensorizer")
STREAMERS: Final[Mapping[str, Peer]] = {
    "tensorizer": Peer(
        load=_tensorizer_plain, needs=_TENSORIZER, prepare=_write_tensorizer_file, file=_tensorizer_file
    ),
    "tensorizer-verified": Peer(
        load=_tensorizer_verified, needs=_TENSORIZER, prepare=_write_tensorizer_file, file=_tensorizer_file
    ),
    "fastsafetensors": Peer(load=_fastsafetensors, needs=("fastsafetensors", "fastsafetensors")),
    "runai": Peer(load=_runai, needs=("runai_model_streamer", "runai-model-streamer")),
}
