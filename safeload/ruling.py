"""The table of the rules: dtype of the weight, frozen or not, mixed precision, gradient scaler.

Receives one dtype and the way the model trains; gives the `Rule` that is broken, or None. The records of the answer are
here as well. Knows nothing of models, so that every cell of the table can be tested.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.errors import PrecisionError

__all__ = ["Finding", "PrecisionReport", "Rule", "TowerDtype", "TrainingMode", "judge", "read_mode"]

Severity = Literal["error", "warning"]
UPCAST: Final = (
    "safeload.upcast_trainable(model) after adapters are added or a checkpoint is loaded, best before the optimizer is"
    " built and the model is wrapped"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to break mixed precision: what goes wrong, and the call that mends it."""

    id: str
    severity: Severity
    reason: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """How the model trains. `engine_masters`: an engine (DeepSpeed) keeps float32 master weights of its own."""

    mixed_precision: Literal["fp16", "bf16", "fp8", "no"]
    scaler: Literal["none", "plain", "sharded"]
    engine_masters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Parameters of one module that break one rule. `module` has `*` where layers of a list share it."""

    rule: str
    severity: Severity
    module: str
    parameters: tuple[str, ...]
    dtype: str
    elements: int
    reason: str
    fix: str

    def __str__(self) -> str:
        """Return one line: where, dtype, count, and what goes wrong."""
        where = self.module or "the whole model"
        count = (
            f"{len(self.parameters)} parameter{'s' if len(self.parameters) != 1 else ''}, {self.elements:,} elements"
        )
        return f"{where}: {self.dtype}, {count} [{self.rule}]: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerDtype:
    """A frozen tower and how many elements it holds of each dtype. Always fine."""

    name: str
    class_name: str
    dtypes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """What `check_precision` saw. Errors come first in `findings`; elements are counted by dtype."""

    mixed_precision: str
    scaler: Literal["none", "plain", "sharded"]
    findings: tuple[Finding, ...]
    towers: tuple[TowerDtype, ...]
    trainable: tuple[tuple[str, int], ...]
    frozen: tuple[tuple[str, int], ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stop training."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with which training goes on, but learns less."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """Return the report as a table."""
        return _table(self)


def _table(report: PrecisionReport) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"mixed precision {report.mixed_precision}, scaler {report.scaler}")
    for heading in ("", "where", "dtype", "elements", "what"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        where = finding.module or "the whole model"
        table.add_row(finding.severity, where, finding.dtype, f"{finding.elements:,}", finding.reason)
    for tower in report.towers:
        for dtype, elements in tower.dtypes:
            table.add_row("ok", tower.name, dtype, f"{elements:,}", f"frozen tower, {tower.class_name}")
    for what, counts in (("trains", report.trainable), ("frozen", report.frozen)):
        for dtype, elements in counts:
            table.add_row(
                "", f"all that is {what}" if what == "frozen" else "all that trains", dtype, f"{elements:,}", ""
            )
    text = io.StringIO()
    Console(file=text, width=120, no_color=True).print(table)
    return text.getvalue()


FP16_UNDER_SCALER: Final = Rule(
    id="fp16-under-scaler",
    severity="error",
    reason='its gradients are float16, and the GradScaler refuses those: "Attempting to unscale FP16 gradients"',
    fix=UPCAST,
)
HALF_MASTER: Final = Rule(
    id="half-master-weights",
    severity="warning",
    reason="the optimizer updates the half-precision weight itself, and an update that is too small "
    "beside it (below about 1/512 of a bfloat16 weight, 1/4096 of a float16 one) is rounded away",
    fix=UPCAST,
)
UNTRAINABLE: Final = Rule(
    id="untrainable-dtype",
    severity="error",
    reason="no optimizer can update a weight of this dtype, yet it requires grad",
    fix="parameter.requires_grad_(False), or dequantise it to float32 before training",
)
UNINITIALISED: Final = Rule(
    id="uninitialised",
    severity="warning",
    reason="a lazy module that has not run yet: what dtype it will train in is not known",
    fix="run one forward, then check_precision again",
)
_FULL: Final = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_HALF: Final = {torch.float16, torch.bfloat16}


def judge(dtype: torch.dtype, *, trainable: bool, mode: TrainingMode, lazy: bool = False) -> Rule | None:
    """Return the rule that a weight of this dtype breaks, or None.

    Args:
        dtype: Of the weight.
        trainable: Whether it requires grad. A frozen weight is fine in every dtype.
        mode: How the model trains.
        lazy: Whether the weight is of a lazy module that has not run yet.
    """
    if not trainable:
        return None
    if lazy:
        return UNINITIALISED
    if dtype in _FULL or (dtype in _HALF and mode.engine_masters):
        return None
    if dtype not in _HALF:
        return UNTRAINABLE
    if dtype is torch.float16 and mode.scaler == "plain":
        return FP16_UNDER_SCALER
    return HALF_MASTER


_WORDS: Final[dict[str, Literal["fp16", "bf16", "fp8", "no"]]] = {
    **dict.fromkeys(("fp16", "float16", "16", "16-mixed", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
    "fp8": "fp8",
    # Lightning's "true" precisions run without autocast and without a scaler
    **dict.fromkeys(("no", "none", "fp32", "float32", "32", "32-true", "16-true", "bf16-true"), "no"),
}


def read_mode(
    mixed_precision: Any, grad_scaler: Any, *, model: nn.Module | None = None, optimizer: Any = None
) -> TrainingMode:
    """Read how a model trains out of what the caller has at hand.

    Args:
        mixed_precision: A word, a torch dtype, an `Accelerator` or `TrainingArguments`.
        grad_scaler: A scaler, True, False or None.
        model: Looked at for an engine that keeps master weights.
        optimizer: Looked at for the scaler that Accelerate gave it.

    Returns:
        The mode.

    Raises:
        PrecisionError: `mixed_precision` is none of these.
    """
    word = _read_word(mixed_precision)
    engine = "DEEPSPEED" in str(getattr(mixed_precision, "distributed_type", "")) or _is_engine(model)
    engine = engine or bool(getattr(mixed_precision, "deepspeed", None))  # TrainingArguments
    if grad_scaler is None:
        first = optimizer[0] if isinstance(optimizer, (list, tuple)) and optimizer else optimizer
        grad_scaler = getattr(mixed_precision, "scaler", None) or getattr(first, "scaler", None)
    if grad_scaler is None:
        grad_scaler = word == "fp16" and not engine
    return TrainingMode(mixed_precision=word, scaler=_scaler_kind(grad_scaler), engine_masters=engine)


def _read_word(mixed_precision: Any) -> Literal["fp16", "bf16", "fp8", "no"]:
    said = mixed_precision
    if hasattr(said, "mixed_precision"):  # Accelerator; and TrainingArguments of transformers 5, where "no" may be None
        said = said.mixed_precision or "no"
    elif hasattr(said, "fp16") and hasattr(said, "bf16"):
        said = "fp16" if said.fp16 else "bf16" if said.bf16 else "no"
    word = "no" if said is None else str(said).removeprefix("torch.").lower()
    if word not in _WORDS:
        expected = ", ".join(_WORDS)
        raise PrecisionError(
            f"mixed_precision={mixed_precision!r} is not a mixed precision. Expected one of {expected}, a torch dtype,"
            " an accelerate.Accelerator or a transformers.TrainingArguments.",
            stage="precision",
            parameters={},
            fix='mixed_precision="fp16", "bf16" or "no"',
        )
    return _WORDS[word]


def _scaler_kind(grad_scaler: Any) -> Literal["none", "plain", "sharded"]:
    if isinstance(grad_scaler, bool):
        return "plain" if grad_scaler else "none"
    if not grad_scaler.is_enabled():
        return "none"
    # FSDP1's scaler unscales float16 gradients without complaint
    return "sharded" if "ShardedGradScaler" in _class_names(grad_scaler) else "plain"


def _is_engine(model: nn.Module | None) -> bool:
    return model is not None and "DeepSpeedEngine" in _class_names(model)


def _class_names(value: object) -> Iterable[str]:
    return [cls.__name__ for cls in type(value).__mro__]
