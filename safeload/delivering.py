"""Bring a tower to every rank: construct it there, move the bytes or share them, put them in place.

Receives on the source rank a `Sourced`, whose weights may still be being read; gives on every rank a `Filled`, whose
weights may still be on their way where they are shared. The verdict comes afterwards, and nothing is used before it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from safeload.broadcasting import Piece, broadcast, payload_device
from safeload.building import build_peer
from safeload.calling import Call, Filled, Letter, Prepared
from safeload.crowding import device_unit, warn_of_shared_device
from safeload.errors import SafeLoadError
from safeload.group import Group
from safeload.handing import node_key
from safeload.placing import allocate, check_module, is_one_piece, place
from safeload.populating import Populating
from safeload.recipes import Recipe
from safeload.requesting import Request
from safeload.sharing import Answer, Blocks, Choice, Layout, choose, receive_blocks, take_over
from safeload.sourcing import Constructed, Sourced, source_tower
from safeload.staging import stage
from safeload.summing import Summing
from safeload.touching import Touching

__all__ = ["deliver", "prepare"]

_CPU: Final = torch.device("cpu")


def prepare(call: Call, constructed: Constructed | None) -> Prepared:
    """Construct the tower on the other ranks, while the source finds out what goes where.

    Args:
        call: The call.
        constructed: On the source rank what it has constructed; None elsewhere.

    Raises:
        SafeLoadError: On every rank, whatever rank it happened on.

    Ranks: every rank, in the same order.
    """
    request, ranks = call.request, call.ranks
    with call.clock.stage("build"):
        raw = ranks.send_bytes("recipe", constructed.recipe.to_json() if constructed else None)

        def work() -> Prepared:
            with stage("device"):
                device = _device(request.device)
            if constructed is None:
                return Prepared(module=_build_peer(request, Recipe.from_json(raw)), device=device, sourced=None)
            sourced = source_tower(constructed, shares=call.shares)
            return Prepared(module=sourced.module, device=device, sourced=sourced)

        return ranks.agree("build", work)


def deliver(call: Call, prepared: Prepared) -> Filled:
    """Move the bytes to the other ranks, and put them in place.

    Args:
        call: The call.
        prepared: What this rank has.

    Returns:
        This rank's tower. Its weights may still be on their way where they are shared.

    Raises:
        SafeLoadError: On every rank, whatever rank it happened on.

    Ranks: every rank, in the same order.
    """
    module, device, sourced, clock = prepared.module, prepared.device, prepared.sourced, call.clock
    with clock.stage("plan"):
        letter = _exchange_letter(call.ranks, prepared)
    with clock.stage("share"):
        blocks, choice = _take_over(call, letter, device, sourced)
    load_plan = letter.load_plan
    if choice.transport == "shared":
        if len(choice.nodes) > 1:
            with clock.stage("broadcast"):
                blocks = _share_between_nodes(call, letter, choice, blocks, sourced)
        return _place_shared(call, module, letter, choice, blocks)
    own = sourced.blocks if sourced is not None and device == _CPU else None
    filled = Filled(module=module, load_plan=load_plan, choice=choice, blocks=own, uses_chunks=letter.uses_chunks)
    return replace(filled, summing=_broadcast(call, filled, device, sourced))


def _place_shared(call: Call, module: nn.Module, letter: Letter, choice: Choice, blocks: Blocks | None) -> Filled:
    if blocks is None:
        raise AssertionError("sharing was chosen without memory to share")
    load_plan = letter.load_plan

    def map_and_place() -> tuple[torch.Tensor, ...]:
        segments = blocks.map(load_plan)
        place(module, load_plan, segments, device=_CPU)
        return segments

    with call.clock.stage("place"):
        segments = call.ranks.agree("place", map_and_place)
    if call.request.verdict == "load":  # else nothing is waited for
        call.kept.enter_context(Touching(segments, functools.partial(blocks.is_there, load_plan)))
    return Filled(module=module, load_plan=load_plan, choice=choice, blocks=blocks, uses_chunks=letter.uses_chunks)


def _share_between_nodes(
    call: Call, letter: Letter, choice: Choice, blocks: Blocks | None, sourced: Sourced | None
) -> Blocks | None:
    """Broadcast from the source to the first rank of every other node, which offers what it got to its neighbours."""
    ranks, load_plan = call.ranks, letter.load_plan
    leaders = [node[0] for node in choice.nodes]
    leads = ranks.rank in leaders

    def receive() -> Blocks | None:
        if not leads:
            return blocks
        with ranks.among(leaders) as firsts:
            wire = payload_device(firsts, _CPU, choice.device_types)  # a gloo group, whatever `ranks` is
            if sourced is not None:
                ready = functools.partial(_wait_for_piece, sourced, firsts)
                broadcast(firsts, load_plan, source=sourced.segments(), target=None, wire_device=wire, ready=ready)
                return blocks
            return receive_blocks(
                load_plan,
                lambda target: broadcast(firsts, load_plan, source=None, target=target, wire_device=wire),
                call.kept,
            )

    got = ranks.agree("broadcast", receive)
    mine = got.layout.to_fields() if leads and got is not None and sourced is None else None
    offers = [json.loads(raw) for raw in ranks.gather_bytes("offers", json.dumps(mine).encode())]
    node = next(node for node in choice.nodes if ranks.rank in node)

    def take() -> Blocks | None:
        if leads or node[0] == leaders[0]:
            return got
        taken, answer = take_over(Layout.from_fields(offers[node[0]]), device=_CPU)
        if taken is None:
            raise SafeLoadError(f"no memory from rank {node[0]}: {answer.problem}; use transport='broadcast'")
        call.kept.callback(taken.close)
        return taken

    return ranks.agree("take", take)


def _wait_for_piece(sourced: Sourced | None, ranks: Group, piece: Piece) -> None:
    if sourced is not None:
        sourced.wait_for(piece.segment, piece.stop, ranks.check)


def _exchange_letter(ranks: Group, prepared: Prepared) -> Letter:
    """Send the source's letter, and compare every other rank's module with the plan in it."""
    sourced, written = prepared.sourced, None
    if sourced is not None:
        layout = sourced.blocks.layout if sourced.blocks and sourced.blocks.layout.address else None
        written = Letter(load_plan=sourced.load_plan, layout=layout, uses_chunks=sourced.uses_chunks)
    raw = ranks.send_bytes("plan", written.to_json() if written else None)

    def read() -> Letter:
        letter = written or Letter.from_json(raw)
        if sourced is None:
            with stage("build"):
                check_module(prepared.module, letter.load_plan)
        return letter

    return ranks.agree("plan", read)


def _take_over(
    call: Call, letter: Letter, device: torch.device, sourced: Sourced | None
) -> tuple[Blocks | None, Choice]:
    """Take the node's memory over where that can be done on every rank, and choose the transport."""
    blocks, answer = sourced.blocks if sourced else None, Answer(device=str(device), node=node_key(), has_blocks=False)
    if sourced is not None:
        answer = replace(answer, has_blocks=blocks is not None)
    elif letter.layout is not None:
        with stage("share"):
            blocks, answer = take_over(letter.layout, device=device)
        if blocks is not None:
            call.kept.callback(blocks.close)  # at once: the ranks have still to agree
    with stage("share"):
        unit = device_unit(device) if call.request.device is None else ""
        said = replace(answer, unit=unit).to_json()
    answers = [Answer.from_json(raw) for raw in call.ranks.gather_bytes("share", said)]
    warn_of_shared_device(answers, call.ranks.rank)
    return blocks, choose(call.request.transport, answers, source_rank=call.ranks.source_rank)


def _broadcast(call: Call, filled: Filled, device: torch.device, sourced: Sourced | None) -> Summing | None:
    ranks, clock, load_plan = call.ranks, call.clock, filled.load_plan
    with clock.stage("allocate"):
        moves = not ranks.is_source or device != _CPU  # the source keeps its own memory where that is on the cpu
        target = ranks.agree("allocate", lambda: allocate(load_plan, device) if moves else None)
        if target is not None and is_one_piece(load_plan, device):
            call.kept.enter_context(Populating(target))
        source = ranks.agree("segments", lambda: sourced.segments() if sourced else None)
    with clock.stage("broadcast"):
        wire = payload_device(ranks, device, filled.choice.device_types)
        ready = functools.partial(_wait_for_piece, sourced, ranks)
        summing = None if target is None or device != _CPU else Summing(load_plan, target, device=device)
        if summing is not None:
            call.kept.enter_context(summing)

        def taken(piece: Piece) -> None:
            if summing is not None and piece.stop == load_plan.segments[piece.segment].size_bytes:
                summing.add(piece.segment)

        broadcast(ranks, load_plan, source=source, target=target, wire_device=wire, ready=ready, taken=taken)
    with clock.stage("place"):
        final = source if target is None and sourced and sourced.blocks else target
        ranks.agree(
            "place", lambda: place(filled.module, load_plan, final, device=device) if final is not None else None
        )
    return summing


def _build_peer(request: Request, recipe: Recipe) -> nn.Module:
    with _code_folder(recipe) as folder:
        return build_peer(
            request.model_class,
            recipe,
            origin=request.origin,
            config=request.config,
            folder=folder,
            model_kwargs=request.model_kwargs,
        )


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
        # torch 2.6's current_accelerator() takes no argument and raises where there is none
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else _CPU
    try:
        found = torch.empty(0, device=device).device  # with its index, and only if it is there
    except (RuntimeError, AssertionError, TypeError) as error:
        raise SafeLoadError(f"device={device!r} cannot be used on this rank: {error}") from error
    if found.type == "meta":
        raise SafeLoadError("device='meta': a frozen tower has real weights on every rank; expected a real device")
    return found
