"""The demo's result as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from safeload.demo_records import DemoResult, LoadRow, TrainRow

__all__ = ["print_result"]

_MIB: Final = 1024**2
_WATCHED: Final = (
    "A file counts as opened if the process was seen to open it (Python's audit events, safetensors.safe_open) or had "
    "it mapped at the end."
)


def print_result(result: DemoResult, console: Console) -> None:
    """Print what the demo has seen.

    Args:
        result: From `run_demo`.
        console: Where to.
    """
    setting = result.setting
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    console.print(f"[bold]safeload demo[/]: {result.ranks} ranks on the CPU; {versions}", highlight=False)
    what = f"{setting.tower_class}, {len(setting.reference)} tensors, {_mib(setting.tower_bytes)}"
    console.print(f"Tower: {escape(what)}, brought in by the model's __init__\n", highlight=False)
    console.print(_plain_table(result.plain))
    console.print(_WATCHED + "\n", style="dim", highlight=False)
    console.print(_safe_table(result))
    console.print(_training_table(result.trained))
    console.print(_verdict(result), highlight=False)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain_table(rows: Sequence[LoadRow]) -> Table:
    table = _table(
        "1. self.vision_tower = tower_class.from_pretrained(path), with the environment of FSDP training",
        ["outer model made by", "rank", "wrong tensors", "opened", "what came of it"],
    )
    for row in rows:
        wrong = "-" if row.error else _wrong(row)
        table.add_row(row.way, str(row.rank), wrong, _files(row.opened), escape(_outcome(row)), style=_style(row.right))
    return table


def _wrong(row: LoadRow) -> str:
    buffers = f", {_count(row.wrong_buffers, 'buffer')}" if row.wrong_buffers else ""
    return f"{len(row.wrong_parameters) + len(row.wrong_buffers)} of {row.tensors}{buffers}"


def _outcome(row: LoadRow) -> str:
    if row.error:
        return row.error
    return "right" if row.right else f"wrong values, no error: {row.example}"


def _safe_table(result: DemoResult) -> Table:
    source = result.report["source_rank"]
    table = _table(
        "2. self.vision_tower = safe_from_pretrained(tower_class, path), in the same environment",
        ["outer model made by", "rank", "equal tensors", "opened", "memory of the load (PSS)"],
    )
    memory = {row.rank: f"{_mib(row.before_bytes)}, at most {_mib(row.peak_bytes)}" for row in result.trained}
    last = result.safe[-1].way  # the report is that of the last load
    for row in result.safe:
        equal = row.tensors - len(row.wrong_parameters) - len(row.wrong_buffers)
        name = f"{row.rank} (source)" if row.rank == source else str(row.rank)
        told = memory[row.rank] if row.way == last else ""
        table.add_row(row.way, name, f"{equal} of {row.tensors}", _files(row.opened), told, style=_style(row.right))
    return table


def _training_table(rows: Sequence[TrainRow]) -> Table:
    table = _table(
        f"3. The latter under FSDP2, after {len(rows[0].losses)} steps",
        ["rank", "loss", "tower: memory, Parameters, values", "trainable: sharded, changed", "memory"],
    )
    for row in rows:
        tower = ", ".join(
            "same" if same else "CHANGED" for same in (row.same_memory, row.same_objects, row.same_values)
        )
        trained = f"{row.sharded} and {row.changed} of {row.trainable}"
        losses = " ".join(f"{loss:.2f}" for loss in row.losses)
        table.add_row(str(row.rank), losses, tower, trained, _mib(row.trained_bytes), style=_style(row.untouched))
    return table


def _verdict(result: DemoResult) -> str:
    wrong = sum(not row.right for row in result.plain)
    first = f"Plain from_pretrained here: {wrong} of {len(result.plain)} loads wrong or failed."
    if result.passed:
        report = result.report
        return f"{first} With safeload: none; sha256 {report['digest']}, checked against: {report['provenance']}."
    return f"{first}\n[red]With safeload this did not hold: {'; '.join(result.failed)}.[/]"


def _style(good: bool) -> str:
    return "" if good else "red"


def _files(names: Sequence[str]) -> str:
    return _count(names, "file")


def _count(things: Sequence[str], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / _MIB:.1f} MiB"
