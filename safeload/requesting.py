"""What the caller asked for: checked before anything is read, and stated so that ranks can compare their calls."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.errors import SafeLoadError, SourceError
from safeload.families import family

__all__ = ["KEYWORDS", "Request", "floating_dtype", "patterns"]

_CHOICES: Final = {
    "transport": ("auto", "shared", "broadcast"),
    "memory": ("sealed", "mapped"),
    "verify": ("auto", "strict", "off"),
    "verdict": ("load", "first_use"),
}

KEYWORDS: Final = (  # of `safe_from_pretrained`, to find what a misspelt one was meant to be
    *("config", "revision", "subfolder", "variant", "cache_dir", "token", "local_files_only", "dtype", "device"),
    *("group", "source_rank", "transport", "memory", "timeout", "verify", "verdict", "chunk_digests", "manifest"),
    *("manifest_sha256", "strict_folder", "allow_pickle", "progress", "ignore_unexpected", "cast_inputs"),
    *("trust_remote_code", "key_mapping", "attn_implementation"),
)
_HALF_BYTES: Final = 2  # float8 and less is a storage form that needs scales: no cast makes a tower of it

# Arguments of from_pretrained that would split, quantise or replace what is loaded; and what to say instead.
_REFUSED: Final = {
    "device_map": "pass device=: the tower is placed whole",
    "tp_plan": "a frozen tower is not sharded",
    "tp_size": "a frozen tower is not sharded",
    "distributed_config": "a frozen tower is not sharded",
    "device_mesh": "a frozen tower is not sharded",
    "quantization_config": "quantised towers are not supported",
    "load_in_8bit": "quantised towers are not supported",
    "load_in_4bit": "quantised towers are not supported",
    "gguf_file": "only safetensors checkpoints are loaded",
    "from_tf": "only safetensors checkpoints are loaded",
    "from_flax": "only safetensors checkpoints are loaded",
    "state_dict": "weights come from the checkpoint alone",
    "ignore_mismatched_sizes": "a mismatched tensor would stay random",
    "torch_dtype": "pass it or dtype=, not both",
    "force_download": "what is in the cache is verified; remove it there to fetch it again",
    "output_loading_info": "missing and unexpected keys are errors; see load_report(tower)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for; the arguments of `safe_from_pretrained`."""

    model_class: Callable[..., Any]
    path: Any
    config: Any
    dtype: torch.dtype | str | None
    device: torch.device | str | int | None
    where: Mapping[str, Any]  # revision, subfolder, variant, cache_dir, token, local_files_only
    transport: str
    memory: Literal["sealed", "mapped"]
    verify: Literal["auto", "strict", "off"]
    verdict: Literal["load", "first_use"]
    chunk_digests: bool | None
    manifest: Any
    manifest_sha256: str | None
    strict_folder: bool
    allow_pickle: bool
    progress: bool | None
    ignore_unexpected: tuple[str, ...]
    cast_inputs: bool
    model_kwargs: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """The path or repository, as the caller wrote it."""
        return str(self.path)

    @property
    def trust_remote_code(self) -> bool:
        """Whether the caller asked for the repository's own code by name."""
        return bool(self.model_kwargs.get("trust_remote_code"))

    def check(self) -> None:
        """Refuse what cannot be honoured, before anything is read."""
        if not isinstance(self.path, str | os.PathLike) or not self.origin:
            raise SourceError(
                f"pretrained_model_name_or_path={self.path!r}: expected a folder, a .safetensors file, or the id of a "
                "repository"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise SafeLoadError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, choices))}")
        if self.config is not None and not hasattr(self.config, "to_dict"):
            raise SafeLoadError(
                f"config={self.config!r}: expected a configuration object, or None for the checkpoint's own"
            )
        floating_dtype(self.dtype)
        _check_patterns(self.ignore_unexpected)
        refuse_arguments(self.model_class, self.model_kwargs)

    def statement(self) -> dict[str, str]:
        """Return what this rank called, in a form that is the same on ranks that call the same."""
        stated = {
            "call": "safe_from_pretrained",
            "model_class": _name(self.model_class),
            "path": self.origin,
            "dtype": str(self.dtype),
            "config": _stable(self.config),
            "kwargs": ", ".join(f"{name}={_stable(value)}" for name, value in sorted(self.model_kwargs.items())),
        }
        stated |= {name: str(self.where[name]) for name in ("revision", "subfolder", "variant")}
        names = (
            "transport",
            "memory",
            "verify",
            "verdict",
            "manifest_sha256",
            "strict_folder",
            "allow_pickle",
            "ignore_unexpected",
            "cast_inputs",
        )
        return stated | {name: str(getattr(self, name)) for name in names}


def _name(thing: Any) -> str:
    thing = getattr(thing, "func", thing)  # functools.partial
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _stable(value: Any) -> str:
    """Text of a value without what differs between processes, such as an address."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_stable(item)}" for key, item in sorted(value.items(), key=str)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_stable, value)) + "]"
    if value is None or isinstance(value, str | int | float | torch.dtype | torch.device):
        return repr(value)
    if hasattr(value, "to_dict"):  # a configuration object
        return json.dumps(value.to_dict(), sort_keys=True, default=str)
    return _name(type(value))


def patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Read the `ignore_unexpected` argument: one regular expression, or several.

    Ranks: every rank.
    """
    return (given,) if isinstance(given, str) else tuple(given or ())


def _check_patterns(given: Sequence[str]) -> None:
    for pattern in given:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise SafeLoadError(f"ignore_unexpected: {pattern!r} is not a regular expression: {error}") from error


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Read the `dtype` argument: None and "auto" are "as stored".

    Raises:
        SafeLoadError: Not a floating dtype that torch knows.

    Ranks: every rank.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < _HALF_BYTES:
        raise SafeLoadError(f"dtype={dtype!r}: expected None, 'auto', or a floating torch dtype such as torch.bfloat16")
    return found


def refuse_arguments(model_class: Callable[..., Any], model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what a safe load cannot honour, before anything is read.

    Raises:
        SafeLoadError: All such arguments at once, each with what to do instead.

    Ranks: every rank.
    """
    if not callable(model_class):
        raise SafeLoadError(f"model_class is {model_class!r}: expected a class or a callable that returns a module")
    if isinstance(model_class, nn.Module):
        raise SafeLoadError(f"model_class is an instance of {type(model_class).__name__}: pass the class itself")
    if getattr(model_class, "__name__", "") == "from_pretrained":
        owner = getattr(getattr(model_class, "__self__", None), "__name__", "its class")
        raise SafeLoadError(f"model_class is the method from_pretrained: pass {owner} itself")
    wrong = [f"{name} ({_REFUSED[name]})" for name, value in sorted(model_kwargs.items()) if value and name in _REFUSED]
    if model_kwargs.get("use_safetensors") is False:
        wrong.append("use_safetensors=False (pass allow_pickle=True where there are only .bin files)")
    if wrong:
        raise SafeLoadError(f"safe_from_pretrained does not take {', '.join(wrong)}")
    if family(model_class) == "factory" and set(model_kwargs) - {"key_mapping"}:
        extra = ", ".join(sorted(set(model_kwargs) - {"key_mapping"}))
        raise SafeLoadError(f"{model_class!r} is called without arguments and cannot take {extra}: wrap it in a lambda")
