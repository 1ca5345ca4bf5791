"""One copy a node: the node's ranks map the memory that its first rank holds.

Receives blocks of memory (the weight files, sealed, and the arena) and the place of each segment of the plan in them.
The descriptors go from process to process; each maps them privately, so that what one rank writes reaches no other. The
plan and the verdict go through the group as always: nothing of a block is used before the source rank has said that
it was verified, and nothing of sealed memory before it is sealed.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from safeload.deferring import Place
from safeload.errors import GroupError, IntegrityError
from safeload.handing import Offer, node_key, take
from safeload.holding import is_frozen
from safeload.mapping import ALIGN_BYTES, Arena, can_map, map_private, view
from safeload.planning import LoadPlan

__all__ = ["Answer", "Blocks", "Choice", "Layout", "choose", "offer", "receive_blocks", "take_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is where in the blocks.

    Attributes:
        sizes: Bytes of each block.
        sealed: Whether each block is sealed once the load has been verified; a mapped file is not.
        places: Where each segment of the plan is.
        node: Key of the node on which the blocks are offered.
        address: Where they are offered.
    """

    sizes: tuple[int, ...]
    sealed: tuple[bool, ...]
    places: tuple[Place, ...]
    node: str
    address: str

    def to_fields(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        places = [(place.block, place.offset_bytes) for place in self.places]
        fields = {"sizes": self.sizes, "sealed": self.sealed, "node": self.node, "address": self.address}
        return {**fields, "places": places}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Layout:
        """Read what `to_fields` gave on another rank."""
        places = tuple(Place(block=block, offset_bytes=offset_bytes) for block, offset_bytes in fields["places"])
        return cls(
            sizes=tuple(fields["sizes"]),
            sealed=tuple(fields["sealed"]),
            places=places,
            node=fields["node"],
            address=fields["address"],
        )


class Blocks:
    """Blocks of memory in this process, by descriptor.

    Args:
        fds: One a block.
        layout: What is in them.
    """

    def __init__(self, fds: Sequence[int], layout: Layout) -> None:
        self.fds, self.layout = tuple(fds), layout
        self._filled = [(0, 0)] * len(self.fds)  # by block: the run of bytes that was last seen to be there

    def map(self, load_plan: LoadPlan) -> tuple[torch.Tensor, ...]:
        """Map the blocks privately and return the segments of the plan.

        Args:
            load_plan: The source's plan.

        Returns:
            One uint8 tensor `[size_bytes]` per segment, each with a storage of its own; nothing is read or copied.
        """
        return self.map_for_later(load_plan)()

    def map_for_later(self, load_plan: LoadPlan) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Map the blocks now, and return what gives their segments as `map` does; the descriptors may be closed then.

        Args:
            load_plan: The source's plan.
        """
        places, segments = self.layout.places, load_plan.segments
        used = {place.block for place in places}
        mappings = {block: map_private(self.fds[block], self.layout.sizes[block]) for block in sorted(used)}
        return lambda: tuple(
            view(mappings[place.block], place.offset_bytes, segment.size_bytes)
            for place, segment in zip(places, segments, strict=True)
        )

    def is_there(self, load_plan: LoadPlan, number: int) -> bool:
        """Say whether the memory of a segment is there, so that looking at it makes no page and waits for no disk.

        Of a file that is mapped: whether its end is in memory, as after it was read. Of sealed memory: whether it has
        pages, which is no word on what is in them. Whoever fills it makes huge pages ahead of the bytes, as many as are
        asked for at a time (`safeload.paging.Backed`): some MiB of zeros may be there, and all of a segment of which
        nothing has been written. To enter such pages into a page table is harmless, since they are shared: the bytes
        appear in them. Nobody may take it for more: that the bytes are there, and right, is what the verdict says.

        Args:
            load_plan: The source's plan.
            number: Of the segment.
        """
        place = self.layout.places[number]
        fd, end = self.fds[place.block], place.offset_bytes + load_plan.segments[number].size_bytes
        try:
            if self.layout.sealed[place.block]:
                return self._has_pages(place, end)
            last = max(place.offset_bytes, end - 1 - mmap.PAGESIZE)  # its end may be on the first page of the next one
            return os.preadv(fd, [bytearray(1)], last, os.RWF_NOWAIT) == 1
        except OSError:  # not in memory, or a file system that does not tell
            return False

    def _has_pages(self, place: Place, end: int) -> bool:
        """Ask for the end of a run from its last known end on: the kernel looks at every page in between."""
        begin, edge = self._filled[place.block]
        if not begin <= place.offset_bytes <= edge:
            begin = edge = place.offset_bytes
        if edge < end:
            edge = os.lseek(self.fds[place.block], edge, os.SEEK_HOLE)  # memory, whose position nobody else uses
        self._filled[place.block] = begin, edge
        return edge >= end

    def check_sealed(self) -> None:
        """Make sure, after the verdict, that memory which should be sealed is.

        Raises:
            IntegrityError: It could still be written to.
        """
        for number, fd in enumerate(self.fds):
            if self.layout.sealed[number] and not is_frozen(fd):
                raise IntegrityError(f"block {number} of the tower's memory was handed over without being sealed")

    def close(self) -> None:
        """Close the descriptors; mappings stay valid."""
        for fd in self.fds:
            os.close(fd)


def offer(fds: Sequence[int], kept: ExitStack, *, also: Sequence[int] = ()) -> tuple[str, str]:
    """Offer blocks to the other ranks of this node, read-only, until `kept` ends.

    Args:
        fds: One a block; must stay open as long.
        kept: Ends with the load.
        also: Descriptors to be offered as they are, behind the blocks.

    Returns:
        The node's key and the address; two empty texts where nothing can be shared on this system.

    Ranks: the first of a node.
    """
    if not can_map():
        return "", ""
    read_only = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in fds]
    for fd in read_only:
        kept.callback(os.close, fd)
    return node_key(), kept.enter_context(Offer((*read_only, *also))).address


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank says before the transport is chosen: where its tower is to live, and whether it has the blocks.

    `unit` names the accelerator itself, where this rank took the default one.
    """

    device: str
    node: str
    has_blocks: bool
    problem: str = ""
    unit: str = ""

    def to_json(self) -> bytes:
        """Return the record as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Answer:
        """Read what `to_json` wrote on another rank."""
        return cls(**json.loads(raw))


def take_over(layout: Layout, *, device: torch.device) -> tuple[Blocks | None, Answer]:
    """Take the blocks over from the node's first rank, if this rank is on that node and can use them.

    Args:
        layout: What the source rank offers.
        device: Where this rank wants its tower.

    Returns:
        The blocks, or None; and what to tell the others.

    Ranks: every rank but the one that offers.
    """
    here = node_key()
    if device.type != "cpu" or layout.node != here:
        return None, Answer(device=str(device), node=here, has_blocks=False)
    try:
        fds = take(layout.address, len(layout.sizes))
    except GroupError as error:
        return None, Answer(device=str(device), node=here, has_blocks=False, problem=error.message)
    return Blocks(fds, layout), Answer(device=str(device), node=here, has_blocks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the bytes move, and why. `nodes` are the ranks by node, the one that holds the node's copy first.

    `nodes` is empty where the transport is not "shared". `device_types` are those that the tower lives on, on any rank.
    """

    transport: str
    reason: str
    nodes: tuple[tuple[int, ...], ...] = ()
    device_types: frozenset[str] = frozenset({"cpu"})


def choose(asked: str, answers: Sequence[Answer], *, source_rank: int) -> Choice:
    """Choose the transport; the same on every rank, since all have the same answers.

    Args:
        asked: "auto", "shared" or "broadcast".
        answers: One a rank.
        source_rank: Rank within the group.

    Returns:
        "none", "shared" or "broadcast", with the reason in words.

    Ranks: local.
    """
    types = frozenset(torch.device(each.device).type for each in answers)
    return replace(_choose(asked, answers, source_rank=source_rank), device_types=types)


def _choose(asked: str, answers: Sequence[Answer], *, source_rank: int) -> Choice:
    if len(answers) == 1:
        return Choice(transport="none", reason="one rank loads for itself")
    if asked == "broadcast":
        return Choice(transport="broadcast", reason="asked for")
    devices = [rank for rank, each in enumerate(answers) if torch.device(each.device).type != "cpu"]
    nodes = _nodes(answers, source_rank)
    without = [rank for rank in nodes[0] if not answers[rank].has_blocks]
    if devices:
        why = f"the tower goes to {answers[devices[0]].device} on {_ranks(devices)}"
    elif without:
        why = f"{_ranks(without)} could not take the memory over: {answers[without[0]].problem or 'none was offered'}"
    elif len(nodes) == len(answers):
        why = "no two ranks are on one kernel and in one network name space"
    else:
        where = "on one kernel" if len(nodes) == 1 else f"on {len(nodes)} kernels, with a copy on each,"
        said = "asked for" if asked == "shared" else f"the ranks are {where} and want the tower on the cpu"
        return Choice(transport="shared", reason=said, nodes=nodes)
    return Choice(transport="broadcast", reason=why)


def _nodes(answers: Sequence[Answer], source_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks by node, the source's node first, and the source first on it."""
    by_node: dict[str, list[int]] = {answers[source_rank].node: [source_rank]}
    for rank, each in enumerate(answers):
        if rank != source_rank:
            by_node.setdefault(each.node, []).append(rank)
    return tuple(map(tuple, by_node.values()))


def receive_blocks(load_plan: LoadPlan, receive: Callable[[tuple[torch.Tensor, ...]], None], kept: ExitStack) -> Blocks:
    """Receive a tower into new memory, seal it, and offer it to this node's other ranks.

    Args:
        load_plan: The source's plan.
        receive: Fills one uint8 tensor `[size_bytes]` per segment, and keeps none of them.
        kept: Ends with the load.

    Returns:
        The memory.

    Ranks: the first of every node but the source's.
    """
    arena = Arena(sum(segment.size_bytes + ALIGN_BYTES for segment in load_plan.segments) + 1)
    kept.callback(arena.close)
    offsets = [arena.reserve(segment.size_bytes) or 0 for segment in load_plan.segments]
    arena.cut()
    receive(arena.writable(offsets, [segment.size_bytes for segment in load_plan.segments]))
    arena.freeze()
    node, address = offer((arena.fd,), kept)
    places = tuple(Place(block=0, offset_bytes=offset) for offset in offsets)
    layout = Layout(sizes=(arena.used_bytes,), sealed=(True,), places=places, node=node, address=address)
    return Blocks((arena.fd,), layout)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
