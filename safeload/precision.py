"""The dtype rules of mixed precision, checked before the first step.

Receives a model, the mixed precision it will train with and, where there is one, its optimizer. Gives a
`PrecisionReport`. Promises that a model which passes does not fail with "Attempting to unscale FP16 gradients", and
that nothing of the model is changed by asking.

The rule in one sentence: frozen weights may have any dtype, weights that train are float32, gradients have the dtype of
their weights, and the compute runs in half precision under autocast. The cells are in `ruling.judge`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from safeload.errors import PrecisionError
from safeload.optimizing import optimizer_findings
from safeload.protecting import frozen_towers
from safeload.ruling import Finding, PrecisionReport, Rule, TowerDtype, TrainingMode, judge, read_mode
from safeload.walking import ParameterRow, find, is_lazy, parameter_rows
from safeload.wrapping import wrap_findings, wrap_of

__all__ = ["PrecisionWarning", "check_precision"]

_MOST_GROUPS_IN_A_MESSAGE = 20  # a message stays readable; `PrecisionError.parameters` always has every name


class PrecisionWarning(UserWarning):
    """A model that trains, but loses what it should learn: half-precision master weights and the like."""


def check_precision(
    model: nn.Module,
    mixed_precision: Any = "no",
    *,
    grad_scaler: Any = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    fsdp_wrap: Iterable[str | type[nn.Module]] | None = None,
) -> PrecisionReport:
    """Check the dtype of every parameter against the mixed precision it trains with, before the first step.

    Call it when the optimizer has been built, again after a resume, and after adapters were added.

    Args:
        model: The model to train, wrapped (DDP, FSDP, PEFT, compile) or not.
        mixed_precision: "fp16", "bf16", "fp8" or "no"; a torch dtype; an `accelerate.Accelerator` or a
            `transformers.TrainingArguments`, from which scaler and FSDP settings are read too.
        grad_scaler: The `GradScaler`, or True or False. None: one is expected with "fp16" and none otherwise. A scaler
            that is not enabled counts as none.
        optimizer: When given, its parameters have to be the model's own, and its state of their dtype. A list where
            several train parts of the model.
        fsdp_wrap: Classes, or their names, that FSDP1 is going to wrap; an empty list when only the root is wrapped.
            Each wrap then has to be of one dtype. None: as the accelerator says, else not checked.

    Returns:
        The report, findings first; what is only a warning is in it and is also warned of as `PrecisionWarning`.

    Raises:
        PrecisionError: A trainable parameter breaks a rule. `parameters` names every one of them; frozen towers are not
            among them. Also for a `mixed_precision` that is none of the above.

    Ranks: local, no communication. Ranks that hold the same model get the same answer.
    """
    mode = read_mode(mixed_precision, grad_scaler, model=model, optimizer=optimizer)
    rows = parameter_rows(model)
    towers = frozen_towers(model)
    wrap = wrap_of(mixed_precision, fsdp_wrap, default=getattr(model, "_no_split_modules", None))
    found = _dtype_findings(rows, mode)
    found += wrap_findings(model, wrap, ignored=list(towers.values()))
    if optimizer is not None and not mode.engine_masters:
        found += optimizer_findings(rows, optimizer)
    report = PrecisionReport(
        mixed_precision=mode.mixed_precision,
        scaler=mode.scaler,
        findings=tuple(sorted(found, key=lambda finding: (finding.severity != "error", finding.rule, finding.module))),
        towers=tuple(_tower_dtype(name, tower) for name, tower in towers.items()),
        trainable=_elements_by_dtype(row for row in rows if row.parameter.requires_grad),
        frozen=_elements_by_dtype(row for row in rows if not row.parameter.requires_grad),
    )
    if report.errors:
        raise _error(report)
    if report.warnings:
        warnings.warn(_text("may lose what it learns", report.warnings, report), PrecisionWarning, stacklevel=2)
    return report


def _dtype_findings(rows: list[ParameterRow], mode: TrainingMode) -> list[Finding]:
    def rule_of(row: ParameterRow) -> Rule | None:
        return judge(row.parameter.dtype, trainable=row.parameter.requires_grad, mode=mode, lazy=is_lazy(row.parameter))

    return find(rows, rule_of)


def _elements_by_dtype(rows: Iterable[ParameterRow]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.dtype] = counts.get(row.dtype, 0) + row.elements
    return tuple(sorted(counts.items()))


def _tower_dtype(name: str, tower: nn.Module) -> TowerDtype:
    return TowerDtype(name=name, class_name=type(tower).__name__, dtypes=_elements_by_dtype(parameter_rows(tower)))


def _text(what: str, findings: tuple[Finding, ...], report: PrecisionReport) -> str:
    names = {name for finding in findings for name in finding.parameters}
    scaler = {"none": "no GradScaler", "plain": "a GradScaler", "sharded": "a ShardedGradScaler"}[report.scaler]
    lines = [
        f"This model {what}: {len(names)} parameters under mixed precision {report.mixed_precision!r} with {scaler}."
    ]
    for finding in findings[:_MOST_GROUPS_IN_A_MESSAGE]:
        lines.append(f"  {finding}")
    if len(findings) > _MOST_GROUPS_IN_A_MESSAGE:
        lines.append(f"  ... and {len(findings) - _MOST_GROUPS_IN_A_MESSAGE} more groups")
    lines.append("Expected: float32 for weights that train; frozen weights may stay as they are.")
    lines += [f"To mend it: {fix}" for fix in dict.fromkeys(finding.fix for finding in findings)]
    return "\n".join(lines)


def _error(report: PrecisionReport) -> PrecisionError:
    what = {name: f"{each.rule}: {each.dtype}" for each in reversed(report.errors) for name in each.parameters}
    fixes = list(dict.fromkeys(finding.fix for finding in report.errors))
    return PrecisionError(
        _text("cannot train", report.errors, report), stage="precision", parameters=what, fix="; ".join(fixes)
    )
