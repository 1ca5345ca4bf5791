"""One dtype in each FSDP wrap, looked at before the wrap is made.

FSDP1 flattens all parameters of a wrap into one tensor, frozen ones included; FSDP2 wants one dtype among those of a
wrap that train. Receives a model and what is going to be wrapped; gives findings. Wraps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from safeload.rewrapping import flat_units, fully_sharded
from safeload.ruling import Finding, Rule
from safeload.walking import finding

__all__ = ["MIXED_WRAP", "MIXED_WRAP2", "Wrap", "wrap_findings", "wrap_of"]

_FIX: Final = (
    "keep the frozen tower out of the wrap (ignored_modules=safeload.ignored_modules(model); towers of"
    " safe_from_pretrained stay out by themselves), and safeload.upcast_trainable(model) before wrapping"
)
MIXED_WRAP: Final = Rule(
    id="mixed-dtypes-in-fsdp1-wrap",
    severity="error",
    reason='FSDP1 flattens this wrap into one tensor: "Must flatten tensors with uniform dtype"',
    fix=_FIX,
)
MIXED_WRAP2: Final = Rule(
    id="mixed-dtypes-in-fsdp2-wrap",
    severity="error",
    reason='FSDP2 reduces the gradients of this wrap together: "FSDP expects uniform original parameter dtype"',
    fix="safeload.upcast_trainable(model) before wrapping",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """What FSDP wraps besides the root: names of classes, or ids of modules; and what it is told to ignore."""

    version: int
    class_names: frozenset[str] = frozenset()
    roots: frozenset[int] = frozenset()
    ignored: tuple[nn.Module, ...] = ()
    ignored_pattern: str | None = None


def wrap_of(
    training: Any, fsdp_wrap: Iterable[str | type[nn.Module]] | None, *, default: Iterable[str] | None = None
) -> Wrap | None:
    """Return what FSDP is going to wrap, or None when nobody said.

    Args:
        training: An `Accelerator`, of whose FSDP plugin classes, version and ignored modules are taken; else unused.
        fsdp_wrap: Classes or names of classes; they win over the plugin's.
        default: Where the plugin names none: the model's `_no_split_modules`, which Accelerate takes then.
    """
    plugin = getattr(getattr(training, "state", None), "fsdp_plugin", None)
    by_size = bool(getattr(plugin, "min_num_params", 0))  # wraps that only FSDP itself can tell
    if fsdp_wrap is None and (plugin is None or by_size):
        return None
    classes = fsdp_wrap
    if classes is None:
        classes = getattr(plugin, "transformer_cls_names_to_wrap", None) or default or ()
    ignored = getattr(plugin, "ignored_modules", None) or ()
    return Wrap(
        version=getattr(plugin, "fsdp_version", 1),
        class_names=frozenset(each if isinstance(each, str) else each.__name__ for each in classes),
        ignored=() if isinstance(ignored, str) else tuple(ignored),
        ignored_pattern=ignored if isinstance(ignored, str) else None,
    )


def wrap_findings(model: nn.Module, wrap: Wrap | None, *, ignored: Iterable[nn.Module]) -> list[Finding]:
    """Return a finding for each wrap that would hold more than one dtype.

    Args:
        model: Not wrapped yet, or by FSDP2, whose own wraps are looked at then.
        wrap: As from `wrap_of`; None finds nothing in a model that is not wrapped.
        ignored: The protected towers, which stay out of every wrap.
    """
    if flat_units(model):
        return []  # FSDP1 has flattened it already, so each wrap is of one dtype
    wrapped = fully_sharded(model)
    if wrapped:
        wrap = Wrap(version=2, roots=frozenset(map(id, wrapped)))
    if wrap is None:
        return []
    units: dict[str, dict[str, nn.Parameter]] = {}
    skipped = {id(module) for module in (*ignored, *wrap.ignored)}
    for unit, name, parameter in _walk(model, "", "", wrap, skipped):
        if wrap.version == 1 or parameter.requires_grad:
            units.setdefault(unit, {})[name] = parameter
    rule = MIXED_WRAP if wrap.version == 1 else MIXED_WRAP2
    return [_mixed(rule, unit, held) for unit, held in units.items() if len({p.dtype for p in held.values()}) > 1]


def _walk(
    module: nn.Module, name: str, unit: str, wrap: Wrap, skipped: set[int]
) -> Iterator[tuple[str, str, nn.Parameter]]:
    if id(module) in skipped or (wrap.ignored_pattern and name and re.fullmatch(wrap.ignored_pattern, name)):
        return
    if id(module) in wrap.roots or (name and wrap.class_names.intersection(c.__name__ for c in type(module).__mro__)):
        unit = name
    prefix = f"{name}." if name else ""
    for own, parameter in module.named_parameters(recurse=False):
        yield unit, prefix + own, parameter
    for child_name, child in module.named_children():
        yield from _walk(child, prefix + child_name, unit, wrap, skipped)


def _mixed(rule: Rule, unit: str, held: dict[str, nn.Parameter]) -> Finding:
    """Name the parameters of the dtypes that are rarer in this wrap: those are the ones to look at."""
    elements: dict[str, int] = {}
    for parameter in held.values():
        dtype = str(parameter.dtype).removeprefix("torch.")
        elements[dtype] = elements.get(dtype, 0) + parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype])
    rare = {name: p for name, p in held.items() if str(p.dtype).removeprefix("torch.") != most}
    count = sum(parameter.numel() for parameter in rare.values())
    return finding(rule, module=unit, names=rare, dtype=" + ".join(sorted(elements)), elements=count)
