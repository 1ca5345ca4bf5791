"""The subcommands of `safeload`, one module each.

A command's module is light to import, since `safeload --help` imports all of them, and has two functions:

    add_parser(subparsers) -> argparse.ArgumentParser     its name, help text and options
    run(args) -> int                                      0 good, 1 a check failed

`--json` is added to each by `safeload.cli`. A failure of safeload's own kind is raised, not printed: the program prints
it, as text or as JSON, and exits with 1. What only the options' values can tell to be misuse is a `UsageError`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, Protocol

__all__ = ["COMMANDS", "Command", "Subparsers", "UsageError"]

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction

# Modules of this package, in the order of the help text.
COMMANDS: Final = ("demo", "verify", "lock", "inspect", "doctor", "run", "bench")


class UsageError(Exception):
    """The options' values make no sense together; the program says so and exits with 2."""


class Command(Protocol):
    """What a command's module offers."""

    def add_parser(self, subparsers: Subparsers) -> argparse.ArgumentParser:
        """Add the command's own parser and return it."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit status."""
