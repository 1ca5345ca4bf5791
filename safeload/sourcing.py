"""Bring the tower about on the source rank: read and hash, build, plan, verify.

Receives an `Opened` checkpoint; gives a `Sourced`: the module and its plan as soon as they are known, while the weights
are still being read behind them, and the verdict at the end (`finish`). Where the tower's library cannot do without the
weights until then, they are read first: same results, later.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from safeload.building import build_source
from safeload.chunking import leave
from safeload.deferring import Built, Early, build_while_reading, survey_loaded
from safeload.errors import CheckpointError
from safeload.examining import Contents, examine
from safeload.fitting import check_kinds
from safeload.mapping import can_map
from safeload.matching import all_agree
from safeload.opening import Opened, cores_here, expected_sha256
from safeload.planning import LoadPlan, segment_views
from safeload.recipes import Recipe, recipe_of
from safeload.requesting import Request, floating_dtype
from safeload.sealing import SealedCheckpoint, open_folder
from safeload.sharing import Blocks, Layout, offer
from safeload.staging import stage
from safeload.verifying import Verification, verify
from safeload.waiting import Check

__all__ = ["Constructed", "Sourced", "construct", "source_tower"]


@dataclass(slots=True, kw_only=True)
class Sourced:
    """The tower on the source rank, whose weights may still be on their way.

    `blocks` is what other ranks of the node may map; None where this system or this load has nothing to map. `is_early`
    says that it was built before the weights were there, `pending` that the verdict is still out, `uses_chunks` that no
    file is read: their chunks are compared with digests that an earlier load has left.
    """

    opened: Opened
    built: Built
    seen: SealedCheckpoint
    blocks: Blocks | None
    is_early: bool
    pending: bool
    verification: Verification | None
    kept: ExitStack
    uses_chunks: bool

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
        if self.pending and not self.uses_chunks:
            found = self.built.comes_from[segment]
            if found is not None:
                number, begin, end = found
                whole = self.load_plan.segments[segment].size_bytes
                with stage("seal"):
                    self.opened.filling.wait_until(number, begin + -(-(end - begin) * stop // whole), check=check)

    def wait_until_filled(self) -> None:
        """Wait until every byte is where the tensors show it; what lies in a file that is mapped is there already."""
        files = len(self.seen.weight_files)
        for number, place in enumerate(self.built.places or ()):
            if self.opened.filling.copies or place.block == files:
                self.wait_for(number, self.load_plan.segments[number].size_bytes, self.opened.check)

    def finish(self, *, chunks_agree: bool | None = None) -> None:
        """Wait until all is read, and compare it with what it should be.

        Args:
            chunks_agree: Whether the chunks were found to be the known ones; None where nobody has compared them yet.

        Raises:
            SourceError: A file cannot be read, or it was changed while it was read.
            IntegrityError: The bytes are not the expected ones. `UnverifiedError` where there is no expected digest.
            CheckpointError: The files contradict each other.
        """
        if self.pending:
            self.pending = False
            accepted = self._accept(chunks_agree) if self.uses_chunks else None
            self.seen, self.verification = _read(self.opened, self.kept, accepted=accepted)
            with stage("examine"):
                examine(self.seen)
        self.built.freeze()

    def _accept(self, chunks_agree: bool | None) -> SealedCheckpoint | None:
        opened = self.opened
        if chunks_agree is None:
            fds, threads = opened.filling.memory_fds, cores_here()
            chunks_agree = all_agree(fds, opened.known, threads=threads, check=opened.check)
        return opened.filling.accept(expected_sha256(opened.manifest, self.seen)) if chunks_agree else None

    def facts(self) -> dict[str, Any]:
        """Return what the report says of the checkpoint; `verified_facts` come with the verdict."""
        return {
            "tower": type(self.module).__name__,
            "repo_id": self.seen.checkpoint.repo_id,
            "commit": self.seen.checkpoint.commit,
            "memory": self.opened.request.memory if can_map() else "private",
            "built": "early" if self.is_early else "late",
        }

    def verified_facts(self) -> dict[str, Any]:
        """Return what the report says of the verdict, when it is there."""
        if self.verification is None:
            raise AssertionError("asked for before the verdict")
        return {
            "verdict": self.opened.request.verdict,
            "digest": self.verification.digest,
            "provenance": "off" if self.opened.request.verify == "off" else self.verification.provenance,
            "provenance_detail": self.verification.source,
            "files": {file.name: file.digests["sha256"] for file in self.seen.files},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Constructed:
    """The tower's module on the source rank, and the `recipe` by which the other ranks construct theirs.

    `early` is set where the weights may still be on their way, `verification` where all have been read.
    """

    opened: Opened
    module: nn.Module
    recipe: Recipe
    early: Early | None
    seen: SealedCheckpoint
    verification: Verification | None


def construct(opened: Opened) -> Constructed:
    """Let the tower's library build its module, before the weights are there if it can do without them.

    Args:
        opened: The checkpoint.

    Raises:
        SafeLoadError: As `safe_from_pretrained` says; `stage` tells at which stage.

    Ranks: source only.
    """
    early = _build_early(opened)
    return _build_late(opened) if early is None else _constructed(opened, early.module, opened.filling.seen, early)


def source_tower(constructed: Constructed, *, shares: bool) -> Sourced:
    """Find out what goes where, and begin to read the weights if that has not begun.

    Args:
        constructed: The module.
        shares: Whether other ranks of this node may map the memory.

    Returns:
        The tower. Where it was built while the weights are still being read, `finish` brings the verdict.

    Raises:
        SafeLoadError: As `safe_from_pretrained` says; `stage` tells at which stage.

    Ranks: source only.
    """
    opened, built = constructed.opened, constructed.early.survey() if constructed.early else None
    is_early = built is not None
    if is_early:
        if opened.request.verdict == "load" and not opened.known:  # else when the tower has been returned
            opened.filling.start()
    elif constructed.early is not None:
        constructed = _build_late(opened)
    if built is None:
        built = survey_loaded(constructed.module, constructed.seen, shares=shares and can_map())
        if built.arena is not None:
            opened.kept.callback(built.arena.close)
    sourced = Sourced(
        opened=opened,
        built=built,
        seen=constructed.seen,
        blocks=None,
        is_early=is_early,
        pending=is_early,
        verification=constructed.verification,
        kept=opened.kept,
        uses_chunks=is_early and bool(opened.known),
    )
    with stage("share"):
        sourced.blocks = _blocks(sourced, shares=shares)
    return sourced


def _build_early(opened: Opened) -> Early | None:
    """Build while the weights are being read; None where they are needed for it, or something is wrong."""
    if not opened.filling.headers:
        return None
    try:
        with stage("examine"):
            contents = examine(opened.filling.seen)
    except CheckpointError:
        return None
    casts = floating_dtype(opened.request.dtype) is not None
    early = build_while_reading(
        lambda seen: _build(opened.request, seen, contents), opened.filling, contents, casts=casts
    )
    if early is not None:
        opened.kept.callback(early.arena.close)
    return early


def _build_late(opened: Opened) -> Constructed:
    """Build when all weights have been read and verified."""
    seen, verification = _read(opened, opened.kept)
    with stage("examine"):
        contents = examine(seen)
    with stage("build"):
        module = _build(opened.request, seen, contents)
    return _constructed(opened, module, seen, None, verification)


def _constructed(
    opened: Opened,
    module: nn.Module,
    seen: SealedCheckpoint,
    early: Early | None,
    verification: Verification | None = None,
) -> Constructed:
    request = opened.request
    files = {name: seen.read(name).decode() for name in seen.checkpoint.small if request.trust_remote_code}
    recipe = recipe_of(module, request.model_class, files)
    return Constructed(opened=opened, module=module, recipe=recipe, early=early, seen=seen, verification=verification)


def _read(
    opened: Opened, kept: ExitStack, *, accepted: SealedCheckpoint | None = None
) -> tuple[SealedCheckpoint, Verification]:
    """Read all that is not accepted as it is, and compare it with what it should be."""
    filling = opened.filling
    with stage("seal"):
        sealed = filling.finish(opened.check) if accepted is None else accepted
        kept.callback(sealed.close)
    with stage("verify"):
        verification = verify(opened.manifest, sealed.digests, mode=opened.request.verify)
    if accepted is not None:
        return sealed, replace(verification, source=f"{verification.source}; compared by the digests of chunks")
    for name, chunks in filling.chunk_lists.items():
        if name in verification.checked:
            leave(sealed.file(name).sha256, chunks)
    return sealed, verification


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


def _blocks(sourced: Sourced, *, shares: bool) -> Blocks | None:
    """Gather the memory behind the tower, and offer it to this node's other ranks."""
    built = sourced.built
    if built.places is None or built.arena is None:
        return None
    files = sourced.seen.weight_files
    fds = (*(file.fd for file in files), built.arena.fd)
    node, address = offer(fds, sourced.kept) if shares else ("", "")
    sealed = sourced.opened.request.memory == "sealed"
    layout = Layout(
        sizes=(*(file.size_bytes for file in files), built.arena.used_bytes),
        sealed=(*(sealed for _ in files), True),
        places=built.places,
        node=node,
        address=address,
    )
    return Blocks(fds, layout)
