"""The demo's result as tables for people."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from safeload.demo_records import DemoResult, LoadRow

__all__ = ["print_result"]

_MIB: Final = 1024**2
_NOTES: Final = (
    "opened: the tower's weight files that the process was seen to open (Python's audit events, safetensors.safe_open) "
    "or had mapped at the end. PSS: the process's share of memory before the load, and its highest while it ran. "
    "sharded, changed: the trainable parameters that are, after training. untouched: the same addresses, Parameter "
    "objects and bytes as before the model was wrapped."
)


def print_result(result: DemoResult, console: Console) -> None:
    """Print what the demo has seen.

    Args:
        result: From `run_demo`.
        console: Where to.
    """
    setting = result.setting
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    tower = f"{setting.tower_class}, {len(setting.reference)} tensors, {_mib(setting.tower_bytes)} MiB"

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False)

    say(f"{result.ranks} ranks on the CPU, in the environment of FSDP training; {versions}")
    say(f"The tower: {escape(tower)}; the outer model's __init__ brings it in.\n")
    say("1. self.vision_tower = tower_class.from_pretrained(path)", "bold")
    console.print(_plain_table(result))
    say("\n2. self.vision_tower = safe_from_pretrained(tower_class, path)", "bold")
    console.print(_safe_table(result))
    say(f"\n3. The same models after {len(result.trained[0].losses)} steps under FSDP2 (fully_shard)", "bold")
    console.print(_training_table(result))
    say(f"\n{_NOTES}", "dim")
    say(_verdict(result))


def _table(*columns: str) -> Table:
    """Make a table without lines that fits 80 columns; only its last column may be folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table


def _plain_table(result: DemoResult) -> Table:
    table = _table("outer model", "rank", "wrong tensors", "opened", "what came of it")
    for row in result.plain:
        wrong = "-" if row.error else f"{_wrong(row)} of {row.tensors}"
        style = "" if row.right else "red"
        table.add_row(row.way, str(row.rank), wrong, _files(row), escape(_outcome(row)), style=style)
    return table


def _outcome(row: LoadRow) -> str:
    if row.error:
        return row.error
    if row.right:
        return "right"
    buffers = f", {len(row.wrong_buffers)} buffers among them" if row.wrong_buffers else ""
    return f"no error{buffers}: {row.example}"


def _safe_table(result: DemoResult) -> Table:
    source = result.report["source_rank"]
    table = _table("outer model", "rank", "wrong tensors", "opened", "PSS, peak in MiB")
    for row in result.safe:
        name = f"{row.rank}, source" if row.rank == source else str(row.rank)
        memory = f"{_mib(row.before_bytes)}, {_mib(row.peak_bytes)}"
        style = "" if row.right else "red"
        table.add_row(row.way, name, f"{_wrong(row)} of {row.tensors}", _files(row), memory, style=style)
    return table


def _training_table(result: DemoResult) -> Table:
    table = _table("outer model", "rank", "sharded", "changed", "loss", "tower")
    for row in result.trained:
        kept = {"addresses": row.same_memory, "Parameters": row.same_objects, "values": row.same_values}
        other = [name for name, same in kept.items() if not same]
        tower = f"other {', '.join(other)}" if other else "untouched"
        losses = f"{row.losses[0]:.2f} to {row.losses[-1]:.2f}"
        parts = (f"{count} of {row.trainable}" for count in (row.sharded, row.changed))
        table.add_row(row.way, str(row.rank), *parts, losses, tower, style="red" if other else "")
    return table


def _verdict(result: DemoResult) -> str:
    wrong = sum(not row.right for row in result.plain)
    first = f"\nPlain from_pretrained on this stack: {wrong} of {len(result.plain)} loads were wrong or failed."
    if not result.passed:
        return f"{first}\n[red]With safeload this did not hold: {'; '.join(result.failed)}.[/]"
    return (
        f"{first}\nWith safeload: none, only rank {result.report['source_rank']} opened the weights, the same images "
        "have the same features on every rank, and training did not touch the tower."
    )


def _wrong(row: LoadRow) -> int:
    return len(row.wrong_parameters) + len(row.wrong_buffers)


def _files(row: LoadRow) -> str:
    return f"{len(row.opened)} file{'' if len(row.opened) == 1 else 's'}"


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / _MIB:.1f}"
