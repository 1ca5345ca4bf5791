"""The pipeline, readable top to bottom: resolve, verify, seal, build, plan, move, place, protect.

The source rank alone touches the checkpoint. Each stage ends in an agreement of all ranks before a collective
follows, so that a failure on any rank is the same error on every rank, and nobody is left waiting.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.ambient import plain_tensors
from safeload.broadcasting import broadcast
from safeload.building import build_peer, build_source
from safeload.casting import install_boundary_casts, install_boundary_errors
from safeload.errors import ProtectionError, SafeLoadError
from safeload.examining import Contents, examine
from safeload.fitting import check_kinds
from safeload.group import Group, join_group
from safeload.placing import allocate, check_module, place
from safeload.planning import LoadPlan, plan, segment_views
from safeload.protecting import protect, tower_state
from safeload.recipes import Recipe, recipe_of
from safeload.reporting import LoadReport, MemoryMeter, RankReport, StageClock, progress_bar
from safeload.requesting import Request, floating_dtype
from safeload.resolving import resolve
from safeload.sealing import SealedCheckpoint, open_folder, seal
from safeload.verifying import Verification, expect, verify

__all__ = ["load_report", "safe_from_pretrained"]

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Letter:
    """What the source tells the other ranks before the payload: JSON only."""

    recipe: Recipe
    load_plan: LoadPlan
    facts: Mapping[str, Any]

    def to_json(self) -> bytes:
        parts = {"recipe": self.recipe.to_json().decode(), "plan": self.load_plan.to_json().decode()}
        return json.dumps({**parts, "facts": dict(self.facts)}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> _Letter:
        fields = json.loads(raw)
        return cls(
            recipe=Recipe.from_json(fields["recipe"]),
            load_plan=LoadPlan.from_json(fields["plan"]),
            facts=fields["facts"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What the source rank holds before the payload moves."""

    module: nn.Module
    letter: _Letter
    sealed: SealedCheckpoint


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
    manifest: str | os.PathLike[str] | None = None,
    manifest_sha256: str | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    ignore_unexpected: Sequence[str] = (),
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
            anything is sent.
        device: Where the tower lives on this rank. None is this process's accelerator if there is one, else the cpu.
        group: The process group; None is the default one. Without a process group one process loads for itself.
        source_rank: Rank within `group` that reads the checkpoint.
        transport: "broadcast" sends the bytes with torch.distributed to every rank; "auto" chooses.
        memory: "sealed" copies the verified bytes once into memory that nobody can change; "mapped" maps the verified
            file itself, for storage that nobody writes to.
        timeout: How long the ranks wait for each other to come, and again for the whole load to end.
        verify: "auto" compares with the best expected digest there is and warns where there is none; "strict" refuses
            without one; "off" compares nothing (the bytes are hashed all the same).
        manifest: A SHA256SUMS file to compare with.
        manifest_sha256: sha256 of that file, 64 hex digits.
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
        dtype=dtype,
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
        manifest=manifest,
        manifest_sha256=manifest_sha256,
        allow_pickle=allow_pickle,
        progress=progress,
        ignore_unexpected=tuple(ignore_unexpected),
        cast_inputs=cast_inputs,
        model_kwargs=model_kwargs,
    )
    with (
        join_group(group, source_rank=source_rank, timeout=timeout) as ranks,
        plain_tensors(_CPU),
        ExitStack() as kept,
    ):
        meter, clock = kept.enter_context(MemoryMeter()), StageClock()
        ranks.start(request.statement())
        ranks.agree("arguments", request.check)
        loaded = _load_on_source(request, ranks, clock, kept)
        module, letter = _fill_every_rank(request, ranks, clock, loaded)
        device = str(next((parameter.device for parameter in module.parameters()), _CPU))
        report = _report(request, ranks, clock, letter, _own_report(ranks, meter, letter, loaded, device))
        return ranks.agree("protect", lambda: _protect(module, request, report))


def _protect(module: nn.Module, request: Request, report: LoadReport) -> nn.Module:
    tower = protect(module, name=type(module).__name__, origin=request.origin)
    tower_state(tower).report = report
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


def _load_on_source(request: Request, ranks: Group, clock: StageClock, kept: ExitStack) -> _Loaded | None:
    """Run every stage that touches the checkpoint; the other ranks wait and learn of a failure."""

    def step(stage: str, run: Callable[[], Any]) -> Any:
        with clock.stage(stage):
            return ranks.on_source(stage, run)

    checkpoint = step(
        "resolve",
        lambda: resolve(
            request.origin,
            **request.where,
            allow_pickle=request.allow_pickle,
            trust_remote_code=request.trust_remote_code,
        ),
    )
    manifest = step(
        "expect",
        lambda: expect(
            checkpoint,
            verify=request.verify,
            manifest=request.manifest,
            manifest_sha256=request.manifest_sha256,
        ),
    )

    def read() -> SealedCheckpoint:
        with progress_bar(request.progress, f"{request.origin}: read and verify") as show:

            def on_bytes(done_bytes: int, total_bytes: int) -> None:
                ranks.check()  # no use in reading on for a group that has failed
                if show is not None:
                    show(done_bytes, total_bytes)

            return kept.enter_context(seal(checkpoint, manifest, memory=request.memory, on_bytes=on_bytes))

    sealed = step("seal", read)
    verification = step("verify", lambda: verify(manifest, sealed.digests, mode=request.verify))
    contents = step("examine", lambda: examine(sealed))
    module = step("build", lambda: _build(request, sealed, contents))
    letter = step("plan", lambda: _write_letter(request, module, sealed, verification))
    return _Loaded(module=module, letter=letter, sealed=sealed) if ranks.is_source else None


def _build(request: Request, sealed: SealedCheckpoint, contents: Contents) -> nn.Module:
    with open_folder(sealed) as folder:
        module = build_source(
            request.model_class,
            folder,
            origin=request.origin,
            config=request.config,
            dtype=floating_dtype(request.dtype),
            variant=request.where["variant"],
            weights=[folder / name for name in sealed.weight_names],
            ignore_unexpected=request.ignore_unexpected,
            model_kwargs=request.model_kwargs,
        )
    check_kinds(module, contents.tensors, request.origin)
    return module


def _write_letter(request: Request, module: nn.Module, sealed: SealedCheckpoint, verification: Verification) -> _Letter:
    load_plan = plan(module)
    files = {name: sealed.read(name).decode() for name in sealed.checkpoint.small if request.trust_remote_code}
    facts = {
        "tower": type(module).__name__,
        "repo_id": sealed.checkpoint.repo_id,
        "commit": sealed.checkpoint.commit,
        "memory": request.memory,
        "digest": verification.digest,
        "provenance": "off" if request.verify == "off" else verification.provenance,
        "provenance_detail": verification.source,
        "files": {file.name: file.sha256 for file in sealed.files},
    }
    return _Letter(recipe=recipe_of(module, request.model_class, files), load_plan=load_plan, facts=facts)


def _fill_every_rank(
    request: Request, ranks: Group, clock: StageClock, loaded: _Loaded | None
) -> tuple[nn.Module, _Letter]:
    """Construct on the other ranks, move the bytes, put them in place."""
    with clock.stage("plan"):
        raw = ranks.send_bytes("plan", loaded.letter.to_json() if loaded else None)
        letter = ranks.agree("plan", lambda: loaded.letter if loaded else _Letter.from_json(raw))
    with clock.stage("build"):
        device = ranks.agree("device", lambda: _device(request.device))
        module = ranks.agree("build", lambda: loaded.module if loaded else _build_peer(request, letter))
    load_plan = letter.load_plan
    with clock.stage("allocate"):
        moves = not ranks.is_source or device != _CPU  # the source keeps its own memory where that is on the cpu
        target = ranks.agree("allocate", lambda: allocate(load_plan, device) if moves else None)
    with clock.stage("broadcast"):
        source = segment_views(module, load_plan) if loaded else None
        broadcast(ranks, load_plan, source=source, target=target, device=device)
    with clock.stage("place"):
        ranks.agree("place", lambda: place(module, load_plan, target, device=device) if target is not None else None)
    return module, letter


def _build_peer(request: Request, letter: _Letter) -> nn.Module:
    with _code_folder(letter.recipe) as folder:
        module = build_peer(
            request.model_class,
            letter.recipe,
            origin=request.origin,
            config=request.config,
            folder=folder,
            model_kwargs=request.model_kwargs,
        )
    check_module(module, letter.load_plan)
    return module


@contextmanager
def _code_folder(recipe: Recipe) -> Iterator[Path | None]:
    """Write the checkpoint's own code, where it was asked for, to a private folder of this rank."""
    if not recipe.files:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="safeload-") as folder:
        for name, text in recipe.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        yield Path(folder)


def _device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that the tower lives on; None is the current accelerator if there is one, else the cpu."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = _CPU if accelerator is None else accelerator
    try:
        found = torch.empty(0, device=device).device  # with its index, and only if it is there
    except (RuntimeError, AssertionError, TypeError) as error:
        raise SafeLoadError(f"device={device!r} cannot be used on this rank: {error}") from error
    if found.type == "meta":
        raise SafeLoadError("device='meta': a frozen tower has real weights on every rank; expected a real device")
    return found


def _own_report(ranks: Group, meter: MemoryMeter, letter: _Letter, loaded: _Loaded | None, device: str) -> RankReport:
    meter.stop()
    size_bytes = letter.load_plan.size_bytes
    return RankReport(
        rank=ranks.global_rank,
        host=ranks.host,
        read_bytes=loaded.sealed.bytes_read if loaded else 0,
        files_opened=loaded.sealed.names if loaded else (),
        sent_bytes=size_bytes if loaded and ranks.size > 1 else 0,
        received_bytes=0 if loaded else size_bytes,
        memory_before_bytes=meter.before_bytes,
        memory_peak_bytes=meter.peak_bytes,
        memory_after_bytes=meter.after_bytes,
        device=device,
    )


def _report(request: Request, ranks: Group, clock: StageClock, letter: _Letter, own: RankReport) -> LoadReport:
    gathered = tuple(map(RankReport.from_json, ranks.gather_bytes("report", own.to_json())))
    specs = [spec for spec in letter.load_plan.tensors if spec.same_as is None]
    alone = ranks.size == 1
    return LoadReport(
        origin=request.origin,
        source_rank=gathered[ranks.source_rank].rank,
        world_size=ranks.size,
        transport="none" if alone else "broadcast",
        transport_reason="one rank loads for itself" if alone else "torch.distributed to every rank",
        tensors=len(specs),
        tower_bytes=letter.load_plan.size_bytes,
        dtypes=dict(Counter(spec.dtype for spec in specs)),  # asdict does not copy a Counter rightly
        seconds=dict(clock.seconds),
        ranks=gathered,
        **letter.facts,
    )
