"""List the tensors that a module holds, under all their names, and find the memory behind them.

Receives a module. Gives a `NamedTensor` for each, in the module's own order, and their places in *segments*: the
smallest ranges of bytes that hold a tensor, or several that overlap. `safeload.planning` makes a plan of this.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from safeload.errors import CheckpointError

__all__ = ["Kind", "NamedTensor", "bytes_from", "lay_out", "list_tensors", "refuse_special"]

Kind = Literal["parameter", "buffer", "attribute"]
_MODULES_OWN: Final = frozenset(vars(nn.Module()))  # attributes that every module has: tables of tensors, hooks, flags
_PLAIN_TYPES: Final = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


class NamedTensor(NamedTuple):
    """A tensor that a module holds: a parameter, a buffer, or a plain attribute such as a rotary table.

    A tuple with names: a load lists every tensor several times over, and a dataclass takes twice as long to make.

    Attributes:
        name: Qualified name in the module.
        kind: "parameter", "buffer" or "attribute".
        tensor: The module's own.
        persistent: Whether it is in the module's own state dict.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    persistent: bool


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[NamedTensor]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield NamedTensor(prefix + name, "parameter", parameter, True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield NamedTensor(prefix + name, "buffer", buffer, name not in module._non_persistent_buffers_set)
    for name, value in vars(module).items():
        if name not in _MODULES_OWN and isinstance(value, torch.Tensor):
            yield NamedTensor(prefix + name, "attribute", value, False)


def list_tensors(module: nn.Module) -> Iterator[NamedTensor]:
    """List every tensor that a module and its children hold, ties under each of their names.

    Args:
        module: Any module; it must not change meanwhile.

    Yields:
        In the module's own order; a submodule that is reachable by several names is listed under each of them.

    Ranks: local.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        yield from _own_tensors(child, f"{path}." if path else "")


def refuse_special(tensors: Sequence[NamedTensor]) -> None:
    """Refuse tensors that are not plain strided memory: their bytes would not be their value.

    Args:
        tensors: Of a module.

    Raises:
        CheckpointError: There are such; `mismatched` names all of them.
    """
    bad = {
        item.name: f"{type(item.tensor).__name__}, {item.tensor.layout}, {item.tensor.device}"
        for item in tensors
        if type(item.tensor) not in _PLAIN_TYPES
        or item.tensor.layout is not torch.strided
        or item.tensor.is_quantized
        or item.tensor.is_conj()
        or item.tensor.is_neg()
        or item.tensor.is_meta
    }
    if bad:
        listed = "; ".join(f"{name} ({what})" for name, what in sorted(bad.items()))
        raise CheckpointError(
            f"{len(bad)} tensors of the tower are not plain dense tensors with data, and cannot be sent as bytes: "
            f"{listed}. Quantised and sharded towers are not supported: load the tower in a floating dtype",
            mismatched=bad,
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first element and of the end of its last, gaps included."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _ranges(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge the byte ranges of all tensors where they overlap; sorted by address."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[tuple[int, int]]]:
    """Find the segments of memory behind tensors.

    Args:
        tensors: All in the memory of one device.

    Returns:
        The size of each segment in bytes, in the order in which the tensors come to them, and for each tensor its
        (segment, offset in bytes). A tensor without elements has segment -1.
    """
    spans = [_span(tensor) for tensor in tensors]
    ranges = _ranges(spans)
    starts = [start for start, _ in ranges]
    numbers: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for start, stop in spans:
        if start == stop:
            places.append((-1, 0))
            continue
        found = bisect.bisect_right(starts, start) - 1
        number = numbers.setdefault(found, len(numbers))
        places.append((number, start - starts[found]))
    return [ranges[found][1] - ranges[found][0] for found in numbers], places


def bytes_from(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return memory from the beginning of a tensor on, as flat bytes.

    Args:
        tensor: On the cpu.
        size_bytes: How much of it; not beyond the tensor's storage.

    Returns:
        uint8 `[size_bytes]`, a view.

    Ranks: local.
    """
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.data_ptr() - storage.data_ptr()
    return storage[start : start + size_bytes]
