"""The program `safeload`: options, output and exit status. 0 is good, 1 a check failed, 2 is misuse."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, cast

from safeload.commands import COMMANDS, Command, UsageError
from safeload.errors import SafeLoadError

__all__ = ["build_parser", "main"]

_CHECK_FAILED: Final = 1
_MISUSE: Final = 2
_SIGNALLED: Final = 128  # and the signal's number, as shells have it


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the program with all its commands.

    Returns:
        A parser whose result has the command's module as `command`.
    """
    parser = argparse.ArgumentParser(
        prog="safeload", description="Frozen towers on every rank: read once, verified, sent to all, and left alone."
    )
    parser.add_argument("--version", action="version", version=f"safeload {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = cast("Command", importlib.import_module(f"safeload.commands.{name}"))
        added = command.add_parser(subparsers)
        added.add_argument("--json", action="store_true", help="print one JSON object in place of text")
        added.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; None is the command line's.

    Returns:
        The exit status: 0 good, 1 a check failed, 2 misuse, 130 interrupted.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        with _terminated_by_exception():
            return int(args.command.run(args))
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _MISUSE
    except SafeLoadError as error:
        if _runs_a_script(args):
            raise  # the script's own, with its traceback
        _print_failure(error, as_json=args.json)
        return _CHECK_FAILED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        if _runs_a_script(args):
            raise
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return _SIGNALLED + signal.SIGINT


def _runs_a_script(args: argparse.Namespace) -> bool:
    return bool(getattr(args.command, "RUNS_A_SCRIPT", False))


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that processes and temporary files go with the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(_SIGNALLED + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_failure(error: SafeLoadError, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Any] = {"error": error.to_fields()}
        print(json.dumps(fields, indent=2, default=str))
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _version() -> str:
    try:
        return importlib.metadata.version("safeload")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
