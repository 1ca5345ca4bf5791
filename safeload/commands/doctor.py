"""`safeload doctor`: what will go wrong with a frozen tower or with precision, by a training's configuration."""

from __future__ import annotations

import argparse

from safeload.commands import Subparsers, UsageError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload doctor`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Reads an Accelerate config, TrainingArguments as JSON or YAML, or a DeepSpeed JSON, and names what will go"
        " wrong with a frozen tower or with mixed precision, and the line to change. Runs nothing of it. Exit status 1"
        " where there is an error; warnings alone are 0."
    )
    parser = subparsers.add_parser("doctor", help="what a training's configuration will do wrong", description=text)
    parser.add_argument("config", metavar="TRAINING_CONFIG", help="the file that training is started with")
    parser.add_argument(
        "--model", metavar="PATH_OR_REPO", help="the model that trains: its stored dtypes are looked at as well"
    )
    parser.add_argument(
        "--protected",
        action="store_true",
        help="the towers are loaded by safe_from_pretrained: leave out what that prevents",
    )
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    return parser


def run(args: argparse.Namespace) -> int:
    """Diagnose, and print the findings.

    Args:
        args: Of the parser.

    Returns:
        0 where nothing will go wrong, else 1.

    Raises:
        UsageError: The file or the model cannot be read.
    """
    from safeload.diagnosing import diagnose
    from safeload.errors import CheckpointError, SourceError
    from safeload.peeking import read_model
    from safeload.translating import read_setup

    try:
        setup = read_setup(args.config)
        model = read_model(args.model) if args.model else None
    except (SourceError, CheckpointError) as error:
        raise UsageError(str(error)) from error
    diagnosis = diagnose(setup, model, protected=args.protected)
    print(diagnosis.to_json() if args.json else diagnosis)
    return 1 if not diagnosis.healthy or (args.strict and diagnosis.findings) else 0
