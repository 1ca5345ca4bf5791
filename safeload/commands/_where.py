"""Options that say which checkpoint, shared by the commands that look at one; and the bar while it is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safeload.sealing import OnBytes

__all__ = ["add_where", "shown_progress", "where_of"]

_NAMES = ("revision", "subfolder", "variant", "cache_dir", "token", "local_files_only")


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the options of from_pretrained that say where it is.

    Args:
        parser: Of the command.
    """
    parser.add_argument("path_or_repo", metavar="PATH_OR_REPO", help="a folder, a .safetensors file, or a repository")
    parser.add_argument("--revision", help="branch, tag or commit of a repository")
    parser.add_argument("--subfolder", default="", help="folder below it")
    parser.add_argument("--variant", help="fp16 takes model.fp16.safetensors")
    parser.add_argument("--cache-dir", metavar="DIR", help="the Hub cache")
    parser.add_argument("--token", help="for private and gated repositories")
    parser.add_argument("--local-files-only", action="store_true", help="make no request")


def where_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return those options as keywords.

    Args:
        args: Of the parser.

    Returns:
        Keywords of `verify_checkpoint` and its like.
    """
    return {name: getattr(args, name) for name in _NAMES}


@contextmanager
def shown_progress(what: str) -> Iterator[OnBytes]:
    """Show a bar on stderr, where that is a terminal, while bytes are read.

    Args:
        what: Shown beside the bar.

    Yields:
        The callback.
    """
    from tqdm import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, disable=None, leave=False, delay=1) as bar:

        def on_bytes(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        yield on_bytes
