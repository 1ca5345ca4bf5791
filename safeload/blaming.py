"""Which ranks a stage failed for, when it can not end: those that said so, those that are lost, those that are silent.

Receives what the store and the watch know; gives the one failure that becomes the stage's verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from safeload import statements
from safeload.statements import Failure, is_failure
from safeload.watching import Seat, Watch
from safeload.wiring import Store

__all__ = ["Scene", "blame_peers", "blame_silence", "blame_trouble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The stage that can not end, as one rank sees it."""

    seat: Seat
    watch: Watch
    judge: int
    index: int
    stage: str
    announced: bool  # only the judge speaks
    timeout_s: float
    doing: str  # what this rank does or waits for, where it has said so


def blame_trouble(store: Store, scene: Scene) -> Failure:
    """Choose the failure of a stage that some ranks failed in, or in which some were lost.

    Args:
        store: Holds the statements.
        scene: The stage.
    """
    lost = scene.watch.lost
    failures = _stated_failures(store, scene)
    if lost:  # explains the transfers that broke off
        failures = {rank: failure for rank, failure in failures.items() if not failure.get("stuck")}
    for rank, text in lost.items():
        failures.setdefault(rank, blame_peers(scene, {rank: text}))
    if not failures:  # flagged in a later stage than this rank's: it will be found there
        own = scene.seat.rank
        failures[own] = blame_peers(scene, {own: "was told that another rank failed outside of the stages"})
    return statements.choose(failures, stage=scene.stage) | {"lost": sorted(lost)}


def _stated_failures(store: Store, scene: Scene) -> dict[int, Failure]:
    failures = {}
    for rank in range(scene.seat.size):
        key = f"s/{scene.index}/{rank}"
        if store.check([key]) and is_failure(raw := store.get(key)):
            failures[rank] = json.loads(raw[1:])
    return failures


def blame_silence(store: Store, scene: Scene) -> Failure:
    """Name the ranks that a stage waited for until the call's time was over.

    Args:
        store: Holds the statements of those that came.
        scene: The stage.
    """
    seat = scene.seat
    awaited = range(seat.size) if seat.rank == scene.judge and not scene.announced else [scene.judge]
    absent = [rank for rank in awaited if not store.check([f"s/{scene.index}/{rank}"])]
    own = f"still at work: {scene.doing}" if scene.doing else "still at work"
    texts = {rank: own if rank == seat.rank else scene.watch.describe(rank) for rank in absent}
    return blame_peers(scene, texts, late=True) | {"absent": absent}


def blame_peers(scene: Scene, texts: Mapping[int, str], *, late: bool = False) -> Failure:
    """Make a failure of what is known about some peers.

    Args:
        scene: The stage.
        texts: What became of them, by rank in the group.
        late: They did not come in time.
    """
    by_global = {scene.seat.global_ranks[rank]: text for rank, text in texts.items()}
    named = "; ".join(f"rank {rank} {text}" for rank, text in sorted(by_global.items()))
    limit = f"within {scene.timeout_s:g} s (the `timeout` of the call) " if late else ""
    what = f"stage {scene.stage!r} did not end {limit}on all {scene.seat.size} ranks: {named}"
    advice = "; every rank of the group must make the same calls in the same order" if late else ""
    first = scene.watch.known.get(min(texts, default=-1))
    host = first.host if first else None
    return statements.peers_failed(what + advice, by_global, stage=scene.stage, host=host)
