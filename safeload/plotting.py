"""A bench report as a table of text and as a picture. The picture needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
import io
import statistics
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from safeload.benching import BenchReport
from safeload.errors import SafeLoadError

__all__ = ["bench_picture", "bench_table", "require_plots"]

_MIB: Final = 1024**2
_WIDTH: Final = 100


def bench_table(report: BenchReport) -> str:
    """Return the report as a table of text, with the machine's own limits and what to know below it.

    Args:
        report: What `bench` returned.
    """
    title = (
        f"{report.tower}, {report.tower_bytes / _MIB:.0f} MiB, {report.machine['cores']} cores, "
        f"{report.page_cache} page cache"
    )
    table = Table(title=title)
    for heading in ("way", "ranks", "seconds", "spread", "returned", "cpu", "memory", "at most"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for each in report.measured:
        table.add_row(
            each.way,
            str(each.ranks),
            f"{each.median_s:.3f}",
            f"{min(each.seconds):.3f}-{max(each.seconds):.3f}",
            f"{statistics.median(each.returned_s):.3f}",
            f"{statistics.median(each.cpu_s):.2f}",
            f"{each.pss_bytes / report.tower_bytes:.2f} x",
            f"{each.peak_bytes / report.tower_bytes:.2f} x",
        )
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, no_color=True)
    console.print(table)
    console.print("memory: PSS of all ranks together, in towers as stored; at most: the sum of their peaks.")
    limits = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.limits_s.items())
    console.print(f"This machine's limits, for as many bytes: {limits}.")
    for note in report.notes():
        console.print(note)
    return text.getvalue()


def require_plots(path: Path) -> None:
    """Make sure that a picture can be drawn, before what is to be drawn is measured.

    Args:
        path: Where it is to go.

    Raises:
        SafeLoadError: matplotlib is not installed, there is no such folder, or the name is not that of a PNG.
    """
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise SafeLoadError(f"{path}: expected the name of a PNG, in a folder that there is")
    if importlib.util.find_spec("matplotlib") is None:
        raise SafeLoadError("plots need matplotlib: pip install matplotlib")


def bench_picture(report: BenchReport, path: Path) -> None:
    """Draw time and memory by the number of ranks, a line a way.

    Args:
        report: What `bench` returned.
        path: Where the PNG goes.

    Raises:
        SafeLoadError: As `require_plots`.
    """
    require_plots(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    colors = plt.get_cmap("tab20").colors
    for number, way in enumerate(dict.fromkeys(each.way for each in report.measured)):
        _draw(left, right, report, way, colors[number % len(colors)])
    left.set(xlabel="ranks on this node", ylabel="seconds until every rank has read its tower", ylim=(0, None))
    right.set(xlabel="ranks on this node", ylabel="memory of all ranks, towers", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xticks(sorted({each.ranks for each in report.measured}))
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    figure.suptitle(f"{report.tower}, {report.machine['cores']} cores; {versions}", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(left: Any, right: Any, report: BenchReport, way: str, color: Any) -> None:
    rows = [each for each in report.measured if each.way == way]
    ranks = [each.ranks for each in rows]
    line = "-o" if way.startswith("safeload") else "--x"
    low = [each.median_s - min(each.seconds) for each in rows]
    high = [max(each.seconds) - each.median_s for each in rows]
    medians = [each.median_s for each in rows]
    left.errorbar(ranks, medians, yerr=[low, high], fmt=line, label=way, capsize=2, color=color)
    if way != "sha256":
        right.plot(ranks, [each.pss_bytes / report.tower_bytes for each in rows], line, color=color)
