"""`safeload lock`: write the digests of a checkpoint's files, to pin them."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings

from safeload.commands import Subparsers
from safeload.commands._where import add_where, shown_progress, where_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload lock`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Writes SHA256SUMS, which sha256sum -c reads too, for the files that a load opens. The bytes are verified "
        "first, with the Hub where it knows them; where nobody vouches for them that is said. Pass the lock as "
        "manifest=, and its own sha256 as manifest_sha256=, or keep it beside the files."
    )
    parser = subparsers.add_parser("lock", help="write a lock for a checkpoint", description=text)
    add_where(parser)
    parser.add_argument("--output", metavar="FILE", help="default: SHA256SUMS in the folder, or here for a repository")
    parser.add_argument("--force", action="store_true", help="replace a lock that is there")
    parser.add_argument("--allow-pickle", action="store_true", help="lock .bin weights where there are no others")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the lock and print where, and its own digest.

    Args:
        args: Of the parser.

    Returns:
        0; every failure is raised.
    """
    from safeload.auditing import write_lock
    from safeload.verifying import UnverifiedWarning

    with warnings.catch_warnings(record=True) as caught, shown_progress(f"{args.path_or_repo}: lock") as on_bytes:
        warnings.simplefilter("always")
        path = write_lock(
            args.path_or_repo,
            args.output,
            force=args.force,
            allow_pickle=args.allow_pickle,
            on_bytes=on_bytes,
            **where_of(args),
        )
    raw = path.read_bytes()
    first_use = any(issubclass(warning.category, UnverifiedWarning) for warning in caught)
    for warning in caught:
        print(f"WARNING: {warning.message}", file=sys.stderr)
    sha256 = hashlib.sha256(raw).hexdigest()
    if args.json:
        print(json.dumps({"path": str(path), "sha256": sha256, "trust_on_first_use": first_use}, indent=2))
    else:
        print(f"{path}\nmanifest_sha256={sha256}")
    return 0
