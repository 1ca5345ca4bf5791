"""`safeload verify`: are the files of a checkpoint what they should be?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from safeload.commands import Subparsers, UsageError
from safeload.commands._where import add_where, shown_progress, where_of

if TYPE_CHECKING:
    from safeload.pinning import ManifestLike

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the parser of `safeload verify`.

    Args:
        subparsers: Of the program.

    Returns:
        The command's parser.
    """
    text = (
        "Hashes the files that a load would open, and all others that the expected digests name and that are there, "
        "and compares: with a lock, with what the Hub says, or with what it said at the download. Downloads no file "
        "and loads nothing. Exit status 1 where a file differs, is missing or malformed, or nobody vouches for it."
    )
    parser = subparsers.add_parser("verify", help="compare files with their expected digests", description=text)
    add_where(parser)
    parser.add_argument("--manifest", metavar="FILE", help="a lock; else SHA256SUMS beside the files if it is there")
    parser.add_argument("--manifest-sha256", metavar="HEX", help="the sha256 that the lock itself must have")
    parser.add_argument("--signature", metavar="FILE", help="model.sig of OpenSSF model signing, in place of a lock")
    parser.add_argument("--public-key", metavar="PEM", help="the key that must have signed it")
    parser.add_argument(
        "--certificate-chain", metavar="PEM", nargs="+", help="the authorities that must have certified who signed it"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="verify .bin weights where there are no others")
    return parser


def run(args: argparse.Namespace) -> int:
    """Verify, and print what was compared with what.

    Args:
        args: Of the parser.

    Returns:
        0; every failure is raised.

    Raises:
        UsageError: A signature without a key, or beside a lock.
    """
    from safeload.auditing import verify_checkpoint

    manifest = _manifest_of(args)
    with shown_progress(f"{args.path_or_repo}: verify") as on_bytes:
        verification = verify_checkpoint(
            args.path_or_repo,
            manifest=manifest,
            manifest_sha256=args.manifest_sha256,
            allow_pickle=args.allow_pickle,
            on_bytes=on_bytes,
            **where_of(args),
        )
    if args.json:
        print(json.dumps(verification.to_fields(), indent=2))
        return 0
    for name in verification.checked:
        note = " (git's sha1: against corruption only)" if name in verification.corruption_only else ""
        print(f"{name}: OK{note}")
    print(f"{len(verification.checked)} files verified, {verification.provenance}: {verification.source}")
    print(f"digest {verification.digest}")
    return 0


def _manifest_of(args: argparse.Namespace) -> ManifestLike | None:
    from safeload.signing import SignedManifest

    if args.signature is None:
        if args.public_key or args.certificate_chain:
            raise UsageError("--public-key and --certificate-chain belong to a --signature")
        manifest: str | None = args.manifest
        return manifest
    if bool(args.public_key) == bool(args.certificate_chain):
        raise UsageError("--signature needs one of --public-key and --certificate-chain")
    if args.manifest or args.manifest_sha256:
        raise UsageError("--signature takes the place of --manifest")
    chain = tuple(args.certificate_chain or ())
    return SignedManifest(path=args.signature, public_key=args.public_key, certificate_chain=chain)
