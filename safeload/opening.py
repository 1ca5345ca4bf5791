"""Open the checkpoint on the source rank and prepare to read it: what it needs, and what is known of it already.

Receives a `Request`, the files that are needed and what they should be; gives an `Opened`, of which nothing but the
small files and the weights' headers has been read. Small files (configuration, index, code) are verified before any
library sees them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from safeload.chunking import ChunkList, find
from safeload.errors import SafeLoadError
from safeload.filling import Filling
from safeload.mapping import can_map
from safeload.reporting import progress_bar
from safeload.requesting import Request, floating_dtype
from safeload.resolving import Checkpoint
from safeload.sealing import OnBytes, OpenedCheckpoint, SealedCheckpoint, open_checkpoint
from safeload.staging import stage
from safeload.verifying import Manifest
from safeload.waiting import Check, run_beside

__all__ = ["Opened", "cores_here", "expected_sha256", "open_source"]

_TURN_S: Final = 0.0005  # a chunk is read, hashed and written in some milliseconds, between two waits for a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint that is open on the source rank.

    Attributes:
        request: What the caller asked for.
        manifest: What the files should be.
        filling: Reads the weights, once it is told to.
        known: The digests of the weight files' chunks where an earlier load has left them: then nothing is read.
        kept: Ends with the load: descriptors and threads go with it.
        check: Called now and then while something is waited for; what it raises ends the wait.
    """

    request: Request
    manifest: Manifest
    filling: Filling
    known: tuple[ChunkList, ...]
    kept: ExitStack
    check: Check


def open_source(
    request: Request, checkpoint: Checkpoint, manifest: Manifest, *, kept: ExitStack, check: Check
) -> Opened:
    """Open every file that the load needs, once, and read all but the weights.

    Args:
        request: What the caller asked for.
        checkpoint: What is needed.
        manifest: What it should be.
        kept: Ends with the load.
        check: Called now and then; what it raises ends the reading, also where a read never returns.

    Raises:
        SafeLoadError: As `safe_from_pretrained` says; `stage` tells at which stage.

    Ranks: source only.
    """
    kept.enter_context(_sharing_the_interpreter())
    show = kept.enter_context(progress_bar(request.progress, f"{request.origin}: read and verify"))

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        check("")  # no use in reading on for a group that has failed
        if show is not None:
            show(done_bytes, total_bytes)

    def open_all() -> tuple[Filling, ExitStack]:
        with ExitStack() as owned:
            opened = owned.enter_context(open_checkpoint(checkpoint, manifest, memory=request.memory))
            return owned.enter_context(_open_filling(opened, on_bytes, chunks=chunks)), owned.pop_all()

    chunks = _uses_chunks(request, manifest)
    with stage("seal"):
        filling, owned = run_beside(
            open_all, check=check, doing=f"{checkpoint.folder} is opened", undo=lambda late: late[1].close()
        )
        kept.push(owned)
    known = _known(request, manifest, filling) if chunks else ()
    casts = floating_dtype(request.dtype) is not None  # then it is read when it is known what is to be cast
    waits = request.verdict == "load" or filling.copies  # before the tower is returned
    if filling.headers and waits and not known and not casts:
        filling.start()
    return Opened(request=request, manifest=manifest, filling=filling, known=known, kept=kept, check=check)


def _open_filling(opened: OpenedCheckpoint, on_bytes: OnBytes, *, chunks: bool) -> Filling:
    """Prepare to read the weights, with their headers to be looked at first where they have any."""
    if can_map() and not opened.source.checkpoint.pickled:
        with contextlib.suppress(SafeLoadError):  # a bad header is told later, unless the digest says what is wrong
            return Filling(opened, on_bytes=on_bytes, headers=True, chunks=chunks)
    return Filling(opened, on_bytes=on_bytes, headers=False, chunks=chunks)


@contextlib.contextmanager
def _sharing_the_interpreter() -> Iterator[None]:
    """Let the threads that read and hash have their turn at the interpreter more often than every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def expected_sha256(manifest: Manifest, seen: SealedCheckpoint) -> tuple[str, ...]:
    """Return the expected sha256 of each weight file that has one.

    Args:
        manifest: What the files should be.
        seen: The files.
    """
    entries = (manifest.entries.get(file.name) for file in seen.weight_files)
    return tuple(entry.hex for entry in entries if entry is not None and entry.algorithm == "sha256")


def _uses_chunks(request: Request, manifest: Manifest) -> bool:
    """Whether digests of chunks may be used and left: where the files themselves are mapped, and nobody pinned them."""
    if request.memory != "mapped" or request.chunk_digests is False:
        return False
    return request.chunk_digests is True or manifest.provenance != "pinned"


def _known(request: Request, manifest: Manifest, filling: Filling) -> tuple[ChunkList, ...]:
    """Return the digests of all weight files' chunks that an earlier load has left; none where one is missing."""
    files = filling.seen.weight_files
    expected = expected_sha256(manifest, filling.seen)
    if not filling.headers or len(expected) != len(files) or floating_dtype(request.dtype) is not None:
        return ()  # a cast goes through every byte anyway
    found = [find(digest, size_bytes=file.size_bytes) for digest, file in zip(expected, files, strict=True)]
    return () if None in found else tuple(each for each in found if each is not None)


def cores_here() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
