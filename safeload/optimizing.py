"""An optimizer against the model it is to train: the same parameters, and state of their dtype.

Receives the rows of a model and its optimizer; gives findings. Reads, never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from safeload.ruling import Finding, Rule
from safeload.walking import ParameterRow, find, finding, is_lazy

__all__ = ["each_of", "is_moment", "narrow_moments", "optimizer_findings"]

_REBUILD: Final = "build the optimizer from model.parameters() once more, after adapters, wrapping and .to()"
STALE: Final = Rule(
    id="optimizer-stale",
    severity="error",
    reason="the optimizer holds a parameter that is no longer the model's: its steps change nothing in the model",
    fix=_REBUILD,
)
FOREIGN: Final = Rule(
    id="optimizer-foreign",
    severity="warning",
    reason="the optimizer trains a parameter outside this model, which this check cannot judge further",
    fix="nothing, where that is meant; else " + _REBUILD,
)
MISSED: Final = Rule(
    id="optimizer-misses",
    severity="warning",
    reason="it requires grad, but no group of the optimizer holds it, so it never trains",
    fix="optimizer.add_param_group({'params': [...]}) for parameters made later, or requires_grad_(False); else "
    + _REBUILD,
)
STATE: Final = Rule(
    id="optimizer-state-dtype",
    severity="error",
    reason="the optimizer's moments are still of the dtype the weight had before, and torch.optim refuses the mixture",
    fix="safeload.upcast_trainable(model, optimizer=optimizer), which casts them too",
)


def optimizer_findings(rows: Iterable[ParameterRow], optimizer: Any) -> list[Finding]:
    """Compare an optimizer's parameters and state with a model's.

    Args:
        rows: Every parameter of the model.
        optimizer: A torch optimizer, or a wrapper with `param_groups` and `state`; or a list of those.

    Returns:
        Parameters that are foreign, missed, or whose state is of another dtype.
    """
    rows = list(rows)
    own = {id(row.parameter) for row in rows}
    held = {id(parameter) for _, parameter in _held(optimizer)}
    missed = [row for row in rows if row.parameter.requires_grad and id(row.parameter) not in held]
    lost_shapes = [tuple(row.parameter.shape) for row in missed if not is_lazy(row.parameter)]
    found = []
    for where, parameter in _held(optimizer):
        if id(parameter) in own:
            continue
        # one of the model's own that was replaced leaves a gap of its shape behind; a parameter that was always
        # outside (a learnable temperature of the loss) does not
        rule = FOREIGN
        if tuple(parameter.shape) in lost_shapes:
            lost_shapes.remove(tuple(parameter.shape))
            rule = STALE
        dtype = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
        found.append(finding(rule, module=where, names=[where], dtype=dtype, elements=parameter.numel()))
    missing = {id(row.parameter) for row in missed}
    found += find(rows, lambda row: MISSED if id(row.parameter) in missing else None)
    narrow = narrow_moments(optimizer)
    found += find(rows, lambda row: STATE if id(row.parameter) in narrow else None)
    return found


def narrow_moments(optimizer: Any) -> set[int]:
    """Return the ids of parameters whose moments have a narrower dtype than they have.

    Args:
        optimizer: As for `optimizer_findings`. Only the optimizers of `torch.optim` are looked at: others keep narrow
            moments on purpose.
    """
    narrow: set[int] = set()
    for inner in (getattr(each, "optimizer", each) for each in each_of(optimizer)):  # what Accelerate's wrapper holds
        if type(inner).__module__.startswith("torch.optim"):
            narrow |= {id(parameter) for parameter, state in inner.state.items() if _is_narrower(state, parameter)}
    return narrow


def _is_narrower(state: Any, parameter: torch.Tensor) -> bool:
    values = state.values() if isinstance(state, dict) else ()
    return any(is_moment(value, parameter) and value.dtype.itemsize < parameter.dtype.itemsize for value in values)


def is_moment(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value of an optimizer's state goes with the parameter element by element."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() > 0
        and value.shape == parameter.shape
    )


def each_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that were given: one, or a list of those that train parts of a model."""
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _held(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    several = isinstance(optimizer, (list, tuple))
    for number, each in enumerate(each_of(optimizer)):
        which = f"optimizer[{number}]" if several else "optimizer"
        for index, group in enumerate(each.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"{which}.param_groups[{index}]['params'][{position}]", parameter
