"""Receive a tower's class, give its own public methods with a glance in front: nothing leaves a tower unlooked at.

`forward` is one way in among several: `get_image_features`, `encode`, `decode`, and whatever own code calls its own. A
method of torch's, transformers' or diffusers' base classes is none of them: it saves, casts, names, configures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn

from safeload.glancing import glance, glance_while_tracing
from safeload.keeping import record_of

__all__ = ["entries_of"]

_LIBRARIES: Final = (
    "torch.",
    "transformers.modeling_",
    "transformers.generation",
    "transformers.integrations",
    "transformers.utils",
    "diffusers.models.modeling_utils",
    "diffusers.configuration_utils",
    "diffusers.loaders",
    "huggingface_hub.",
)


def entries_of(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Wrap the ways into a tower that its class itself defines.

    Args:
        original: The class of a tower, before it was protected.

    Returns:
        Methods for a subclass, by name. They take whatever method the original class has at the time of the call.
    """
    known = [base for base in original.__mro__ if base is object or base.__module__.startswith(_LIBRARIES)]
    found: dict[str, Callable[..., Any]] = {}
    for base in original.__mro__:
        if base in known:
            continue
        for name, method in vars(base).items():
            if name == "forward" or _is_way_in(name, method, known):
                found.setdefault(name, _entry(original, name, getattr(original, name)))
    if "forward" not in found:  # the tower is an nn.Sequential, an nn.TransformerEncoder...
        found["forward"] = _entry(original, "forward", original.forward)
    return found


def _is_way_in(name: str, method: Any, known: list[type[Any]]) -> bool:
    if name.startswith("_") or not inspect.isfunction(method) or any(name in vars(base) for base in known):
        return False
    return len(inspect.signature(method).parameters) > 1  # without arguments nothing is computed


def _entry(original: type[nn.Module], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(original, name)
        if torch.compiler.is_compiling():
            glance_while_tracing(self)
            return own(self, *args, **kwargs)
        protection, me = record_of(self), get_ident()
        if me in protection.inside:
            return own(self, *args, **kwargs)
        protection.within.discard(me)  # of a part's call that was interrupted
        glance(protection)
        protection.inside.add(me)
        try:
            return own(self, *args, **kwargs)
        finally:
            protection.inside.discard(me)

    return entered
