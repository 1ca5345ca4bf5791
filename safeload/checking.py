"""Receive a model, say whether its towers are what was verified, the same on every rank; put back what can be.

`check_towers` looks at everything: which object hangs where, its dtype, device and storage, and every value once, at
the speed of memory. The ranks exchange one small record each. What runs by itself before a tower's first forward is the
cheap form of the same: identities, torch's counts of in-place changes, and a few values of every tensor. It does not
see a few values changed through `.data`, behind torch's counts; `check_towers` does.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch import nn

from safeload.errors import ProtectionError, TowerChangedError
from safeload.group import join_group
from safeload.keeping import Protection
from safeload.mending import altered, mend, overwritten
from safeload.protecting import frozen_towers, tower_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TowerCheck", "TowerSummary", "check_towers", "plain_name", "restore_towers"]

_WRAPPERS: Final = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_forward_module)(?=\.|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSummary:
    """One tower that is whole. `digest` is over the names and fingerprints of its tensors."""

    name: str
    origin: str
    tensors: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCheck:
    """All towers of a model, found whole and the same on every rank; `seconds` is this rank's time for looking."""

    towers: tuple[TowerSummary, ...]
    ranks: int
    seconds: float


def plain_name(name: str) -> str:
    """Return a qualified name without what FSDP1, checkpointing and compiling put in between.

    Args:
        name: As `named_modules` gives it.
    """
    return _WRAPPERS.sub("", name).lstrip(".")


def _require_towers(model: nn.Module) -> dict[str, nn.Module]:
    towers = {plain_name(name): tower for name, tower in frozen_towers(model).items()}
    if not towers:
        raise ProtectionError(
            f"there is no protected tower in this {type(model).__name__}. Load it with safe_from_pretrained; one in "
            "a plain Python list has to be given by itself."
        )
    return towers


def _changed_modules(tower: nn.Module, protection: Protection) -> dict[str, str]:
    """Name the modules of a tower that were replaced, removed or added behind the guard."""
    now = dict(tower.named_modules(remove_duplicate=False))
    known = {part.path: part.module() for part in protection.parts}
    changes = {}
    for path, part in known.items():
        if path not in now:
            changes[path] = "this module was removed"
        elif now[path] is not part:
            changes[path] = f"this module was replaced by a {type(now[path]).__name__}"
    whole = {id(part) for part in known.values()}
    changes |= {
        path: "this module was added" for path, part in now.items() if path not in known and id(part) not in whole
    }
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one rank saw of one tower."""

    summary: TowerSummary
    changes: dict[str, str]


def _look(name: str, tower: nn.Module) -> _Seen:
    protection = tower_state(tower)
    protection.settle()
    changes = _changed_modules(tower, protection)
    changes |= {kept.name: how for kept in protection.kept if (how := altered(kept)) is not None}
    for key, how in overwritten(protection, depth="full").items():
        changes[key] = f"{changes[key]}, {how}" if key in changes else how
    listed = "\n".join(f"{key} {value}" for key, value in sorted(protection.fingerprints.items()))
    summary = TowerSummary(
        name=name,
        origin=protection.origin,
        tensors=len(protection.kept),
        size_bytes=sum({id(kept.tensor): kept.verified.nbytes for kept in protection.kept}.values()),
        digest=hashlib.sha256(listed.encode()).hexdigest(),
    )
    lead = f"{name}." if name else ""
    return _Seen(summary=summary, changes={lead + key: how for key, how in sorted(changes.items())})


def _look_at_all(model: nn.Module) -> dict[str, _Seen]:
    return {name: _look(name, tower) for name, tower in _require_towers(model).items()}


def _to_bytes(seen: Mapping[str, _Seen]) -> bytes:
    return json.dumps([asdict(one) for one in seen.values()]).encode()


def _from_bytes(letter: bytes) -> dict[str, _Seen]:
    read = [_Seen(summary=TowerSummary(**one["summary"]), changes=one["changes"]) for one in json.loads(letter)]
    return {one.summary.name: one for one in read}


def _on_ranks(places: list[int], size: int) -> str:
    if len(places) == size:
        return "" if size == 1 else " on every rank"
    return f" on rank{'s' if len(places) > 1 else ''} {', '.join(str(place) for place in places)}"


def _disagreements(seen: list[dict[str, _Seen]]) -> dict[tuple[str, str], list[int]]:
    """Find towers that some ranks do not have, or have with other verified values."""
    where: dict[tuple[str, str], list[int]] = {}
    for name in sorted({name for towers in seen for name in towers}):
        label = name or "the tower"
        missing = [rank for rank, towers in enumerate(seen) if name not in towers]
        if missing:
            where[(label, "not protected")] = missing
        digests = {rank: towers[name].summary.digest for rank, towers in enumerate(seen) if name in towers}
        if len(set(digests.values())) > 1:
            short = ", ".join(f"{digest[:12]} on rank {rank}" for rank, digest in digests.items())
            where[(label, f"verified with different values, {short}:")] = sorted(digests)
    return where


def _compare(seen: list[dict[str, _Seen]]) -> dict[str, str]:
    """Merge what the ranks saw into one list of changes, each with the ranks it happened on."""
    where = _disagreements(seen)
    for rank, towers in enumerate(seen):
        for tower in towers.values():
            for name, how in tower.changes.items():
                where.setdefault((name, how), []).append(rank)
    merged: dict[str, str] = {}
    for (name, how), places in sorted(where.items()):
        text = how + _on_ranks(places, len(seen))
        merged[name] = f"{merged[name]}; {text}" if name in merged else text
    return merged


def check_towers(
    model: nn.Module, *, group: ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=10)
) -> TowerCheck:
    """Find out whether the towers of a model still are what was verified, and the same on every rank.

    Reads every value of the towers once, where they are; nothing is sent but names and digests.

    With memory="sealed" the verified values stay at hand, in memory that nobody can change. With memory="mapped" they
    are those of the file, and their fingerprints are taken at the first check: what is written into the file later is
    named by the next check; what was written into it between the load and the first check is not, it is taken for the
    verified value. Where that matters, check once right after such a load, or load with memory="sealed".

    Args:
        model: A model with protected towers, wrapped or not.
        group: The ranks that have to agree; None is the default process group, if there is one.
        timeout: How long the ranks wait for each other.

    Returns:
        The record of towers that are whole.

    Raises:
        TowerChangedError: Every replaced, cast, moved, sharded, emptied or overwritten tensor, what happened and on
            which ranks. The same error on every rank.
        ProtectionError: The model has no protected tower.
        MismatchedCallError: Another rank of the group called something else.
        SafeLoadError: A tower's verdict was still out (`verdict="first_use"`), and it is not the expected one.

    Ranks: called on every rank of `group`, in the same order.
    """
    start = time.perf_counter()
    with join_group(group, timeout=timeout) as ranks:
        ranks.start({"call": "check_towers"})
        mine = ranks.agree("check", lambda: _look_at_all(model))
        seconds = time.perf_counter() - start
        changes = _compare([_from_bytes(letter) for letter in ranks.gather_bytes("compare", _to_bytes(mine))])
        if changes:
            listed = "; ".join(f"{name}: {how}" for name, how in changes.items())
            raise TowerChangedError(
                f"{len(changes)} parts of the towers are not what was verified: {listed}. restore_towers(model) puts "
                "back what was replaced, cast or moved; what was overwritten has to be loaded again. To train a tower, "
                "call safeload.unfreeze(tower) first.",
                tower=", ".join(mine),
                changes=changes,
            )
    return TowerCheck(towers=tuple(seen.summary for seen in mine.values()), ranks=ranks.size, seconds=seconds)


def restore_towers(model: nn.Module) -> list[str]:
    """Put the towers' verified tensors back where they were replaced, cast, moved, emptied or made trainable.

    Nothing is read or copied: the verified storage is still there. Values that were overwritten in place are lost, and
    a sharded tensor belongs to FSDP: `check_towers` goes on naming those, and the tower has to be loaded again.

    Args:
        model: A model with protected towers.

    Returns:
        The names of the tensors that it mended, sorted.

    Raises:
        ProtectionError: The model has no protected tower.
        SafeLoadError: The verdict was still out, and the tower is not the expected one.

    Ranks: local.
    """
    mended = []
    for name, tower in _require_towers(model).items():
        lead = f"{name}." if name else ""
        tower_state(tower).settle()
        mended += [lead + key for key in mend(tower_state(tower))]
    return sorted(mended)
