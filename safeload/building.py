"""Make the tower's module: on the source with its weights, on the other ranks without.

On the source the library that owns the class loads the sealed bytes by its own `from_pretrained`: key renames,
conversions, ties and casts are its work, and none of that logic is repeated here. What it then says of missing,
unexpected and mismatched keys is an error here, where it would have left a random tensor behind.

The other ranks run the constructor on the meta device, from a `Recipe` that the source sends: the finished
configuration, not a file. The values follow by the plan.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import nn

from safeload.ambient import clean_contexts, unfilled_meta
from safeload.errors import CheckpointError, SafeLoadError, SourceError
from safeload.families import dtype_keyword, family
from safeload.fitting import architectures, check_fit
from safeload.recipes import Recipe, call_factory, constructor
from safeload.requesting import KEYWORDS

__all__ = ["build_peer", "build_source"]

_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_UNKNOWN_KEYWORD: Final = re.compile(r"unexpected keyword argument '(\w+)'")
_NO_MEMORY: Final = re.compile(r"(can't|[Cc]annot) allocate memory|[Oo]ut of memory")  # torch, the system


def build_source(
    model_class: Any,
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
            module = _fill_factory(
                model_class, weights, dtype, kwargs.get("key_mapping"), ignore_unexpected, origin=origin
            )
        else:
            _require_config(model_class, folder, config, origin)
            name = dtype_keyword(kind)
            kwargs[name] = ("auto" if dtype is None else dtype) if kind == "transformers" else dtype
            kwargs["use_safetensors"] = not _is_pickle(weights)
            if kind == "transformers":
                kwargs |= {"config": config, "weights_only": True}
            module, info = _quietly(model_class, str(folder), origin, variant, kwargs)
            check_fit(module, info, ignore_unexpected, origin, wrote=architectures(folder))
            _rename(module, origin)
    return module.eval()


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
    make = constructor(model_class, recipe, config=config, folder=folder, kwargs=dict(model_kwargs or {}))
    dtype = getattr(torch, recipe.dtype)
    try:
        with clean_contexts(device=_META, dtype=dtype), unfilled_meta():
            module = make()
    except (NotImplementedError, RuntimeError):  # a constructor that reads its tensors' values cannot run on meta
        with clean_contexts(device=_CPU, dtype=dtype):
            module = make()
    _rename(module, origin)
    if recipe.generation_config is not None:
        module.generation_config = type(module.generation_config).from_dict(recipe.generation_config)  # type: ignore
    return module.eval()


def _require_config(model_class: Any, folder: Path, config: Any, origin: str) -> None:
    """Refuse weights without their configuration: transformers then takes the class's defaults, and says nothing.

    They may well fit in shape, and be another network all the same: another activation, another epsilon.
    """
    if config is None and not (folder / "config.json").exists():
        raise SourceError(
            f"{origin}: there is no config.json with the weights, and {model_class.__name__} would be built with its "
            "default configuration. Name the folder that holds both, or pass config=.",
            looked_for=["config.json"],
        )


def _quietly(
    model_class: Any, folder: str, origin: str, variant: str | None, kwargs: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Call the class's own loader, without its report: what it would warn of is judged by `check_fit`."""
    # ignore_mismatched_sizes makes it report mismatches, not raise without saying which: `check_fit` raises on any.
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True, "local_files_only": True}
    with _silence():
        try:
            loaded: tuple[nn.Module, Mapping[str, Any]] = model_class.from_pretrained(
                folder, variant=variant, **report, **kwargs
            )
        except SafeLoadError:
            raise
        except Exception as error:
            _refuse_unknown(error, kwargs, model_class)
            why = str(error).replace(folder, origin)  # the private folder is gone when this is read
            if isinstance(error, MemoryError) or _NO_MEMORY.search(why):
                raise MemoryError(f"{origin} could not be loaded: {why}") from error  # no fault of the checkpoint
            raise CheckpointError(
                f"{model_class.__name__}.from_pretrained could not load the checkpoint {origin}: {why}", path=origin
            ) from error
    return loaded


def _refuse_unknown(error: Exception, kwargs: Mapping[str, Any], model_class: Any) -> None:
    """Say so where it was a keyword that nobody knows; those that the configuration does not take reach the class."""
    found = _UNKNOWN_KEYWORD.search(str(error)) if isinstance(error, TypeError) else None
    if found is None or found[1] not in kwargs:
        return
    near = difflib.get_close_matches(found[1], KEYWORDS, n=1)
    hint = f" Did you mean {near[0]}=?" if near else ""
    raise SafeLoadError(
        f"safe_from_pretrained() has no keyword {found[1]!r}, and neither has {model_class.__name__} or its "
        f"configuration.{hint}"
    ) from error


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
    *,
    origin: str,
) -> nn.Module:

    module = call_factory(factory)
    state = _read_state(weights, key_mapping)
    own = module.state_dict(keep_vars=True)
    tied = {id(value): name for name, value in own.items() if name in state}
    info = {
        "missing_keys": [name for name, value in own.items() if name not in state and id(value) not in tied],
        "unexpected_keys": [name for name in state if name not in own],
        "mismatched_keys": [
            (name, tuple(value.shape), tuple(own[name].shape))
            for name, value in state.items()
            if name in own and value.shape != own[name].shape
        ],
    }
    check_fit(module, info, ignore_unexpected, origin)
    module.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False, assign=True)
    for name, value in own.items():  # assign=True gives each name a tensor of its own: tie again what was tied
        if name not in state:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(tied[id(value)]))
    return module if dtype is None else module.to(dtype)


def _read_state(weights: Sequence[Path], key_mapping: Mapping[str, str] | None) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for path in weights:
        for key, value in _read_file(path).items():
            name = _renamed(key, key_mapping)
            if name in state:
                raise CheckpointError(
                    f"{path.name}: two tensors go by the name of {name}; see key_mapping", path=str(path)
                )
            state[name] = value
    return state


def _read_file(path: Path) -> Mapping[str, torch.Tensor]:
    if not _is_pickle([path]):
        return load_file(path)
    try:  # a pickle is here only with allow_pickle=True, and even so nothing but tensors is unpickled
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile file makes the unpickler raise
        raise CheckpointError(f"{path.name}: not a file of plain tensors: {error}", path=str(path)) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path.name}: not a flat mapping of names to tensors", path=str(path))
    return found


def _is_pickle(weights: Sequence[Path]) -> bool:
    return any(path.suffix != ".safetensors" for path in weights)


def _renamed(key: str, key_mapping: Mapping[str, str] | None) -> str:
    for pattern, replacement in (key_mapping or {}).items():
        key, count = re.subn(pattern, replacement, key)
        if count:
            return key
    return key
