"""How the other ranks construct the module that the source has loaded: a finished configuration, not a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import SafeLoadError
from safeload.families import Family, family

__all__ = ["Recipe", "call_factory", "constructor", "recipe_of"]

# Arguments that from_pretrained itself consumes: neither the configuration's nor the constructor's.
_LOADERS_OWN: Final = frozenset(
    [
        "attn_implementation",
        "experts_implementation",
        "trust_remote_code",
        "code_revision",
        "key_mapping",
        "low_cpu_mem_usage",
        "use_safetensors",
        "weights_only",
        "proxies",
        "force_download",
        "resume_download",
        "mirror",
        "adapter_kwargs",
        "adapter_name",
        "offload_folder",
        "offload_buffers",
        "offload_state_dict",
        "max_memory",
        "disable_mmap",
        "use_kernels",
        "kernel_config",
        "allow_all_kernels",
        "fusion_config",
        "generation_config",
        "tqdm_class",
        "_fast_init",
        "use_flash_attention_2",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a rank needs to construct the module that the source has loaded.

    Attributes:
        family: Which library's way of construction.
        config: The finished configuration, after every keyword of the call; None for a factory.
        model_type: The configuration's `model_type`, by which an Auto class finds its class.
        attention: Attention implementation by part of the configuration ("" is the whole); not in `config`.
        generation_config: For models that generate, else None.
        dtype: Name of the default dtype under which the source constructed.
        files: Python and JSON files of the checkpoint by name, only where remote code was asked for.
    """

    family: Family
    config: Mapping[str, Any] | None
    model_type: str | None
    attention: Mapping[str, str | None]
    generation_config: Mapping[str, Any] | None
    dtype: str
    files: Mapping[str, str]

    def to_json(self) -> bytes:
        """Return the recipe as JSON bytes."""
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Recipe:
        """Read what `to_json` wrote on the source rank."""
        return cls(**json.loads(raw))


def recipe_of(module: nn.Module, model_class: Callable[..., Any], files: Mapping[str, str]) -> Recipe:
    """Describe how the other ranks construct the module that the source has built.

    Args:
        module: What `build_source` returned.
        model_class: As in `safe_from_pretrained`.
        files: Python and JSON files by name, where remote code was asked for.

    Ranks: source only.
    """
    kind = family(model_class)
    config: Any = getattr(module, "config", None)
    generation: Any = getattr(module, "generation_config", None)
    plain = None if kind == "factory" else dict(config) if isinstance(config, Mapping) else config.to_dict()
    stored = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return Recipe(
        family=kind,
        config=plain,
        model_type=getattr(config, "model_type", None),
        attention={
            name: part._attn_implementation
            for name, part in _config_parts(config).items()
            if hasattr(part, "_attn_implementation")
        },
        generation_config=generation.to_dict() if kind == "transformers" and generation is not None else None,
        dtype=str(stored).removeprefix("torch."),
        files=dict(files),
    )


def constructor(
    model_class: Any, recipe: Recipe, *, config: Any, folder: Path | None, kwargs: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """Return a function that constructs the module of a recipe, without weights.

    Args:
        model_class: As in `safe_from_pretrained`.
        recipe: What the source sent.
        config: The configuration object that the caller gave, or None; only its class is used.
        folder: Where `recipe.files` have been written, where remote code was asked for.
        kwargs: What the caller passed on; what the configuration has not taken goes to the constructor.

    Ranks: every rank but the source.
    """
    if recipe.family == "factory":
        return lambda: call_factory(model_class)
    if recipe.family == "diffusers":
        return lambda: model_class.from_config(dict(recipe.config or {}))
    finished = _transformers_config(model_class, recipe, config, folder)
    init = {
        name: value
        for name, value in kwargs.items()
        if name not in _LOADERS_OWN and (config is not None or not hasattr(finished, name))
    }
    if hasattr(model_class, "from_config"):  # an Auto class: it finds the class as its from_pretrained does
        return lambda: model_class.from_config(finished, **init, **_remote(kwargs))
    return lambda: model_class(finished, **init)


def _remote(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}


def _transformers_config(model_class: Any, recipe: Recipe, config: Any, folder: Path | None) -> Any:
    from transformers import AutoConfig

    if config is not None:
        kind = type(config)
    elif recipe.files:
        kind = type(AutoConfig.from_pretrained(str(folder), trust_remote_code=True))
    elif getattr(model_class, "config_class", None) is not None:
        kind = model_class.config_class
    else:
        kind = type(AutoConfig.for_model(recipe.model_type))
    finished = kind.from_dict(dict(recipe.config or {}))
    if folder is not None:
        finished.name_or_path = str(folder)  # where an Auto class looks for the code: this rank's verified copy of it
    for name, part in _config_parts(
        finished
    ).items():  # the whole comes first: newer versions set the parts along with it
        if recipe.attention.get(name) is not None:
            part._attn_implementation = recipe.attention[name]
    return finished


def _config_parts(config: Any) -> dict[str, Any]:
    """Return a transformers configuration and its sub-configurations, by attribute name; "" is the whole."""
    names = getattr(config, "sub_configs", None) or {}
    parts = {"": config} | {name: getattr(config, name, None) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def call_factory(factory: Callable[[], Any]) -> nn.Module:
    """Call a factory and insist on a module.

    Raises:
        SafeLoadError: It returned something else.

    Ranks: every rank.
    """
    module = factory()
    if not isinstance(module, nn.Module):
        raise SafeLoadError(f"{factory!r} returned a {type(module).__name__}: expected a torch.nn.Module")
    return module
