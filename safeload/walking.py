"""Parameters by name, and how to say many of them in few words.

Receives a model; gives rows, one a distinct parameter, and findings that speak of many rows at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from safeload.errors import PrecisionError
from safeload.rewrapping import reshard
from safeload.ruling import Finding, Rule

__all__ = ["ParameterRow", "find", "finding", "is_lazy", "parameter_rows"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a dotted name


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One distinct parameter: its first name, its other names (ties), and itself."""

    name: str
    tied_names: tuple[str, ...]
    parameter: nn.Parameter

    @property
    def dtype(self) -> str:
        """The dtype's name without `torch.`."""
        return str(self.parameter.dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """How many elements; 0 while a lazy parameter has no shape."""
        return 0 if is_lazy(self.parameter) else self.parameter.numel()


def is_lazy(parameter: nn.Parameter) -> bool:
    """Return whether it belongs to a lazy module that has not run yet, so that it has no shape."""
    return bool(nn.parameter.is_lazy(parameter))


def parameter_rows(model: nn.Module) -> list[ParameterRow]:
    """Return a row for each distinct parameter of a model, in order of registration.

    FSDP2 modules that still hold gathered copies give them back first: the copies are not the parameters that train.

    Raises:
        PrecisionError: This is no module.
    """
    if not isinstance(model, nn.Module):
        raise PrecisionError(
            f"model is a {type(model).__name__}: expected an nn.Module.",
            stage="precision",
            parameters={},
            fix="pass the model itself",
        )
    reshard(model)
    names: dict[int, list[str]] = {}
    first: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        first.setdefault(id(parameter), parameter)
    return [
        ParameterRow(name=names[key][0], tied_names=tuple(names[key][1:]), parameter=parameter)
        for key, parameter in first.items()
    ]


def find(rows: Iterable[ParameterRow], rule_of: Callable[[ParameterRow], Rule | None]) -> list[Finding]:
    """Group the rows that break a rule by the highest module in which all parameters share dtype and fate.

    Args:
        rows: Every parameter of the model, also those that break nothing: they end a group.
        rule_of: The rule a row breaks, or None.

    Returns:
        The findings in order of appearance. Layers of a list are one finding, written with `*`.
    """
    rows = list(rows)
    rules = {row.name: rule_of(row) for row in rows}
    fates: dict[str, set[object]] = {}
    for row in rows:
        for prefix in _prefixes(row.name):
            fates.setdefault(prefix, set()).add((row.dtype, row.parameter.requires_grad, rules[row.name]))
    members: dict[tuple[str, str, Rule], list[ParameterRow]] = {}
    for row in rows:
        rule = rules[row.name]
        if rule is not None:
            home = next(prefix for prefix in _prefixes(row.name) if len(fates[prefix]) == 1)
            members.setdefault((_NUMBER.sub("*", home), row.dtype, rule), []).append(row)
    return [
        finding(
            rule, module=module, names=[row.name for row in found], dtype=dtype, elements=sum(r.elements for r in found)
        )
        for (module, dtype, rule), found in members.items()
    ]


def finding(rule: Rule, *, module: str, names: Iterable[str], dtype: str, elements: int) -> Finding:
    """Return a finding of one rule."""
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        module=module,
        parameters=tuple(names),
        dtype=dtype,
        elements=elements,
        reason=rule.reason,
        fix=rule.fix,
    )


def _prefixes(name: str) -> list[str]:
    """The modules a parameter is in, from the root `""` down, and then its own name."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
