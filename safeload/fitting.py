"""Check what a class's own loader says of a checkpoint: what it would warn of is an error here.

Plain `from_pretrained` leaves a random tensor where the checkpoint has none, and drops what it does not know. For a
frozen tower both mean that the wrong class or the wrong file was named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import CheckpointError
from safeload.headers import TensorEntry

__all__ = ["architectures", "check_fit", "check_kinds"]

_LISTED: Final = 20  # names in one message; the error's data fields hold all of them


def architectures(folder: Path) -> tuple[str, ...]:
    """Return the classes that wrote the checkpoint, by its own configuration."""
    path = folder / "config.json"
    stated = json.loads(path.read_bytes()).get("architectures") if path.exists() else None
    return tuple(map(str, stated)) if isinstance(stated, list) else ()


def check_fit(
    module: nn.Module, info: Mapping[str, Any], ignore_unexpected: Sequence[str], origin: str, wrote: Sequence[str] = ()
) -> None:
    """Raise where the class's own loader left a tensor unfilled, or the checkpoint holds what nobody took.

    Args:
        module: What the loader returned.
        info: What it says of it: `missing_keys`, `unexpected_keys`, `mismatched_keys`, `error_msgs`.
        ignore_unexpected: Regular expressions of keys that may be left over.
        origin: The checkpoint, for the message.
        wrote: The classes that wrote the checkpoint, by its own configuration.

    Raises:
        CheckpointError: All missing, unexpected and mismatched keys.

    Ranks: source only.
    """
    missing = sorted(info["missing_keys"])
    mismatched = {
        str(key): f"{list(there)} in the checkpoint, {list(here)} in the module"
        for key, there, here in (info.get("mismatched_keys") or ())
    }
    unexpected = [
        key for key in sorted(info["unexpected_keys"]) if not _may_be_left(key, module, ignore_unexpected, wrote)
    ]
    errors = [str(error) for error in info.get("error_msgs") or ()]
    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {_text(missing)}")
    if mismatched:
        parts.append("other shapes: " + _text([f"{key} ({what})" for key, what in sorted(mismatched.items())]))
    if unexpected:
        parts.append(f"in the checkpoint, unknown to the module: {_text(unexpected)}")
    if parts or errors:
        raise CheckpointError(
            f"{origin} does not fit {type(module).__name__}: {'; '.join(parts + errors)}. Nothing was loaded: a tensor "
            "that the checkpoint does not fill would be random. Take the class that wrote the checkpoint, or switch "
            "off the part that is not there (add_pooling_layer=False, say); allow left-over keys with "
            "ignore_unexpected=[regex]",
            path=origin,
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )


def check_kinds(module: nn.Module, tensors: Sequence[TensorEntry], origin: str) -> None:
    """Refuse floating parameters that the checkpoint stores as integers, and the other way round.

    A loader casts in silence; what comes out is not what was trained. Names are matched by their common end, as classes
    add and drop prefixes; a tensor that is renamed otherwise is passed over.

    Args:
        module: What the loader returned.
        tensors: What the checkpoint holds, by its headers.
        origin: The checkpoint, for the message.

    Raises:
        CheckpointError: All such tensors.

    Ranks: source only.
    """
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    stored = {entry.name: entry for entry in tensors if entry.name in own}
    others = [entry for entry in tensors if entry.name not in own]
    longer = {suffix: name for name in own for suffix in _suffixes(name) if "." in suffix} if others else {}
    renamed = {longer[entry.name]: entry for entry in others if entry.name in longer}
    renamed |= {suffix: entry for entry in others for suffix in _suffixes(entry.name) if suffix in own}
    stored = renamed | stored
    wrong = {
        name: f"{entry.dtype} in the checkpoint, {str(own[name].dtype).removeprefix('torch.')} in the module"
        for name, entry in sorted(stored.items())
        if _is_floating(entry.dtype) != (own[name].is_floating_point() or own[name].is_complex())
    }
    if wrong:
        raise CheckpointError(
            f"{origin} does not fit {type(module).__name__}: other kinds of numbers: "
            f"{_text([f'{name} ({what})' for name, what in wrong.items()])}. The file is corrupt, or of "
            "something else",
            path=origin,
            mismatched=wrong,
        )


def _suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("F", "BF", "C"))


def _may_be_left(key: str, module: nn.Module, ignore_unexpected: Sequence[str], wrote: Sequence[str]) -> bool:
    """Whether a key of the checkpoint may go unused.

    A pattern of the caller allows it; or it belongs to a part that was switched off (`add_pooling_layer=False` leaves
    `module.pooler` None); or the checkpoint is by its own configuration that of a larger model, and the key belongs to
    another part of that: the text half of a CLIPModel beside a CLIPVisionModel. A key that goes by the name of one of
    the module's own children is never left: it is a layer too many or a misspelt tensor.
    """
    if any(re.search(pattern, key) for pattern in ignore_unexpected):
        return True
    first = key.removeprefix(f"{getattr(module, 'base_model_prefix', '')}.").partition(".")[0]
    if first in {name for name, _ in module.named_children()} | set(module._parameters) | set(module._buffers):
        return getattr(module, first) is None
    switched_off = getattr(module, first, module) is None
    return switched_off or (bool(wrote) and type(module).__name__ not in wrote)


def _text(items: Sequence[str]) -> str:
    more = f" (+{len(items) - _LISTED} more)" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more
