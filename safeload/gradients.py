"""What the gradients look like: a row a parameter, the sick ones first.

Receives a model after a backward; gives a `GradientReport`, which is written as a table, a dict, JSON or a picture.
Promises one pass over the gradients where they are, with no copy of them, no gather and one wait for the device
(histograms, when asked for, cost a copy of one gradient at a time).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.group import join_group
from safeload.measuring import count_decades, local_gradient, measure_all
from safeload.rewrapping import local_part, whole_shapes
from safeload.walking import ParameterRow, is_lazy, parameter_rows

__all__ = ["GradientReport", "GradientRow", "gradient_report", "merge_reports"]

Health = Literal["not finite", "float16", "none", "all zero", "ok"]
_ORDER: Final[tuple[Health, ...]] = ("not finite", "float16", "none", "all zero", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRow:
    """The gradient of one parameter. Numbers are None where there is no gradient, or no element of it on this rank.

    `elements` are those of the whole gradient, `local_elements` those that were looked at: fewer on a shard.
    `nonfinite` and `zeros` count elements; `histogram` counts magnitudes by decade, as in `measuring.DECADES`.
    """

    name: str
    health: Health
    weight_dtype: str
    gradient_dtype: str | None
    shape: tuple[int, ...]
    elements: int
    local_elements: int
    finite: bool | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    zeros: int = 0
    nonfinite: int = 0
    histogram: tuple[int, ...] | None = None

    @property
    def zero_fraction(self) -> float | None:
        """The share of the elements looked at that are exactly zero."""
        return self.zeros / self.local_elements if self.local_elements else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """The gradients of a model. `ranks`: of how many ranks' shards. `scale`: what the numbers were divided by."""

    rows: tuple[GradientRow, ...]
    ranks: int = 1
    scale: float = 1.0

    @property
    def sick(self) -> tuple[GradientRow, ...]:
        """The rows that are not finite, float16, without a gradient or all zero."""
        return tuple(row for row in self.rows if row.health != "ok")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values; numbers that JSON does not know are text: "nan", "inf", "-inf"."""
        return {"ranks": self.ranks, "scale": self.scale, "rows": [_to_fields(row) for row in self.rows]}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> GradientReport:
        """Return the report that another rank, or another run, wrote with `to_json`."""
        read = json.loads(text)
        return cls(rows=tuple(_from_fields(row) for row in read["rows"]), ranks=read["ranks"], scale=read["scale"])

    def __str__(self) -> str:
        """Return the report as a table."""
        from safeload.picturing import gradient_table

        return gradient_table(self)

    def save_png(self, path: str | Path) -> Path:
        """Write a picture: the share of magnitudes by decade, layer by layer. Needs `histogram=True`.

        Args:
            path: Where to write it.

        Returns:
            The path.

        Raises:
            PrecisionError: The report has no histograms, or matplotlib is not there (`pip install safeload[plots]`).
        """
        from safeload.picturing import gradient_picture

        return gradient_picture(self, Path(path))


def gradient_report(
    model: nn.Module,
    *,
    histogram: bool = False,
    grad_scaler: Any = None,
    group: Any = None,
    timeout: timedelta = timedelta(minutes=10),
) -> GradientReport:
    """Look at the gradients of a model after `backward`, on this rank.

    Args:
        model: Wrapped or not. Of sharded gradients (FSDP1, FSDP2, DTensor) the shard of this rank is looked at.
        histogram: Count magnitudes by decade as well; needs one float32 copy of one gradient at a time.
        grad_scaler: The scaler whose scale the gradients still carry, to show them without it. Leave it out once
            `unscale_` was called (`accelerator.clip_grad_norm_` does).
        group: A process group (`torch.distributed.group.WORLD`) or one-dimensional mesh. Its ranks' reports are put
            together, so that rows speak of whole gradients. None looks at this rank alone.
        timeout: How long the ranks of `group` wait for each other.

    Returns:
        A row for each parameter that requires grad or has a gradient, sick ones first, then by norm.

    Raises:
        SafeLoadError: With `group`, on every rank: another rank failed, was lost, or called something else.

    Ranks: local without `group`, also when other ranks do not call it; with it, called on every rank of the group.
    """
    if group is None:
        return _local_report(model, histogram=histogram, grad_scaler=grad_scaler)
    with join_group(group, timeout=timeout) as ranks:
        ranks.start({"call": "gradient_report"})
        mine = ranks.agree("look", lambda: _local_report(model, histogram=histogram, grad_scaler=grad_scaler))
        return merge_reports(
            GradientReport.from_json(text) for text in ranks.gather_bytes("gradients", mine.to_json().encode())
        )


def _local_report(model: nn.Module, *, histogram: bool, grad_scaler: Any) -> GradientReport:
    rows = [row for row in parameter_rows(model) if row.parameter.requires_grad or row.parameter.grad is not None]
    held = [local_gradient(row.parameter) for row in rows]
    numbers = measure_all(held)
    whole = whole_shapes(model)
    scale = float(grad_scaler.get_scale()) if grad_scaler is not None and grad_scaler.is_enabled() else 1.0
    made = (
        _row(row, whole.get(id(row.parameter), _shape(row)), gradient, values, scale=scale, histogram=histogram)
        for row, gradient, values in zip(rows, held, numbers, strict=True)
    )
    return GradientReport(rows=_sorted(made), scale=scale)


def merge_reports(reports: Iterable[GradientReport]) -> GradientReport:
    """Put the reports of several ranks of one model together.

    Args:
        reports: One a rank. Ranks may hold shards, whole copies, or both; each element has to be held equally often.

    Returns:
        One report, whose rows speak of whole gradients.
    """
    reports = list(reports)
    by_name: dict[str, list[GradientRow]] = {}
    for report in reports:
        for row in report.rows:
            by_name.setdefault(row.name, []).append(row)
    return GradientReport(
        rows=_sorted(_merge(rows) for rows in by_name.values()),
        ranks=sum(report.ranks for report in reports),
        scale=reports[0].scale,
    )


def _shape(row: ParameterRow) -> torch.Size:
    return torch.Size([0]) if is_lazy(row.parameter) else row.parameter.shape


def _row(
    row: ParameterRow,
    whole: torch.Size,
    gradient: torch.Tensor | None,
    numbers: list[float] | None,
    *,
    scale: float,
    histogram: bool,
) -> GradientRow:
    held = row.parameter.grad
    bare = GradientRow(
        name=row.name,
        health="none",
        weight_dtype=row.dtype,
        gradient_dtype=None if held is None else str(held.dtype).removeprefix("torch."),
        shape=tuple(whole),
        elements=whole.numel(),
        local_elements=0,
    )
    if gradient is None or numbers is None:
        return bare if held is None else replace(bare, health=_health(bare))
    low, high, norm, nonzeros = numbers
    dense = local_part(held).numel() if held is not None else 0  # a sparse gradient counts what it leaves out as zeros
    finite = math.isfinite(low) and math.isfinite(high)
    full = replace(
        bare,
        local_elements=dense,
        finite=finite,
        min=low / scale,
        max=high / scale,
        norm=norm / scale,
        zeros=max(dense - int(nonzeros), 0),
        nonfinite=0 if finite else int((~torch.isfinite(gradient)).sum()),
        histogram=count_decades(gradient, scale) if histogram else None,
    )
    return replace(full, health=_health(full))


def _health(row: GradientRow) -> Health:
    if row.finite is False:
        return "not finite"
    if row.gradient_dtype == "float16":
        return "float16"
    if row.gradient_dtype is None:
        return "none"
    return "all zero" if row.local_elements and row.zeros == row.local_elements else "ok"


def _merge(rows: list[GradientRow]) -> GradientRow:
    seen = [row for row in rows if row.finite is not None]
    if not seen:
        return rows[0]
    looked_at = sum(row.local_elements for row in seen)
    # held by several ranks, each element counts as often: the sum of squares is taken once
    share = min(rows[0].elements / looked_at, 1.0) if looked_at else 1.0
    histograms = [row.histogram for row in seen if row.histogram is not None]
    merged = replace(
        seen[0],
        local_elements=looked_at,
        finite=all(row.finite for row in seen),
        min=_extreme(min, [row.min for row in seen]),
        max=_extreme(max, [row.max for row in seen]),
        norm=math.sqrt(sum((row.norm or 0.0) ** 2 for row in seen) * share),
        zeros=sum(row.zeros for row in seen),
        nonfinite=sum(row.nonfinite for row in seen),
        histogram=tuple(map(sum, zip(*histograms, strict=True))) if histograms else None,
    )
    return replace(merged, health=_health(merged))


def _extreme(pick: Callable[[list[float]], float], values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.nan if any(math.isnan(value) for value in known) else pick(known)


def _sorted(rows: Iterable[GradientRow]) -> tuple[GradientRow, ...]:
    return tuple(sorted(rows, key=lambda row: (_ORDER.index(row.health), -(row.norm or 0.0), row.name)))


_NUMBERS: Final = ("min", "max", "norm")


def _to_fields(row: GradientRow) -> dict[str, Any]:
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    for name in _NUMBERS:
        if values[name] is not None and not math.isfinite(values[name]):
            values[name] = str(values[name])
    return {**values, "zero_fraction": row.zero_fraction}


def _from_fields(values: dict[str, Any]) -> GradientRow:
    known = {each.name: values[each.name] for each in fields(GradientRow)}
    known |= {name: None if known[name] is None else float(known[name]) for name in _NUMBERS}
    histogram = known["histogram"]
    return GradientRow(
        **{**known, "shape": tuple(known["shape"]), "histogram": None if histogram is None else tuple(histogram)}
    )
