"""Small checkpoint files as bytes, made by hand so that every part of them can be wrong on purpose."""

import hashlib
import json
import math
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


CLIP_CONFIG = {
    "architectures": ["CLIPVisionModel"],
    "model_type": "clip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "torch_dtype": "float32",
}


def clip_shapes():
    """Names and shapes of the tensors of a small CLIPVisionModel, as transformers 4 and 5 both read them."""
    wide, inner = CLIP_CONFIG["hidden_size"], CLIP_CONFIG["intermediate_size"]
    shapes = {
        "embeddings.class_embedding": [wide],
        "embeddings.patch_embedding.weight": [wide, 3, 8, 8],
        "embeddings.position_embedding.weight": [5, wide],
    }
    norms = ["pre_layrnorm", "post_layernorm"]
    for layer in range(CLIP_CONFIG["num_hidden_layers"]):
        block = f"encoder.layers.{layer}"
        norms += [f"{block}.layer_norm1", f"{block}.layer_norm2"]
        linear = {f"self_attn.{part}_proj": (wide, wide) for part in "qkv"} | {"self_attn.out_proj": (wide, wide)}
        for name, (out, into) in {**linear, "mlp.fc1": (inner, wide), "mlp.fc2": (wide, inner)}.items():
            shapes |= {f"{block}.{name}.weight": [out, into], f"{block}.{name}.bias": [out]}
    for norm in norms:
        shapes |= {f"{norm}.weight": [wide], f"{norm}.bias": [wide]}
    return {f"vision_model.{name}": shape for name, shape in sorted(shapes.items())}


def clip_tensors(seed=0):
    """Random values for all of them, as {name: (shape, bytes)}."""
    draw = random.Random(seed)
    tensors = {}
    for name, shape in clip_shapes().items():
        values = [draw.gauss(0, 1) for _ in range(math.prod(shape))]
        tensors[name] = (shape, struct.pack(f"<{len(values)}f", *values))
    return tensors


def pack(tensors, *, dtype="F32"):
    """Pack {name: (shape, bytes)} into a safetensors file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, raw) in tensors.items():
        header |= tensor(name, dtype=dtype, shape=shape, begin=len(data), size=len(raw))
        data += raw
    return safetensors(header, data)


def clip_single(seed=0):
    return {"config.json": json.dumps(CLIP_CONFIG).encode(), "model.safetensors": pack(clip_tensors(seed))}


def clip_sharded(seed=0):
    tensors = clip_tensors(seed)
    names = list(tensors)
    parts = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    files = {shard: pack({name: tensors[name] for name in part}) for shard, part in parts.items()}
    weight_map = {name: shard for shard, part in parts.items() for name in part}
    return {
        "config.json": json.dumps(CLIP_CONFIG).encode(),
        "model.safetensors.index.json": index(weight_map),
        **files,
    }


def lock(files):
    """The text of SHA256SUMS for {name: bytes}."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())


def flip(data, place=-1):
    """Change one bit."""
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)
