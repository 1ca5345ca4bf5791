"""`safeload demo`: the same small model with plain `from_pretrained` and with safeload, on several ranks."""

from __future__ import annotations

import argparse
import json
from typing import Final

from safeload.commands import Subparsers

__all__ = ["add_parser", "run"]

_FEWEST_RANKS: Final = 2
_MOST_RANKS: Final = 64


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload demo`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Starts its own ranks on the CPU and builds a small LLaVA-shaped model whose __init__ brings in a vision "
        "tower: first with plain from_pretrained, under the environment that FSDP training sets, then with safeload, "
        "trained for a few steps under FSDP2. Without arguments it makes its own small tower and uses no network."
    )
    parser = subparsers.add_parser("demo", help="see what a nested from_pretrained does on each rank", description=text)
    parser.add_argument(
        "--tower", metavar="PATH_OR_REPO", help="a folder or a repository of the Hub; its own small CLIP tower if not"
    )
    parser.add_argument("--ranks", type=_ranks, default=2, metavar="N", help="number of processes (default: 2)")
    return parser


def _ranks(text: str) -> int:
    try:
        ranks = int(text)
    except ValueError:
        ranks = 0
    if not _FEWEST_RANKS <= ranks <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {_FEWEST_RANKS} to {_MOST_RANKS}")
    return ranks


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its tables, or one JSON object.

    Args:
        args: Of the parser.

    Returns:
        0 where everything that safeload promises held, else 1.
    """
    from rich.console import Console

    from safeload.demo import run_demo
    from safeload.demo_tables import print_result

    progress = Console(stderr=True)
    with progress.status("") as status:
        result = run_demo(tower=args.tower, ranks=args.ranks, on_step=status.update)
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print_result(result, Console())
    return 0 if result.passed else 1
