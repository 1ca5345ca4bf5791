"""The dtype at a tower's door: casts where they were asked for, a clear error where they were not.

Receives a tower and puts a `Boundary` in front of its entry points (`forward`, and `encode` and the like). With
`cast_inputs` floating inputs come in in the tower's dtype and floating outputs leave in the caller's. Without it
nothing is cast, and when a call fails over dtypes the error names the tower, both dtypes and the keyword.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import PrecisionError

__all__ = ["Boundary", "install_boundary_casts", "install_boundary_errors", "remove_boundary"]

# Ways into a tower that do not pass through `forward`: diffusers' VAEs, CLIP-like models, audio codecs
_ENTRIES: Final = ("forward", "encode", "decode", "get_image_features", "get_text_features", "get_audio_features")
_REPLICATE: Final = "_replicate_for_data_parallel"
# "Input type (float) and bias type (c10::Half) should be the same", "expected m1 and m2 to have the same dtype", ...
_ABOUT_DTYPES: Final = re.compile(
    r"dtype|scalar type|\btype\b.*\b(Half|Float|BFloat16|float|double|c10::)", re.IGNORECASE
)


class Boundary:
    """Stands on the instance in front of one method of its class. Copies and pickles with the tower."""

    def __init__(
        self, tower: nn.Module, method: str, *, name: str, casts: bool, output_dtype: torch.dtype | None
    ) -> None:
        """Remember whose method it is; the method itself is looked up at each call."""
        self.tower, self.method, self.name = tower, method, name
        self.casts, self.output_dtype = casts, output_dtype
        self.replica_dtype: torch.dtype | None = None  # a replica of DataParallel has no parameters to ask

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the method, for those who ask before they call (transformers' Trainer and generate do)."""
        return inspect.signature(getattr(type(self.tower), self.method).__get__(self.tower))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; cast on both sides, or explain a failure over dtypes."""
        method = getattr(type(self.tower), self.method)
        if self.casts:
            return self._call_cast(method, args, kwargs)
        if torch.compiler.is_compiling():
            return method(self.tower, *args, **kwargs)  # a compiler explains its own failures, and dislikes `try`
        try:
            return method(self.tower, *args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            self._explain(error, args, kwargs)
            raise

    def _call_cast(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = self.replica_dtype or _tower_dtype(self.tower)
        if dtype is None:
            return method(self.tower, *args, **kwargs)
        outside = self.output_dtype or next(_floating(args, kwargs), dtype)
        args = tuple(_cast(value, dtype, saturate=False) for value in args)
        kwargs = {key: _cast(value, dtype, saturate="mask" in key) for key, value in kwargs.items()}
        device, ambient = _autocast(self.tower)
        if dtype is torch.float32 or ambient in (None, dtype):
            return _cast(method(self.tower, *args, **kwargs), outside, saturate=False)
        # autocast to bfloat16 around a float16 tower would mix the two at its first norm layer
        with torch.autocast(device, enabled=False):
            out = method(self.tower, *args, **kwargs)
        return _cast(out, outside, saturate=False)

    def _explain(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside = self.replica_dtype or _tower_dtype(self.tower)
        given = sorted({str(dtype) for dtype in _floating(args, kwargs) if dtype != inside})
        ambient = _autocast(self.tower)[1]
        if ambient not in (None, inside):
            given.append(f"autocast to {ambient}")
        if isinstance(error, PrecisionError) or not given or not _ABOUT_DTYPES.search(str(error)):
            return
        fix = "safe_from_pretrained(..., cast_inputs=True)"
        raise PrecisionError(
            f"Tower {self.name!r} ({type(self.tower).__name__}) holds {inside} and was called with"
            f" {' and '.join(given)} ({self.method}): {error}. Either cast the inputs to {inside} before the call, or"
            " load the tower with cast_inputs=True, which casts floating inputs to its dtype and outputs back to the"
            " caller's.",
            stage="precision",
            parameters={},
            fix=fix,
        ) from error


class _Replicator:
    """Stands in front of the method by which `nn.DataParallel` copies a module, dictionary and all."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower

    def __call__(self) -> Any:
        replica = getattr(type(self.tower), _REPLICATE)(self.tower)
        for method in _ENTRIES:
            boundary = replica.__dict__.get(method)
            if isinstance(boundary, Boundary):
                replica.__dict__[method] = twin = copy.copy(boundary)
                twin.tower, twin.replica_dtype = replica, boundary.replica_dtype or _tower_dtype(self.tower)
        return replica


def install_boundary_casts(tower: nn.Module, *, name: str = "", output_dtype: torch.dtype | None = None) -> nn.Module:
    """Cast floating inputs to the tower's dtype and floating outputs back to the caller's.

    The caller's dtype is that of the first floating input. A call without one (token ids) leaves the outputs in the
    tower's dtype, unless `output_dtype` says otherwise. Integers and booleans are untouched, nesting is kept. Additive
    masks are kept finite when the tower's dtype is narrower. A half-precision tower under autocast to another dtype
    runs without autocast. Objects that are not containers pass as they are.

    Args:
        tower: The module. Calls that go around its own methods (to a submodule) are not cast.
        name: What to call it in errors; its class when empty.
        output_dtype: For the outputs, whatever the caller's inputs are.

    Returns:
        The same module.

    Ranks: local.
    """
    return _install(tower, name=name, casts=True, output_dtype=output_dtype)


def install_boundary_errors(tower: nn.Module, *, name: str = "") -> nn.Module:
    """Cast nothing; turn a failure over dtypes into a `PrecisionError` that names the tower and `cast_inputs=True`.

    Args:
        tower: The module.
        name: What to call it in errors; its class when empty.

    Returns:
        The same module.

    Ranks: local.
    """
    return _install(tower, name=name, casts=False, output_dtype=None)


def remove_boundary(tower: nn.Module) -> nn.Module:
    """Take away what `install_boundary_casts` or `install_boundary_errors` put there. Returns the same module.

    Args:
        tower: With or without a boundary.
    """
    for method in _ENTRIES:
        if isinstance(tower.__dict__.get(method), Boundary):
            delattr(tower, method)
    tower.__dict__.pop(_REPLICATE, None)
    return tower


def _install(tower: nn.Module, *, name: str, casts: bool, output_dtype: torch.dtype | None) -> nn.Module:
    remove_boundary(tower)
    for method in _ENTRIES:
        if callable(getattr(type(tower), method, None)) and method not in tower.__dict__:
            where = name or type(tower).__name__
            setattr(tower, method, Boundary(tower, method, name=where, casts=casts, output_dtype=output_dtype))
    tower.__dict__[_REPLICATE] = _Replicator(tower)
    return tower


def _tower_dtype(tower: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating parameter wider than 8 bits, else of the first such buffer."""
    for tensors in (tower.parameters(), tower.buffers()):
        for tensor in tensors:
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                return tensor.dtype
    return None


def _autocast(tower: nn.Module) -> tuple[str, torch.dtype | None]:
    """The kind of device the tower is on, and what autocast makes of tensors there now; None where it is off."""
    device = next((tensor.device.type for tensor in tower.parameters()), "cpu")
    return device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _floating(*values: Any) -> Iterator[torch.dtype]:
    """The dtypes of the floating tensors in nested containers, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value.dtype
        elif isinstance(value, Mapping):
            yield from _floating(*value.values())
        elif isinstance(value, (list, tuple)):
            yield from _floating(*value)


def _cast(value: Any, dtype: torch.dtype, *, saturate: bool) -> Any:
    """Cast the floating tensors in nested containers; containers are made anew, of their own kind."""
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype, saturate=saturate)
    if isinstance(value, Mapping):
        # both ModelOutput and dict take their items by keyword; keys that are not words need a dict
        cast = {key: _cast(item, dtype, saturate=saturate or "mask" in str(key)) for key, item in value.items()}
        return cast if type(value) is dict else _rebuild(value, cast)
    if isinstance(value, (list, tuple)):
        items = [_cast(item, dtype, saturate=saturate) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if type(value) is list else tuple(items) if type(value) is tuple else type(value)(items)
    return value


def _rebuild(value: Mapping[Any, Any], cast: dict[Any, Any]) -> Any:
    kind: Any = type(value)
    # a ModelOutput is a dataclass of its keys; an OrderedDict, BatchEncoding or the like is made of one mapping
    return kind(**cast) if hasattr(kind, "__dataclass_fields__") else kind(cast)


def _cast_tensor(value: torch.Tensor, dtype: torch.dtype, *, saturate: bool) -> torch.Tensor:
    if not value.is_floating_point() or value.dtype == dtype:
        return value
    if saturate and torch.finfo(dtype).max < torch.finfo(value.dtype).max:
        # float32's lowest is -inf in float16, and a row of -inf is NaN after softmax
        value = value.clamp(min=torch.finfo(dtype).min)
    return value.to(dtype)
