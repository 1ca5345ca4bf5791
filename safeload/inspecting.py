"""What a class would take of a checkpoint: its own loader is asked, and nothing of the outcome is kept."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from safeload.errors import CheckpointError, SourceError

__all__ = ["Fit", "find_class", "fit_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a class makes of a checkpoint; names as its loader gives them.

    `parameters` is how many numbers the class would hold. `missing` would stay random, `unexpected` are left over,
    `mismatched` have another shape; `error` is why a load would be refused, or None.
    """

    model_class: str
    parameters: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]
    error: str | None

    def to_fields(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def find_class(name: str) -> Any:
    """Find a class by its name.

    Args:
        name: `CLIPVisionModel` of transformers, or `package.module.Class` of any package.

    Returns:
        The class.

    Raises:
        SourceError: There is none of that name.
    """
    module, _, leaf = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module or "transformers"), leaf)
    except (ImportError, AttributeError, ValueError) as error:
        raise SourceError(f"no class {name}: {error}.", path=name) from error


def fit_class(model_class: Any, origin: str, **where: Any) -> Fit:
    """Load a checkpoint with a class, on this process alone, and say how it fits.

    Args:
        model_class: As in `safe_from_pretrained`.
        origin: The checkpoint.
        **where: `revision` and the like.

    Returns:
        How it fits; a misfit is no error here.

    Raises:
        SafeLoadError: The checkpoint itself is not there or not whole.
    """
    from safeload.loading import safe_from_pretrained

    name = f"{model_class.__module__}.{model_class.__qualname__}"
    try:
        tower = safe_from_pretrained(model_class, origin, device="cpu", verify="off", progress=False, **where)
    except CheckpointError as error:
        data = error.to_fields()["data"]
        return Fit(
            model_class=name,
            parameters=0,
            missing=tuple(data["missing"] or ()),
            unexpected=tuple(data["unexpected"] or ()),
            mismatched=data["mismatched"] if isinstance(data["mismatched"], Mapping) else {},
            error=error.message,
        )
    count = sum(parameter.numel() for parameter in tower.parameters())
    return Fit(model_class=name, parameters=count, missing=(), unexpected=(), mismatched={}, error=None)
