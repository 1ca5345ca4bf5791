"""Make the tower's module: on the source with its weights, on the other ranks without.

On the source the library that owns the class loads the sealed bytes by its own `from_pretrained`: key renames, conversions,
ties and casts are its work, and none of that logic is repeated here. What it then says of missing, unexpected and mismatched
keys is an error here, where it would have left a random tensor behind.

The other ranks run the constructor on the meta device, from a `Recipe` that the source sends: the finished configuration,
not a file. The values follow by the plan.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.ambient import clean_contexts
from safeload.errors import CheckpointError, SafeLoadError

__all__ = ["Recipe", "build_peer", "build_source", "family", "public_dtype", "refuse_arguments"]

Family = Literal["transformers", "diffusers", "factory"]
_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_LISTED: Final = 20

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
    "output_loading_info": "missing and unexpected keys are errors; see load_report(tower)",
}
# Arguments that from_pretrained itself consumes: neither the configuration's nor the constructor's.
_LOADERS_OWN: Final = frozenset(
    "attn_implementation experts_implementation trust_remote_code code_revision key_mapping low_cpu_mem_usage "
    "use_safetensors weights_only proxies force_download resume_download mirror adapter_kwargs adapter_name "
    "offload_folder offload_buffers offload_state_dict max_memory disable_mmap use_kernels kernel_config "
    "allow_all_kernels fusion_config generation_config tqdm_class _fast_init use_flash_attention_2".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a rank needs to construct the module that the source has loaded.

    Attributes:
        family: Which library's way of construction.
        config: The finished configuration, after every keyword of the call; None for a factory.
        model_type: The configuration's `model_type`, by which an Auto class finds its class.
        generation_config: For models that generate, else None.
        dtype: Name of the default dtype under which the source constructed.
        files: Python and JSON files of the checkpoint by name, only where remote code was asked for.
    """

    family: Family
    config: Mapping[str, Any] | None
    model_type: str | None
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


def family(model_class: Callable[..., Any]) -> Family:
    """Say which library owns a class.

    Args:
        model_class: A transformers class or Auto class, a diffusers `ModelMixin`, or a callable without arguments.

    Ranks: local.
    """
    for name, module_name, bases in (
        ("transformers", "transformers.modeling_utils", ("PreTrainedModel",)),
        ("transformers", "transformers.models.auto.auto_factory", ("_BaseAutoModelClass",)),
        ("diffusers", "diffusers.models.modeling_utils", ("ModelMixin",)),
    ):
        module = sys.modules.get(module_name)
        owners = tuple(getattr(module, base) for base in bases if hasattr(module, base))
        if isinstance(model_class, type) and owners and issubclass(model_class, owners):
            return name  # type: ignore[return-value]
    return "factory"


def refuse_arguments(model_class: Callable[..., Any], model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what a safe load cannot honour, before anything is read.

    Raises:
        SafeLoadError: All such arguments at once, each with what to do instead.

    Ranks: every rank.
    """
    if not callable(model_class):
        raise SafeLoadError(f"model_class is {model_class!r}: expected a class or a callable that returns a module")
    wrong = [f"{name} ({_REFUSED[name]})" for name, value in sorted(model_kwargs.items()) if value and name in _REFUSED]
    if wrong:
        raise SafeLoadError(f"safe_from_pretrained does not take {', '.join(wrong)}")
    if family(model_class) == "factory" and set(model_kwargs) - {"key_mapping"}:
        extra = ", ".join(sorted(set(model_kwargs) - {"key_mapping"}))
        raise SafeLoadError(f"{model_class!r} is called without arguments and cannot take {extra}: wrap it in a lambda")


def public_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Read the `dtype` argument: None and "auto" are "as stored".

    Raises:
        SafeLoadError: Not a floating dtype that torch knows.

    Ranks: every rank.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SafeLoadError(f"dtype={dtype!r}: expected None, 'auto', or a floating torch dtype such as torch.bfloat16")
    return found


def build_source(
    model_class: Callable[..., Any],
    folder: Path,
    *,
    origin: str,
    config: Any = None,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    weights: Sequence[Path] = (),
    ignore_unexpected: Sequence[str] = (),
    model_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Construct the tower with its weights.

    Args:
        model_class: As in `safe_from_pretrained`.
        folder: The private folder of sealed files, as the owning library expects it.
        origin: What the caller wrote; the module's configuration is named after it.
        config: A configuration object to use in place of the folder's.
        dtype: Cast to this, once; None is "as stored".
        variant: As in from_pretrained.
        weights: The weight files in `folder`, for a factory.
        ignore_unexpected: Regular expressions; keys of the checkpoint that match one may be left over.
        model_kwargs: What the caller passed on.

    Returns:
        The module on the cpu, in eval mode, every tensor filled.

    Raises:
        CheckpointError: Missing, unexpected or mismatched tensors, all of them listed.

    Ranks: source only.
    """
    kwargs = dict(model_kwargs or {})
    kind = family(model_class)
    with clean_contexts(device=_CPU):
        if kind == "factory":
            module = _fill_factory(model_class, weights, dtype, kwargs.get("key_mapping"), ignore_unexpected)
        else:
            name = _dtype_keyword(kind)
            kwargs[name] = ("auto" if dtype is None else dtype) if kind == "transformers" else dtype
            if kind == "transformers":
                kwargs["config"] = config
            module, info = _quietly(model_class.from_pretrained, str(folder), variant, kwargs)  # type: ignore[attr-defined]
            _judge(module, info, ignore_unexpected, origin)
            _rename(module, origin)
    return module.eval()


def _quietly(
    from_pretrained: Callable[..., Any], folder: str, variant: str | None, kwargs: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Call the class's own loader, without its report: what it would warn of is judged by `_judge`."""
    # ignore_mismatched_sizes makes it report mismatches instead of raising without saying which: `_judge` raises on any.
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True, "local_files_only": True}
    with _silence():
        try:
            loaded: tuple[nn.Module, Mapping[str, Any]] = from_pretrained(
                folder, variant=variant, use_safetensors=True, **report, **kwargs
            )
        except SafeLoadError:
            raise
        except Exception as error:
            raise CheckpointError(f"{from_pretrained.__qualname__} could not load the checkpoint: {error}") from error
    return loaded


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging: Any = sys.modules.get("transformers.utils.logging")
    if logging is None:
        yield
        return
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(max(before, logging.ERROR))
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _dtype_keyword(kind: Family) -> str:
    """`dtype` since transformers 4.56, `torch_dtype` before and in diffusers."""
    if kind == "diffusers":
        return "torch_dtype"
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _text(items: Sequence[str]) -> str:
    more = f" (+{len(items) - _LISTED} more)" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more


def _judge(module: nn.Module, info: Mapping[str, Any], ignore_unexpected: Sequence[str], origin: str) -> None:
    """Raise where the class's own loader left a tensor unfilled, or the checkpoint holds what nobody took."""
    missing = sorted(info["missing_keys"])
    mismatched = {str(key): f"{list(there)} in the checkpoint, {list(here)} in the module"
                  for key, there, here in (info.get("mismatched_keys") or ())}
    unexpected = [key for key in sorted(info["unexpected_keys"]) if not _may_be_left(key, module, ignore_unexpected)]
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
            f"{origin} does not fit {type(module).__name__}: {'; '.join(parts + errors)}. Nothing was loaded: a tensor that "
            "the checkpoint does not fill would be random. Take the class that wrote the checkpoint, or switch off the part "
            "that is not there (add_pooling_layer=False, say); allow left-over keys with ignore_unexpected=[regex]",
            path=origin,
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )


def _may_be_left(key: str, module: nn.Module, ignore_unexpected: Sequence[str]) -> bool:
    """Whether a key of the checkpoint may go unused.

    Either a pattern of the caller allows it, or the checkpoint is that of a larger model, by its own configuration, and the
    key belongs to another part of it: the text half of a CLIPModel beside a CLIPVisionModel. A key that goes by the name of
    one of the module's own children is never left: it is a layer too many or a misspelt tensor.
    """
    if any(re.search(pattern, key) for pattern in ignore_unexpected):
        return True
    wrote = getattr(getattr(module, "config", None), "architectures", None) or ()
    own = type(module).__name__
    if not wrote or own in wrote:
        return False
    prefix = getattr(module, "base_model_prefix", "")
    first = key.removeprefix(f"{prefix}.").partition(".")[0] if prefix else key.partition(".")[0]
    return first not in {name for name, _ in module.named_children()} | set(module._parameters) | set(module._buffers)


def _rename(module: nn.Module, origin: str) -> None:
    config = getattr(module, "config", None)
    for owner in (config, module):
        if owner is not None and hasattr(owner, "name_or_path"):
            with contextlib.suppress(AttributeError):  # a read-only property in some classes
                owner.name_or_path = origin


def _fill_factory(
    factory: Callable[[], Any],
    weights: Sequence[Path],
    dtype: torch.dtype | None,
    key_mapping: Mapping[str, str] | None,
    ignore_unexpected: Sequence[str],
) -> nn.Module:
    from safetensors.torch import load_file

    module = _called(factory)
    state = {_renamed(key, key_mapping): value for path in weights for key, value in load_file(path).items()}
    own = module.state_dict(keep_vars=True)
    tied = {id(value): name for name, value in own.items() if name in state}
    info = {
        "missing_keys": [name for name, value in own.items() if name not in state and id(value) not in tied],
        "unexpected_keys": [name for name in state if name not in own],
        "mismatched_keys": [(name, tuple(value.shape), tuple(own[name].shape)) for name, value in state.items()
                            if name in own and value.shape != own[name].shape],
    }
    _judge(module, info, ignore_unexpected, "the checkpoint")
    module.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False, assign=True)
    for name, value in own.items():  # assign=True gives each name a tensor of its own: tie again what was tied
        if name not in state:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(tied[id(value)]))
    return module if dtype is None else module.to(dtype)


def _called(factory: Callable[[], Any]) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise SafeLoadError(f"{factory!r} returned a {type(module).__name__}: expected a torch.nn.Module")
    return module


def _renamed(key: str, key_mapping: Mapping[str, str] | None) -> str:
    for pattern, replacement in (key_mapping or {}).items():
        key, count = re.subn(pattern, replacement, key)
        if count:
            return key
    return key


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
        generation_config=generation.to_dict() if kind == "transformers" and generation is not None else None,
        dtype=str(stored).removeprefix("torch."),
        files=dict(files),
    )


def build_peer(
    model_class: Callable[..., Any],
    recipe: Recipe,
    *,
    origin: str,
    config: Any = None,
    folder: Path | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Construct the same module without weights, on meta where the class can be.

    Args:
        model_class: As in `safe_from_pretrained`.
        recipe: What the source sent.
        origin: What the caller wrote.
        config: The configuration object that the caller gave, or None.
        folder: Where `recipe.files` have been written, where remote code was asked for.
        model_kwargs: What the caller passed on; the same on every rank.

    Returns:
        A module in eval mode whose tensors are to be filled by the plan.

    Ranks: every rank but the source. Opens no weight file.
    """
    make = _constructor(model_class, recipe, config=config, folder=folder, kwargs=dict(model_kwargs or {}))
    dtype = getattr(torch, recipe.dtype)
    try:
        with clean_contexts(device=_META, dtype=dtype):
            module = make()
    except (NotImplementedError, RuntimeError):  # a constructor that reads its tensors' values cannot run on meta
        with clean_contexts(device=_CPU, dtype=dtype):
            module = make()
    _rename(module, origin)
    if recipe.generation_config is not None:
        module.generation_config = type(module.generation_config).from_dict(recipe.generation_config)  # type: ignore
    return module.eval()


def _constructor(
    model_class: Callable[..., Any], recipe: Recipe, *, config: Any, folder: Path | None, kwargs: dict[str, Any]
) -> Callable[[], nn.Module]:
    if recipe.family == "factory":
        return lambda: _called(model_class)
    if recipe.family == "diffusers":
        return lambda: model_class.from_config(dict(recipe.config or {}))  # type: ignore[attr-defined,no-any-return]
    finished = _transformers_config(model_class, recipe, config, folder, kwargs)
    init = {
        name: value
        for name, value in kwargs.items()
        if name not in _LOADERS_OWN and (config is not None or not hasattr(finished, name))
    }
    if hasattr(model_class, "from_config"):  # an Auto class: it finds the class as its from_pretrained does
        return lambda: model_class.from_config(finished, **init, **_remote(kwargs))  # type: ignore[no-any-return]
    return lambda: model_class(finished, **init)  # type: ignore[no-any-return]


def _remote(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}


def _transformers_config(
    model_class: Any, recipe: Recipe, config: Any, folder: Path | None, kwargs: Mapping[str, Any]
) -> Any:
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
    if kwargs.get("attn_implementation") is not None:
        finished._attn_implementation = kwargs["attn_implementation"]
    return finished
