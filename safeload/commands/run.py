"""`safeload run`: start a training script, unedited, with `from_pretrained` of some classes made safe."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from safeload.commands import Subparsers, UsageError

__all__ = ["RUNS_A_SCRIPT", "add_parser", "run"]

RUNS_A_SCRIPT = True  # what it raises is not ours to print


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload run`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Runs a script as `python SCRIPT ARGS...` would, in this process, with CLASS.from_pretrained turned into the"
        " safe load wherever the script and the libraries it uses call it. Under a launcher:"
        " torchrun --nproc-per-node 2 -m safeload run --classes CLIPVisionModel train.py ...;"
        " accelerate launch -m safeload run --classes CLIPVisionModel train.py ..."
    )
    parser = subparsers.add_parser("run", help="run a script with from_pretrained made safe", description=text)
    parser.add_argument(
        "--classes",
        metavar="CLASS[,CLASS...]",
        action="append",
        required=True,
        help="classes whose from_pretrained is redirected: CLIPVisionModel, AutoModel, package.module:Class",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or the module's name")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="what the script is given")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the script.

    Args:
        args: Of the parser.

    Returns:
        0 where the script came to its end; what it raises, SystemExit too, goes through.

    Raises:
        UsageError: There is no such script or class.
    """
    from safeload.errors import SafeLoadError
    from safeload.redirecting import find_classes, redirect_from_pretrained

    try:
        classes = find_classes(args.classes)
    except SafeLoadError as error:
        raise UsageError(error.message) from error
    if not args.module and not os.path.exists(args.script):
        raise UsageError(f"there is no script {args.script!r}")
    sys.argv = [args.script, *args.arguments]
    with redirect_from_pretrained(*classes):
        if args.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
            runpy.run_path(args.script, run_name="__main__")
    return 0
