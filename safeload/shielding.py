"""Receive verified tensors, keep writes off them while a function runs that was written for other modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["shielded"]


class _DropWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skip every operation that would write to one of the given storages, and note its name."""

    def __init__(self, storages: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages
        self.stopped: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {} if kwargs is None else kwargs
        target = self._written_target(func, args, given)
        if target is None:
            return func(*args, **given)
        self.stopped.append(str(func))
        return target

    def _written_target(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self.storages:
                return value
        return None


@contextlib.contextmanager
def shielded(tensors: Sequence[torch.Tensor]) -> Iterator[list[str]]:
    """Drop all writes to the storages of these tensors while the block runs.

    Args:
        tensors: Tensors whose values must stay.

    Yields:
        The list of dropped operations, filled while the block runs.
    """
    mode = _DropWrites(frozenset(tensor.untyped_storage()._cdata for tensor in tensors))
    with mode:
        yield mode.stopped
