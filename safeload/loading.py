"""The pipeline, readable top to bottom: resolve, verify, seal, build, plan, move, place, protect.

The source rank alone touches the checkpoint. Each stage ends in an agreement of all ranks before a collective
follows, so that a failure on any rank is the same error on every rank, and nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.accounting import gather_report, own_account
from safeload.ambient import plain_tensors
from safeload.calling import Call, Filled
from safeload.casting import install_boundary_casts, install_boundary_errors
from safeload.delivering import deliver, prepare
from safeload.errors import ProtectionError
from safeload.group import join_group
from safeload.guarding import Guarded
from safeload.metering import MemoryMeter
from safeload.opening import Opened, open_source
from safeload.placing import tensors_of
from safeload.promising import Promise
from safeload.protecting import protect, tower_state, unprotect
from safeload.reporting import LoadReport, StageClock
from safeload.requesting import Request, patterns
from safeload.resolving import resolve
from safeload.sourcing import Constructed, Sourced, construct
from safeload.splitting import Split, split_chunks
from safeload.verifying import expect
from safeload.waiting import run_beside

__all__ = ["load_report", "safe_from_pretrained"]

_LOG: Final = logging.getLogger("safeload")
_CPU: Final = torch.device("cpu")


def safe_from_pretrained(
    model_class: Callable[..., Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    config: Any = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    group: Any = None,
    source_rank: int = 0,
    transport: str = "auto",
    memory: Literal["sealed", "mapped"] = "sealed",
    timeout: timedelta = timedelta(minutes=30),
    verify: Literal["auto", "strict", "off"] = "auto",
    verdict: Literal["load", "first_use"] = "load",
    chunk_digests: bool | None = None,
    manifest: str | os.PathLike[str] | None = None,
    manifest_sha256: str | None = None,
    strict_folder: bool = False,
    allow_pickle: bool = False,
    progress: bool | None = None,
    ignore_unexpected: str | Sequence[str] = (),
    cast_inputs: bool = False,
    **model_kwargs: Any,
) -> nn.Module:
    """Load a frozen tower on every rank: read once, verified, sent to all, and protected from the training stack.

    Replaces `model_class.from_pretrained(path)`, also inside an outer model's `__init__`:

        self.vision_tower = safe_from_pretrained(CLIPVisionModel, path)

    Args:
        model_class: A transformers class or Auto class, a diffusers `ModelMixin`, or any callable without arguments
            that returns an `nn.Module`; then the path is a file or folder of safetensors, and `key_mapping={regex:
            replacement}` renames the checkpoint's keys.
        pretrained_model_name_or_path: A folder, a .safetensors file, or the id of a repository on the Hub. Only the
            source rank looks at it.
        config: A configuration object in place of the checkpoint's own.
        revision: Branch, tag or commit of a repository; resolved once, on the source.
        subfolder: Folder below it.
        variant: As in `from_pretrained`: "fp16" takes `model.fp16.safetensors`.
        cache_dir: The Hub cache.
        token: For private and gated repositories.
        local_files_only: Make no request.
        dtype: None or "auto" is as stored; a floating torch dtype or its name casts once, on the source, before
            anything is sent. `torch_dtype` is taken for it, as by `from_pretrained`.
        device: Where the tower lives on this rank. None is this process's accelerator if there is one, else the cpu.
        group: The process group; None is the default one. Without a process group one process loads for itself.
        source_rank: Rank within `group` that reads the checkpoint.
        transport: "shared" makes one copy a node, which its ranks map; "broadcast" sends the bytes with
            torch.distributed to every rank; "auto" shares where all ranks are on one node and want the tower on the
            cpu, else broadcasts. "shared" falls back to "broadcast" where ranks share no kernel: the report says why.
        memory: "sealed": the verified bytes are copied once into memory that nobody can change. The bytes in the
            tensors are the bytes that were hashed, whatever happens to the files; none of them is ever mapped, they are
            read from beginning to end, as network file systems like it. "mapped": nothing is copied, the very
            file that was hashed is mapped, for storage that nobody writes to. The load fails where the file changed
            while it was hashed, and replacing it by name is harmless; but what is written into it later shows in the
            tensors, and who cuts it short kills the process.
        timeout: How long the ranks wait for each other to come, and again for the whole load to end. A read that never
            returns, as of a network disk that is gone, ends the load in time like any other silence: its thread, which
            nothing can end, is left behind as a daemon with what it uses until the read returns.
        verify: "auto" compares with the best expected digest there is and warns where there is none; "strict" refuses
            without one; "off" compares nothing (the bytes are hashed all the same).
        verdict: "load" returns when the bytes have been verified; "first_use" returns when the tensors are in place, at
            once where the file is mapped as it is, else when they have been copied, cast or received, and verification
            goes on behind. The first use of the tower or of a part of it (forward, state dict, copy, pickle, unfreeze,
            check, restore), and a fork, waits for it, and raises there, on every rank, what "load" would have raised.
            Code that reads a parameter's values by itself is not waited for: it sees bytes that are not verified yet.
        chunk_digests: With memory="mapped": whether a verified load leaves the digests of the files' chunks in a
            private folder of this user, so that later loads that expect the same sha256 are compared on all cores.
            None does where the manifest is not pinned. `safeload.chunking` says what that rests on.
        manifest: A SHA256SUMS file to compare with.
        manifest_sha256: sha256 of that file, 64 hex digits.
        strict_folder: Refuse a folder that holds other files than those that the manifest names; they are invisible to
            the load in any case.
        allow_pickle: Accept `.bin` weights, read with `weights_only=True` on the source alone.
        progress: Show a progress bar on the source; None does where the output is a terminal and the load is long.
        ignore_unexpected: Regular expressions; keys of the checkpoint that match one may be left over.
        cast_inputs: Cast floating inputs of the tower to its dtype and its outputs back to the caller's. False casts
            nothing, and a mismatch of dtypes is an error that names the tower, both dtypes and this keyword.
        **model_kwargs: Passed on to `from_pretrained`, or to the constructor.

    Returns:
        An instance of `model_class`, the same values on every rank: frozen, in eval mode, ignored by FSDP, outside the
        outer model's state dict. `load_report(tower)` tells how it came about.

    Raises:
        SourceError: Not found, unreadable or ambiguous. `UnsafeFormatError` where only pickle files are there.
        IntegrityError: A file's bytes are not the expected ones. `UnverifiedError` where there is no expected digest.
        CheckpointError: Malformed files; missing, unexpected or mismatched tensors, all of them listed.
        MismatchedCallError: The ranks called with different arguments.
        PeerError: Another rank failed or was lost.
        SafeLoadError: An argument that cannot be honoured.

    Ranks:
        Called on every rank of `group`, in the same order. Every rank returns, or every rank raises the same error.
    """
    request = Request(
        model_class=model_class,
        path=pretrained_model_name_or_path,
        config=config,
        dtype=model_kwargs.pop("torch_dtype", None) if dtype is None else dtype,
        device=device,
        where={
            "revision": revision,
            "subfolder": subfolder,
            "variant": variant,
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
        },
        transport=transport,
        memory=memory,
        verify=verify,
        verdict=verdict,
        chunk_digests=chunk_digests,
        manifest=manifest,
        manifest_sha256=manifest_sha256,
        strict_folder=strict_folder,
        allow_pickle=allow_pickle,
        progress=progress,
        ignore_unexpected=patterns(ignore_unexpected),
        cast_inputs=cast_inputs,
        model_kwargs=model_kwargs,
    )
    with (
        join_group(group, source_rank=source_rank, timeout=timeout) as ranks,
        plain_tensors(_CPU),
        ExitStack() as kept,
    ):
        meter = kept.enter_context(MemoryMeter())
        call = Call(request=request, ranks=ranks, clock=StageClock(), kept=kept)
        ranks.start(request.statement())
        ranks.agree("arguments", request.check)
        opened = _open_on_source(call)
        split = _split_chunks(call, opened)
        prepared = prepare(call, _construct_on_source(call, opened))
        if split is not None:
            split.begin()
        sourced = prepared.sourced
        filled = deliver(call, prepared)
        if request.verdict == "first_use":
            with call.clock.stage("fill"):  # a parameter that is read needs its bytes, which nobody would ask for then
                ranks.on_source("fill", lambda: sourced.wait_until_filled() if sourced else None)
            meter.end()
            return _return_early(call, filled, sourced, meter)
        with _no_tower_unless_verified(filled.module):
            # What is mapped is protected while it is still being verified; what is sent, from its fingerprints, then.
            tower = ranks.agree("protect", lambda: _protect(call, filled)) if filled.is_mapped else None
            with call.clock.stage("verify"):
                agree = split.agrees(ranks) if split is not None and filled.uses_chunks else None
                ranks.on_source("verify", lambda: sourced.finish(chunks_agree=agree) if sourced else None)
            meter.end()  # all bytes are there
            if tower is None:
                tower = ranks.agree("protect", lambda: _protect(call, filled))
            if filled.is_mapped:
                ranks.agree("sealed", filled.check_sealed)
        meter.stop()
        report = gather_report(call, filled, own_account(call, meter, filled, sourced), sourced)
        tower_state(tower).report = report
        if ranks.is_source:
            _LOG.info("%s", report)
        return tower


@contextlib.contextmanager
def _no_tower_unless_verified(module: nn.Module) -> Iterator[None]:
    """Leave no protected module behind a failure: a caller may hold it, and would take it for a verified tower."""
    was_tower = isinstance(module, Guarded)  # which is refused
    try:
        yield
    except BaseException:
        if not was_tower:
            unprotect(module)
        raise


def _return_early(call: Call, filled: Filled, sourced: Sourced | None, meter: MemoryMeter) -> nn.Module:
    """Return the tower before the verdict; its first use waits for it."""
    report = gather_report(call, filled, own_account(call, meter, filled, sourced), sourced)
    promise = call.ranks.promise()
    kept = ExitStack()  # descriptors of the shared memory, to see that it was sealed
    blocks = filled.blocks if sourced is None else None
    module, is_source = weakref.ref(filled.module), call.ranks.is_source

    def wait() -> None:
        with kept:
            facts = promise.wait()
            if blocks is not None:
                blocks.check_sealed()
        found = module()
        if found is not None:
            tower_state(found).report = replace(report, **facts)
            if is_source:
                _LOG.info("%s", tower_state(found).report)

    tower = call.ranks.agree("protect", lambda: _protect(call, filled, verdict=wait))
    tower_state(tower).report = report
    if sourced is None:
        kept.push(call.kept.pop_all())
        weakref.finalize(tower, kept.close)  # a tower may be dropped before it is used
    else:  # not before `_protect` has mapped what the end of the reading closes
        _finish_behind(sourced, promise, owned=call.kept.pop_all())
    return tower


def _finish_behind(sourced: Sourced, promise: Promise, *, owned: ExitStack) -> None:
    """Read and verify to the end in a thread; `owned`, what the reading needs, lives until then."""
    sourced.kept = owned

    def finish() -> Mapping[str, Any]:
        with owned:
            sourced.finish()
            return sourced.verified_facts()

    threading.Thread(target=promise.keep, args=(finish,), name="safeload-verdict", daemon=True).start()


def _protect(call: Call, filled: Filled, *, verdict: Callable[[], None] | None = None) -> nn.Module:
    request, originals = call.request, None
    if filled.blocks is not None:
        load_plan, untouched = filled.load_plan, filled.blocks.map_for_later(filled.load_plan)
        # in a mapping of its own, which the module's writes do not reach, and without a reference to the module
        originals = functools.cache(lambda: tensors_of(load_plan, untouched(), device=_CPU))
    tower = protect(
        filled.module,
        name=type(filled.module).__name__,
        origin=request.origin,
        fingerprints=filled.summing.result(check=call.ranks.check) if filled.summing else None,
        originals=originals,
        verdict=verdict,
    )
    install = install_boundary_casts if request.cast_inputs else install_boundary_errors
    return install(tower)


def load_report(tower: nn.Module) -> LoadReport:
    """Tell how a tower came about: bytes, seconds by stage, digest and its provenance, memory of every rank.

    Args:
        tower: What `safe_from_pretrained` returned.

    Returns:
        The record; `print` it for text, `to_json()` for JSON.

    Raises:
        ProtectionError: Not a tower that safeload has loaded.

    Ranks: local; the record holds every rank's figures.
    """
    report = tower_state(tower).report
    if not isinstance(report, LoadReport):
        raise ProtectionError(f"this {type(tower).__name__} was protected without being loaded: it has no report")
    return report


def _open_on_source(call: Call) -> Opened | None:
    """Run every stage that looks for the checkpoint; the other ranks wait and learn of a failure."""
    request, ranks = call.request, call.ranks

    def step(stage: str, run: Callable[[], Any]) -> Any:
        with call.clock.stage(stage):
            return ranks.on_source(stage, run)

    def ask(stage: str, run: Callable[[], Any]) -> Any:  # a disk or a server, which may never answer
        return step(stage, lambda: run_beside(run, check=ranks.check, doing=f"{request.origin} is looked at"))

    checkpoint = ask(
        "resolve",
        lambda: resolve(
            request.origin,
            **request.where,
            allow_pickle=request.allow_pickle,
            trust_remote_code=request.trust_remote_code,
        ),
    )
    manifest = ask(
        "expect",
        lambda: expect(
            checkpoint,
            verify=request.verify,
            manifest=request.manifest,
            manifest_sha256=request.manifest_sha256,
            strict_folder=request.strict_folder,
        ),
    )
    opened: Opened | None = step(
        "build", lambda: open_source(request, checkpoint, manifest, kept=call.kept, check=ranks.check)
    )
    return opened


def _split_chunks(call: Call, opened: Opened | None) -> Split | None:
    """Begin to compare known chunks, where the ranks wait for the verdict and may share the files."""
    if not call.shares or call.request.memory != "mapped" or call.request.verdict != "load":
        return None
    with call.clock.stage("share"):
        return split_chunks(call.ranks, opened, call.kept)


def _construct_on_source(call: Call, opened: Opened | None) -> Constructed | None:
    with call.clock.stage("build"):
        return call.ranks.on_source("build", lambda: construct(opened) if opened else None)
