"""Receive the moment at which an outer `from_pretrained` ends, report what its checkpoint had for a tower.

transformers never asks a tower about such keys: it lists them as unexpected, as the outer state dict has nothing of the
tower. Both 4.x and 5.x call `model.eval()` last, in `from_pretrained` itself, and so reach the tower's `train`; from
there its local names are read, and nothing else. They are private: a test fails loudly when they move, and what is left
then is transformers' own list of unexpected keys. The verified values are kept in any case.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from safeload.answering import brings_the_same, report_conflicts
from safeload.keeping import Kept, Protection

__all__ = ["notice_outer_checkpoint"]

_DEPTH: Final = 40  # frames between `from_pretrained` and a tower: a few for every level of nesting


def notice_outer_checkpoint(tower: nn.Module, protection: Protection) -> None:
    """Compare what the checkpoint of an outer `from_pretrained` has for a tower, if one is about to end.

    Args:
        tower: The tower whose `train` was called.
        protection: Its record. Keys that bring other values are reported, and added to its `conflicts`.
    """
    frame = _outer_call()
    if frame is None:
        return
    found = frame.f_locals
    model = found["model"]
    name = next((name for name, part in model.named_modules() if part is tower), None)
    unexpected = _unexpected(found)
    if not name or not unexpected:
        return
    keys = _keys_of(name, str(getattr(model, "base_model_prefix", "")), protection, unexpected)
    conflicts = sorted(key for key, value in _values(found, keys) if not brings_the_same(keys[key], value))
    conflicts = [key for key in conflicts if key not in protection.conflicts]
    if conflicts:
        report_conflicts(protection, conflicts, refuse=False)


def _outer_call() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code.co_name == "from_pretrained" and isinstance(frame.f_locals.get("model"), nn.Module):
            return frame
        frame = frame.f_back
    return None


def _unexpected(found: Mapping[str, Any]) -> set[str]:
    loading_info = found.get("loading_info")
    keys = getattr(loading_info, "unexpected_keys", None) or found.get("unexpected_keys") or ()
    return {str(key) for key in keys}


def _keys_of(name: str, base: str, protection: Protection, unexpected: set[str]) -> dict[str, Kept]:
    """Match keys of the checkpoint with the tower's tensors; a base model's checkpoint has one prefix more or less."""
    matched = {}
    for kept in protection.kept:
        full = f"{name}.{kept.name}"
        for key in (full, f"{base}.{full}", full.removeprefix(f"{base}.")):
            if key in unexpected:
                matched[key] = kept
    return matched


def _values(found: Mapping[str, Any], keys: Mapping[str, Kept]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the checkpoint's value of each key; None where it can't be read without running a pickle."""
    left = set(keys)
    given = found.get("state_dict")
    if isinstance(given, Mapping):
        for key in sorted(left & set(given)):
            left.discard(key)
            yield key, given[key]
    for path in _files(found):
        for key, value in _read(path, left):
            left.discard(key)
            yield key, value
    yield from ((key, None) for key in sorted(left))


def _files(found: Mapping[str, Any]) -> list[str]:
    files = found.get("checkpoint_files") or found.get("resolved_archive_file") or []
    return [str(files)] if isinstance(files, (str, bytes)) else [str(path) for path in files]


def _read(path: str, wanted: set[str]) -> list[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    with contextlib.suppress(SafetensorError, OSError), torch.device("cpu"), safe_open(path, framework="pt") as opened:
        return [(key, opened.get_tensor(key)) for key in opened.keys() if key in wanted]  # noqa: SIM118 - not a dict
    return []
