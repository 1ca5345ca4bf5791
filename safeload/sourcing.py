"""Everything that touches the checkpoint, on the source rank: open, read and hash, build, plan, verify.

Receives a `Request`; gives a `Sourced`: the module and its plan as soon as they are known, while the weights are still
being read behind them, and the verdict at the end (`finish`). Where the tower's library cannot do without the weights
until then, they are read first: same results, later.

Small files (configuration, index, code) are verified before any library sees them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from safeload.building import build_source
from safeload.chunking import ChunkList, agrees, find, leave
from safeload.deferring import Built, build_on, build_while_reading
from safeload.errors import CheckpointError, SafeLoadError
from safeload.examining import Contents, examine
from safeload.filling import Filling
from safeload.fitting import check_kinds
from safeload.mapping import can_map
from safeload.planning import LoadPlan, segment_views
from safeload.recipes import Recipe, recipe_of
from safeload.reporting import progress_bar
from safeload.requesting import Request, floating_dtype
from safeload.resolving import Checkpoint
from safeload.sealing import OnBytes, OpenedCheckpoint, SealedCheckpoint, open_checkpoint, open_folder
from safeload.sharing import Blocks, Layout, offer
from safeload.staging import stage
from safeload.verifying import Manifest, Verification, verify
from safeload.waiting import Check, run_beside

__all__ = ["Sourced", "compare_chunks", "source_tower"]

_TURN_S: Final = 0.0005  # a chunk is read, hashed and written in some milliseconds, between two waits for a turn


@dataclass(slots=True, kw_only=True)
class Sourced:
    """The tower on the source rank, whose weights may still be on their way.

    `blocks` is what other ranks of the node may map; None where this system or this load has nothing to map. `known`
    are the digests of the weight files' chunks where an earlier load has left them: then nothing is being read.
    """

    request: Request
    manifest: Manifest
    built: Built
    seen: SealedCheckpoint
    blocks: Blocks | None
    filling: Filling | None
    recipe: Recipe
    verification: Verification | None
    kept: ExitStack
    check: Check
    known: tuple[ChunkList, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The module; its tensors may be views of memory that is being filled."""
        return self.built.module

    @property
    def load_plan(self) -> LoadPlan:
        """Its plan."""
        return self.built.load_plan

    def segments(self) -> tuple[torch.Tensor, ...]:
        """Return the segments of the plan as flat bytes; see `wait_for`."""
        if self.blocks is not None:
            return self.blocks.map(self.load_plan)
        return segment_views(self.built.module, self.load_plan)

    def wait_for(self, segment: int, stop: int, check: Check) -> None:
        """Wait until the bytes of a segment are there, up to `stop`."""
        if self.filling is not None and not self.known:  # with known chunks the files themselves are used, unread
            found = self.built.comes_from[segment]
            if found is not None:
                number, begin, end = found
                whole = self.load_plan.segments[segment].size_bytes
                with stage("seal"):
                    self.filling.wait_until(number, begin + -(-(end - begin) * stop // whole), check=check)

    def finish(self, *, chunks_agree: bool | None = None) -> None:
        """Wait until all is read, and compare it with what it should be.

        Args:
            chunks_agree: Whether the chunks were found to be the known ones; None where nobody has compared them yet.

        Raises:
            SourceError: A file cannot be read, or it was changed while it was read.
            IntegrityError: The bytes are not the expected ones. `UnverifiedError` where there is no expected digest.
            CheckpointError: The files contradict each other.
        """
        if self.filling is not None:
            filling, self.filling = self.filling, None
            if self.known and chunks_agree is None:
                chunks_agree = compare_chunks(filling.memory_fds, self.known, part=0, parts=1, check=self.check)
            accepted = filling.accept(_expected(self.manifest, self.seen)) if self.known and chunks_agree else None
            self.seen, self.verification = _read(
                filling, self.manifest, self.request, self.kept, check=self.check, accepted=accepted
            )
            with stage("examine"):
                examine(self.seen)
        self.built.freeze()

    def facts(self) -> dict[str, Any]:
        """Return what the report says of the checkpoint; `verified_facts` come with the verdict."""
        return {
            "tower": type(self.module).__name__,
            "repo_id": self.seen.checkpoint.repo_id,
            "commit": self.seen.checkpoint.commit,
            "memory": self.request.memory if can_map() else "private",
        }

    def verified_facts(self) -> dict[str, Any]:
        """Return what the report says of the verdict, when it is there."""
        if self.verification is None:
            raise AssertionError("asked for before the verdict")
        return {
            "verdict": self.request.verdict,
            "digest": self.verification.digest,
            "provenance": "off" if self.request.verify == "off" else self.verification.provenance,
            "provenance_detail": self.verification.source,
            "files": {file.name: file.digests["sha256"] for file in self.seen.files},
        }


def source_tower(
    request: Request,
    checkpoint: Checkpoint,
    manifest: Manifest,
    *,
    shares: bool,
    kept: ExitStack,
    check: Check,
) -> Sourced:
    """Open the checkpoint, begin to read it, and build the tower.

    Args:
        request: What the caller asked for.
        checkpoint: What is needed.
        manifest: What it should be.
        shares: Whether other ranks of this node may map the memory.
        kept: Ends with the load: descriptors and threads go with it.
        check: Called now and then; what it raises ends the reading, also where a read never returns.

    Returns:
        The tower. Where it was built while the weights are still being read, `finish` brings the verdict.

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
    built, seen, verification = _build_early(request, filling, reads=not known), filling.seen, None
    is_early = built is not None
    if built is None:
        seen, verification = _read(filling, manifest, request, kept, check=check)
        with stage("examine"):
            contents = examine(seen)
        with stage("build"):
            built = build_on(lambda sealed: _build(request, sealed, contents), seen, shares=shares and can_map())
    if built.arena is not None:
        kept.callback(built.arena.close)
    sourced = Sourced(
        request=request,
        manifest=manifest,
        built=built,
        seen=seen,
        blocks=None,
        filling=filling if is_early else None,
        recipe=_recipe(request, built, seen),
        verification=verification,
        kept=kept,
        check=check,
        known=known if is_early else (),
    )
    with stage("share"):
        sourced.blocks = _blocks(sourced, shares=shares)
    return sourced


def _open_filling(opened: OpenedCheckpoint, on_bytes: OnBytes, *, chunks: bool) -> Filling:
    """Prepare to read the weights, with their headers to be looked at first where they have any."""
    if can_map() and not opened.source.checkpoint.pickled:
        with contextlib.suppress(SafeLoadError):  # a bad header is told later, unless the digest says what is wrong
            return Filling(opened, on_bytes=on_bytes, headers=True, chunks=chunks)
    return Filling(opened, on_bytes=on_bytes, headers=False, chunks=chunks)


def _build_early(request: Request, filling: Filling, *, reads: bool) -> Built | None:
    """Build while the weights are being read; None where they are needed for it, or something is wrong."""
    if not filling.headers:
        return None
    dtype = floating_dtype(request.dtype)
    if dtype is None and reads:
        filling.start()
    try:
        with stage("examine"):
            contents = examine(filling.seen)
    except CheckpointError:
        return None
    built = build_while_reading(
        lambda seen: _build(request, seen, contents), filling, contents, casts=dtype is not None
    )
    if reads:
        filling.start()
    return built


@contextlib.contextmanager
def _sharing_the_interpreter() -> Iterator[None]:
    """Let the threads that read and hash have their turn at the interpreter more often than every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _read(
    filling: Filling,
    manifest: Manifest,
    request: Request,
    kept: ExitStack,
    *,
    check: Check,
    accepted: SealedCheckpoint | None = None,
) -> tuple[SealedCheckpoint, Verification]:
    with stage("seal"):
        sealed = filling.finish(check) if accepted is None else accepted
        kept.callback(sealed.close)
    with stage("verify"):
        verification = verify(manifest, sealed.digests, mode=request.verify)
    if accepted is not None:
        return sealed, replace(verification, source=f"{verification.source}; compared by the digests of chunks")
    for name, chunks in filling.chunk_lists.items():
        if name in verification.checked:
            leave(sealed.file(name).sha256, chunks)
    return sealed, verification


def _expected(manifest: Manifest, seen: SealedCheckpoint) -> tuple[str, ...]:
    """Return the expected sha256 of each weight file that has one."""
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
    expected = _expected(manifest, filling.seen)
    if not filling.headers or len(expected) != len(files) or floating_dtype(request.dtype) is not None:
        return ()  # a cast goes through every byte anyway
    found = [find(digest, size_bytes=file.size_bytes) for digest, file in zip(expected, files, strict=True)]
    return () if None in found else tuple(each for each in found if each is not None)


def compare_chunks(
    fds: Sequence[int], known: Sequence[ChunkList | None], *, part: int, parts: int, check: Check
) -> bool:
    """Compare this rank's part of the weight files' chunks with the known ones.

    Args:
        fds: The weight files.
        known: Their chunks; None for a list that this rank cannot use, as where blake3 is not installed.
        part: This rank's place among those that share the work.
        parts: How many they are.
        check: Called now and then; what it raises ends the wait.

    Ranks: local.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // parts)
    own = [os.dup(fd) for fd in fds]  # for a thread that may be left behind

    def compare() -> bool:
        try:
            return all(
                chunks is not None and agrees(fd, chunks, part=part, parts=parts, threads=threads)
                for fd, chunks in zip(own, known, strict=True)
            )
        finally:
            for fd in own:
                os.close(fd)

    return run_beside(compare, check=check, doing="the weight files are compared by their chunks")


def _build(request: Request, seen: SealedCheckpoint, contents: Contents) -> nn.Module:
    with open_folder(seen) as folder:
        module = build_source(
            request.model_class,
            folder,
            origin=request.origin,
            config=request.config,
            dtype=floating_dtype(request.dtype),
            variant=request.where["variant"],
            weights=[folder / name for name in seen.weight_names],
            ignore_unexpected=request.ignore_unexpected,
            model_kwargs=request.model_kwargs,
        )
    check_kinds(module, contents.tensors, request.origin)
    return module


def _recipe(request: Request, built: Built, seen: SealedCheckpoint) -> Recipe:
    files = {name: seen.read(name).decode() for name in seen.checkpoint.small if request.trust_remote_code}
    return recipe_of(built.module, request.model_class, files)


def _blocks(sourced: Sourced, *, shares: bool) -> Blocks | None:
    """Gather the memory behind the tower, and offer it to this node's other ranks."""
    built = sourced.built
    if built.places is None or built.arena is None:
        return None
    files = sourced.seen.weight_files
    fds = (*(file.fd for file in files), built.arena.fd)
    node, address = offer(fds, sourced.kept) if shares else ("", "")
    sealed = sourced.request.memory == "sealed"
    layout = Layout(
        sizes=(*(file.size_bytes for file in files), built.arena.used_bytes),
        sealed=(*(sealed for _ in files), True),
        places=built.places,
        node=node,
        address=address,
    )
    return Blocks(fds, layout)
