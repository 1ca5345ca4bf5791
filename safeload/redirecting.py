"""Receive classes, have third-party code that calls their `from_pretrained` get `safe_from_pretrained`, unedited."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from safeload.errors import SafeLoadError
from safeload.loading import safe_from_pretrained

__all__ = ["find_class", "find_classes", "redirect_from_pretrained"]

_LOADING: ContextVar[bool] = ContextVar("safeload_loading", default=False)  # the safe load calls from_pretrained itself
_HARMLESS: Final[Mapping[str, object]] = {
    "device_map": None,
    "low_cpu_mem_usage": ...,  # the safe load has its own way; any value does
    "output_loading_info": False,
    "use_safetensors": ...,
    "_fast_init": ...,
    "force_download": False,
    "weights_only": True,
    "ignore_mismatched_sizes": False,
}
_LIBRARIES: Final = ("transformers", "diffusers")


@contextlib.contextmanager
def redirect_from_pretrained(*classes: type[Any], **options: Any) -> Iterator[None]:
    """Turn `cls.from_pretrained` into `safe_from_pretrained(cls, ...)` for these classes; also usable as a decorator.

        with redirect_from_pretrained(CLIPVisionModel):
            model = ThirdPartyModel(config)  # its __init__ calls CLIPVisionModel.from_pretrained

    Only the classes themselves are redirected, not their subclasses; name an Auto class where the code calls that one.
    While the block runs, this holds for the whole process.

    Args:
        *classes: Classes with a `from_pretrained`.
        **options: Passed on to every `safe_from_pretrained`: `group`, `verify`, `timeout`... They win over what
            the code passes.

    Yields:
        Nothing.

    Raises:
        SafeLoadError: No class was given, or one has no `from_pretrained`.

    Ranks: local; but the calls that are redirected are made on every rank, in the same order.
    """
    if not classes:
        raise SafeLoadError("redirect_from_pretrained() needs at least one class, for instance CLIPVisionModel")
    for target in classes:
        if not (isinstance(target, type) and callable(getattr(target, "from_pretrained", None))):
            raise SafeLoadError(f"{target!r} is not a class with a from_pretrained: there is nothing to redirect")
    with contextlib.ExitStack() as undo:
        for target in dict.fromkeys(classes):
            undo.enter_context(_redirected(target, options))
        yield


@contextlib.contextmanager
def _redirected(target: type[Any], options: Mapping[str, Any]) -> Iterator[None]:
    own = target.__dict__.get("from_pretrained")  # None: inherited, and to be so again
    original = inspect.getattr_static(target, "from_pretrained")
    target.from_pretrained = classmethod(_safe_version(target, original, options))
    try:
        yield
    finally:
        if own is None:
            del target.from_pretrained
        else:
            target.from_pretrained = own


def _safe_version(target: type[Any], original: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original.__func__ if hasattr(original, "__func__") else original)
    def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        if cls is not target or _LOADING.get():
            return original.__get__(None, cls)(*args, **kwargs)
        named = dict(zip(("pretrained_model_name_or_path",), args, strict=False)) | _translated(kwargs) | dict(options)
        if len(args) > 1:
            raise SafeLoadError(
                f"{target.__name__}.from_pretrained was called with {len(args) - 1} positional arguments after the "
                "path; safe_from_pretrained takes keywords alone. Do not redirect this class."
            )
        token = _LOADING.set(True)
        try:
            return safe_from_pretrained(cls, **named)
        finally:
            _LOADING.reset(token)

    return from_pretrained


def _translated(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give keywords of `from_pretrained` the names they have here, and leave out those that change nothing."""
    named = {"dtype" if key == "torch_dtype" else key: value for key, value in kwargs.items()}
    return {
        key: value
        for key, value in named.items()
        if key not in _HARMLESS or (_HARMLESS[key] is not ... and value != _HARMLESS[key])
    }


def find_class(name: str) -> type[Any]:
    """Find a class by the name a user types.

    Args:
        name: `CLIPVisionModel` of transformers or diffusers, or `package.module:Class` or `package.module.Class`.

    Returns:
        The class.

    Raises:
        SafeLoadError: There is none of that name; says where it looked.
    """
    module_name, _, short = name.replace(":", ".").rpartition(".")
    looked = [module_name] if module_name else list(_LIBRARIES)
    for place in looked:
        found = _attribute(place, short)
        if isinstance(found, type):
            return found
    raise SafeLoadError(f"there is no class {short!r} in {' or '.join(looked)}; name it as package.module:Class")


def _attribute(module_name: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        return None


def find_classes(names: Sequence[str]) -> list[type[Any]]:
    """Find several classes; names may be joined by commas.

    Args:
        names: As typed.

    Returns:
        The classes, in order.

    Raises:
        SafeLoadError: One of them does not exist.
    """
    return [find_class(part) for name in names for part in name.split(",") if part]
