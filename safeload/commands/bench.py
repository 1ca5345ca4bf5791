"""`safeload bench`: what it costs on this machine, against the usual ways."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from safeload.commands import Subparsers

__all__ = ["add_parser", "run"]

_DEFAULT_RANKS: Final = (1, 2, 4)
_DEFAULT_AGAINST: Final = (
    "sha256",
    "from_pretrained",
    "broadcast-async",
    "tensorizer-verified",
    "safeload",
    "safeload-mapped",
)
_ALL: Final = "all"
_SIZES: Final = ("0.01B", "0.3B", "1B", "6B")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload bench`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Starts its own ranks on the CPU and loads a tower by several ways in turn, again and again, so that all of "
        "them meet the same machine. Prints seconds from a barrier until every rank has read every page of its tower, "
        "and the memory of all ranks together. Only ratios within one run carry over to another machine. What each way "
        "loads is compared with from_pretrained once. --cold drops the files from the page cache before each load, by "
        "posix_fadvise, which needs no root, and says how many pages stayed; the disk's own cache is out of reach."
    )
    parser = subparsers.add_parser("bench", help="measure loads here, against the usual ways", description=text)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tower", metavar="PATH_OR_REPO", help="a folder with config.json and safetensors, or a repository"
    )
    which.add_argument("--size", choices=_SIZES, default="0.3B", help="make a tower of this size (default: 0.3B)")
    parser.add_argument("--ranks", type=_ranks, default=_DEFAULT_RANKS, metavar="1,2,4", help="numbers of processes")
    parser.add_argument(
        "--against",
        type=_names,
        metavar="NAME,...",
        help=f"the ways to compare in turn, or {_ALL}; a wrong name lists them; default: {','.join(_DEFAULT_AGAINST)}",
    )
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    parser.add_argument("--rounds", type=_rounds, default=5, metavar="N", help="how often each way runs (default: 5)")
    parser.add_argument("--work", metavar="FOLDER", help="where made towers stay; a temporary folder if not")
    parser.add_argument("--plot", metavar="PNG", help="draw time and memory by ranks")
    return parser


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks such as 1,2,4")
    return ranks


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 up")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table, or one JSON object.

    Args:
        args: Of the parser.

    Returns:
        0; every failure is raised.
    """
    from safeload.benching import WAYS, bench, choose_ways
    from safeload.plotting import bench_picture, bench_table, require_plots

    chosen = args.against or _DEFAULT_AGAINST
    by_name = args.against is not None and chosen != (_ALL,)
    choose_ways(WAYS if chosen == (_ALL,) else chosen, optional=not by_name)  # before anything is made or measured
    if args.plot:
        require_plots(Path(args.plot))
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as temporary:
        work = Path(args.work or temporary)
        folder = _folder_of(args, work)
        report = bench(
            folder,
            ways=WAYS if chosen == (_ALL,) else chosen,
            ranks=args.ranks,
            rounds=args.rounds,
            work=work / "cache",
            cold=args.cold,
            optional=not by_name,
        )
    print(report.to_json() if args.json else bench_table(report), end="\n" if args.json else "")
    if args.plot:
        bench_picture(report, Path(args.plot))
    return 0


def _folder_of(args: argparse.Namespace, work: Path) -> Path:
    """Return the tower's folder: made, the caller's own, or what the Hub's client keeps of a repository."""
    from safeload.making import make_tower
    from safeload.resolving import resolve

    if args.tower is None:
        return make_tower(work, args.size)
    folder = Path(args.tower)
    return folder if folder.is_dir() else resolve(args.tower).folder
