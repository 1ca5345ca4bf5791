"""Small checkpoint files as bytes, made by hand so that every part of them can be wrong on purpose."""

import json
import random
import struct

CONFIG = b'{"model_type": "clip_vision_model"}'


def tensor(name, *, dtype="F32", shape=(2, 3), begin=0, size=24):
    return {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}}


def safetensors(header, data=None, *, seed=0):
    """Pack a header (a dict, or raw bytes) and data; the data is random and as long as the header says."""
    if data is None:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        size = max((entry["data_offsets"][1] for entry in entries), default=0)
        data = random.Random(seed).randbytes(size)
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def weights(*names, seed=0):
    """A valid safetensors file with these tensors."""
    header = {"__metadata__": {"format": "pt"}}
    for place, name in enumerate(names):
        header |= tensor(name, begin=24 * place)
    return safetensors(header, seed=seed)


def index(weight_map, **more):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}).encode()


def single(seed=0):
    return {"config.json": CONFIG, "model.safetensors": weights("a", "b", seed=seed)}


def sharded(seed=0):
    return {
        "config.json": CONFIG,
        "model.safetensors.index.json": index({"a": "one.safetensors", "b": "two.safetensors"}),
        "one.safetensors": weights("a", seed=seed + 1),
        "two.safetensors": weights("b", seed=seed + 2),
    }


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
