"""A gradient report as a table and as a picture.

Receives a `GradientReport`; gives text, or writes a PNG. The picture needs matplotlib, which is an extra.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from safeload.errors import PrecisionError
from safeload.gradients import GradientReport, GradientRow
from safeload.measuring import DECADES

__all__ = ["gradient_picture", "gradient_table"]

_MOST_LAYERS: Final = 60  # what a picture of a screen's height can show
_FLOAT16_RANGE: Final = (-7.22, 4.82)  # log10 of its smallest and of its largest magnitude
_HEADINGS: Final = ("parameter", "health", "weight", "gradient", "shape", "finite", "min", "max", "norm", "zeros")


def gradient_table(report: GradientReport) -> str:
    """Return the rows of a report as a table of text, sick ones first."""
    of = "this rank" if report.ranks == 1 else f"{report.ranks} ranks"
    without = "" if report.scale == 1.0 else f", without the scale of {report.scale:g}"
    table = Table(title=f"gradients of {of}{without}: {len(report.sick)} of {len(report.rows)} need a look")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold", no_wrap=heading not in {"parameter", "shape"})
    for row in report.rows:
        table.add_row(*_cells(row), style=None if row.health == "ok" else "bold red")
    text = io.StringIO()
    Console(file=text, width=140, no_color=True).print(table)
    return text.getvalue()


def _cells(row: GradientRow) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    piece = "" if row.local_elements in (0, row.elements) else f" {row.local_elements}/{row.elements} here"
    finite = {None: "-", True: "yes", False: f"no ({row.nonfinite})"}[row.finite]
    zeros = "-" if row.zero_fraction is None else f"{row.zero_fraction:.1%}"
    return [
        row.name,
        row.health,
        row.weight_dtype,
        row.gradient_dtype or "-",
        str(list(row.shape)) + piece,
        finite,
        number(row.min),
        number(row.max),
        number(row.norm),
        zeros,
    ]


def gradient_picture(report: GradientReport, path: Path) -> Path:
    """Write a picture of the magnitudes by decade, a line a layer, with the range of float16 marked.

    Args:
        report: Made with `histogram=True`.
        path: Where to write the PNG.

    Returns:
        The path.

    Raises:
        PrecisionError: No histogram in the report, or no matplotlib.
    """
    layers = _by_layer(report)
    if not layers:
        raise PrecisionError(
            "This report has no histograms to draw. Call gradient_report(model, histogram=True) after a backward.",
            stage="precision",
            parameters={},
            fix="gradient_report(model, histogram=True)",
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PrecisionError(
            f"A picture needs matplotlib, which {sys.executable} does not have: pip install 'safeload[plots]'.",
            stage="precision",
            parameters={},
            fix="pip install 'safeload[plots]'",
        ) from error
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, layers, sick={_layer(row.name) for row in report.rows if row.health == "not finite"})
    figure.savefig(path, format="png", dpi=120)
    return path


def _draw(figure: Any, layers: dict[str, list[int]], *, sick: set[str]) -> None:
    axes = figure.subplots()
    shares = [[count / max(sum(counts), 1) for count in counts] for counts in layers.values()]
    image = axes.imshow(
        shares,
        aspect="auto",
        cmap="viridis",
        extent=(DECADES.start, DECADES.stop, len(layers), 0),
        interpolation="none",
    )
    for limit in _FLOAT16_RANGE:
        axes.axvline(limit, color="red", linestyle="--", linewidth=1)
    axes.set_yticks([position + 0.5 for position in range(len(layers))], list(layers), fontsize=7)
    for label, name in zip(axes.get_yticklabels(), layers, strict=True):
        label.set_color("red" if name in sick else "black")
    axes.set_xticks(list(DECADES)[::2], [f"1e{decade}" for decade in list(DECADES)[::2]], fontsize=7)
    axes.set_title("gradient magnitudes by layer; dashed: what float16 can hold", fontsize=9)
    figure.colorbar(image, label="share of elements")


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def _by_layer(report: GradientReport) -> dict[str, list[int]]:
    """Add up the histograms of a layer's parameters; where there are too many layers, those of a common parent."""
    found = [(_layer(row.name), row.histogram) for row in report.rows if row.histogram is not None]
    depth = max((layer.count(".") + 1 for layer, _ in found), default=0)
    while True:
        layers: dict[str, list[int]] = {}
        for layer, histogram in sorted(found, key=lambda each: _natural(each[0])):
            key = ".".join(layer.split(".")[:depth])
            layers[key] = [a + b for a, b in zip(layers.get(key, [0] * len(DECADES)), histogram, strict=True)]
        if len(layers) <= _MOST_LAYERS or depth <= 1:
            return layers
        depth -= 1


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
