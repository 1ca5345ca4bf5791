"""`safeload inspect`: what is in a checkpoint, who vouches for it, and what a class would take of it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from safeload.commands import Subparsers
from safeload.commands._where import add_where, shown_progress, where_of

if TYPE_CHECKING:
    from safeload.auditing import Inspection
    from safeload.inspecting import Fit

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload inspect`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Lists the files that a load would open with their sizes and digests, and the tensors in them, without loading "
        "anything. With --model-class that class's own loader is asked what it would take."
    )
    parser = subparsers.add_parser("inspect", help="list files and tensors of a checkpoint", description=text)
    add_where(parser)
    parser.add_argument("--model-class", metavar="CLASS", help="CLIPVisionModel, or package.module.Class")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only sums by dtype")
    return parser


def run(args: argparse.Namespace) -> int:
    """Inspect, and print tables or one JSON object.

    Args:
        args: Of the parser.

    Returns:
        0; 1 where the class named does not fit.
    """
    from safeload.auditing import inspect_checkpoint

    with shown_progress(f"{args.path_or_repo}: inspect") as on_bytes:
        found = inspect_checkpoint(args.path_or_repo, on_bytes=on_bytes, **where_of(args))
    fit = _fit(args) if args.model_class else None
    if args.json:
        print(json.dumps(_to_fields(found, fit), indent=2))
    else:
        _print_tables(found, fit, every=args.tensors)
    return 1 if fit is not None and fit.error else 0


def _fit(args: argparse.Namespace) -> Fit:
    from safeload.inspecting import find_class, fit_class

    return fit_class(find_class(args.model_class), args.path_or_repo, **where_of(args))


def _to_fields(found: Inspection, fit: Fit | None) -> dict[str, Any]:
    return {
        "origin": found.checkpoint.origin,
        "commit": found.checkpoint.commit,
        "verification": found.verification.to_fields(),
        "files": [
            {"name": file.name, "size_bytes": file.size_bytes, "link": file.link, **file.digests}
            for file in found.files
        ],
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "size_bytes": tensor.size_bytes}
            for tensor in found.contents.tensors
        ],
        "fit": fit.to_fields() if fit else None,
    }


def _print_tables(found: Inspection, fit: Fit | None, *, every: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    files = Table("file", "bytes", "sha256", "verified", box=box.SIMPLE)
    for file in found.files:
        by = found.verification.provenance if file.name in found.verification.checked else "by nobody"
        files.add_row(file.name, f"{file.size_bytes:,}", file.sha256, by)
    console.print(files)
    tensors = found.contents.tensors
    if every:
        table = Table("tensor", "dtype", "shape", "bytes", box=box.SIMPLE)
        for tensor in tensors:
            table.add_row(tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)), f"{tensor.size_bytes:,}")
    else:
        table = Table("dtype", "tensors", "bytes", box=box.SIMPLE)
        for dtype, count in sorted(Counter(tensor.dtype for tensor in tensors).items()):
            size_bytes = sum(tensor.size_bytes for tensor in tensors if tensor.dtype == dtype)
            table.add_row(dtype, f"{count:,}", f"{size_bytes:,}")
    console.print(table)
    if fit is not None:
        good = f"{fit.model_class} takes it whole: {fit.parameters:,} parameters."
        console.print(fit.error or good, markup=False, highlight=False)
