"""Which library owns a model class, and how that library spells what safeload asks of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

__all__ = ["Family", "dtype_keyword", "family"]

Family = Literal["transformers", "diffusers", "factory"]


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


def dtype_keyword(kind: Family) -> str:
    """Return the keyword for a dtype: `dtype` since transformers 4.56, `torch_dtype` before and in diffusers."""
    if kind == "diffusers":
        return "torch_dtype"
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
