"""Move the payload over the process group: bytes in buckets of bounded size, straight into their final memory.

Large segments are sent in place, slice by slice, from the source's own memory into the receiver's final memory. Small
ones are packed into one staging bucket, since a collective costs more than copying a few kilobytes. One path for every
dtype and backend: everything is uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from safeload.bouncing import Bounce, Lane
from safeload.group import Group
from safeload.planning import LoadPlan

__all__ = ["Piece", "broadcast", "buckets", "payload_device"]

BUCKET_BYTES: Final = 32 * 1024**2  # large enough that a collective's latency vanishes, small beside any tower
_PACKED_BYTES: Final = 1024**2  # segments below this are packed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice of one segment, in bytes."""

    segment: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the slice."""
        return self.stop - self.start


def buckets(load_plan: LoadPlan, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[Piece, ...]]:
    """Cut a plan into buckets; the same on every rank.

    Args:
        load_plan: The source's plan.
        bucket_bytes: Most bytes in one bucket.

    Yields:
        The pieces of one bucket: one slice of a large segment, or several whole small segments.

    Ranks: local.
    """
    packed: list[Piece] = []
    packed_bytes, room = 0, min(_PACKED_BYTES, bucket_bytes)
    for number, segment in enumerate(load_plan.segments):
        if segment.size_bytes > room:
            for start in range(0, segment.size_bytes, bucket_bytes):
                yield (Piece(segment=number, start=start, stop=min(start + bucket_bytes, segment.size_bytes)),)
            continue
        if packed_bytes + segment.size_bytes > room:
            yield tuple(packed)
            packed, packed_bytes = [], 0
        packed.append(Piece(segment=number, start=0, stop=segment.size_bytes))
        packed_bytes += segment.size_bytes
    if packed:
        yield tuple(packed)


def payload_device(group: Group, device: torch.device, device_types: Collection[str]) -> torch.device:
    """Return where the buckets travel: on the type of device that all ranks want and the group serves, else on another.

    One type on every rank: a group like `cpu:gloo,cuda:nccl` has a backend for each, which never meet.

    Args:
        group: The ranks.
        device: Where the tower lives on this rank.
        device_types: The types of device that the tower lives on, on all ranks.

    Ranks: local; the same type on every rank.
    """
    if not group.devices:
        return device
    (wanted, *others) = sorted(device_types)
    chosen = wanted if not others and wanted in group.devices else group.devices[0]
    return device if device.type == chosen else torch.device(chosen)


def broadcast(
    group: Group,
    load_plan: LoadPlan,
    *,
    source: tuple[torch.Tensor, ...] | None,
    target: tuple[torch.Tensor, ...] | None,
    wire_device: torch.device,
    ready: Callable[[Piece], None] = lambda piece: None,
    taken: Callable[[Piece], None] = lambda piece: None,
    bucket_bytes: int = BUCKET_BYTES,
    lane: Lane | None = None,
) -> None:
    """Send every segment from the source rank to the others.

    A rank needs host memory for two buckets at most beside the final one: none where that is on the cpu as the buckets
    are, but for packed small segments; two pinned buffers where the bytes go on to an accelerator.

    Args:
        group: The ranks.
        load_plan: The source's plan, the same on every rank.
        source: On the source rank the bytes to send, on the cpu; elsewhere None.
        target: Where this rank wants them; None where the source keeps its own memory.
        wire_device: Where the buckets travel, from `payload_device`.
        ready: On the source: called with a piece before its bytes are taken, to wait for them.
        taken: Called with a piece when its bytes are in `target`, or on their way there on its device's stream.
        bucket_bytes: Most bytes in one bucket.
        lane: The way to this process's accelerator.

    Raises:
        PeerError: A rank failed or was lost meanwhile; on every rank.

    Ranks: every rank of `group`, in the same order.
    """
    if group.size == 1 and target is None:
        return  # one process keeps what it has loaded
    cut = tuple(buckets(load_plan, bucket_bytes=bucket_bytes))
    sizes_bytes = [sum(piece.size_bytes for piece in bucket) for bucket in cut]
    road = _Road(cut, source=source, target=target, wire_device=wire_device, taken=taken, lane=lane or Lane())

    def wait(index: int) -> None:
        for piece in cut[index]:
            ready(piece)

    try:
        group.stream("broadcast", sizes_bytes, road.fill, road.take, ready=wait, device=wire_device)
    finally:
        road.close()


class _Road:
    """What one rank does with each bucket."""

    def __init__(
        self,
        cut: tuple[tuple[Piece, ...], ...],
        *,
        source: tuple[torch.Tensor, ...] | None,
        target: tuple[torch.Tensor, ...] | None,
        wire_device: torch.device,
        taken: Callable[[Piece], None],
        lane: Lane,
    ) -> None:
        self._cut, self._source, self._target, self._wire_device = cut, source, target, wire_device
        self._taken, self._lane = taken, lane
        self._memory = target if target is not None else source
        self._in_place = any(lane.device_of(segment) == wire_device for segment in (self._memory or ())[:1])
        self._to_wire = _goes_up("cpu" if source else None, wire_device.type)
        self._from_wire = _goes_up(wire_device.type, lane.device_of(target[0]).type if target else None)
        largest_bytes = max((sum(piece.size_bytes for piece in bucket) for bucket in cut), default=0)
        self._bounce = Bounce(lane, largest_bytes) if self._to_wire or self._from_wire else None

    def fill(self, index: int) -> torch.Tensor:
        """Return what the collective works on, on the source with the bytes in it."""
        bucket = self._cut[index]
        wire = self._wire(bucket)
        if self._source is None:
            return wire
        lent = self._bounce.lend(wire.numel()) if self._to_wire and self._bounce is not None else None
        for piece, part in _parts(bucket, wire if lent is None else lent):
            _copy(part, _slice(self._source, piece))
        if lent is not None and self._bounce is not None:
            self._bounce.send(wire, lent, lent=lent)
            self._bounce.take_back(lent)
        return wire

    def take(self, index: int, wire: torch.Tensor) -> None:
        """Put a bucket's bytes where this rank wants them."""
        bounce = self._bounce
        lent = bounce is not None and bounce.owns(wire)
        for piece, part in _parts(self._cut[index], wire) if self._target is not None else ():
            if lent and bounce is not None:
                bounce.send(_slice(self._target, piece), part, lent=wire)
            else:
                _copy(_slice(self._target, piece), part)
            self._taken(piece)
        if bounce is not None:
            bounce.take_back(wire)
            if index == len(self._cut) - 1:
                bounce.drain()  # here, where a failure is told to all ranks

    def close(self) -> None:
        """Leave no copy under way, and no buffer."""
        if self._bounce is not None:
            self._bounce.close()

    def _wire(self, bucket: tuple[Piece, ...]) -> torch.Tensor:
        """Return the final memory itself for a single slice there, else a staging bucket."""
        if len(bucket) == 1 and self._in_place:
            return _slice(self._memory, bucket[0])
        size_bytes = sum(piece.size_bytes for piece in bucket)
        lent = self._bounce.lend(size_bytes) if self._from_wire and self._bounce is not None else None
        return self._lane.empty(size_bytes, self._wire_device) if lent is None else lent


def _goes_up(of: str | None, to: str | None) -> bool:
    """Return whether bytes go from the cpu to an accelerator, by types of device; None where they go nowhere."""
    return of == "cpu" and to not in (None, "cpu")


def _slice(segments: tuple[torch.Tensor, ...] | None, piece: Piece) -> torch.Tensor:
    if segments is None:
        raise AssertionError("a slice of segments that this rank does not have")
    return segments[piece.segment][piece.start : piece.stop]


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.data_ptr() != of.data_ptr():  # the wire is often the final memory itself
        to.copy_(of)


def _parts(bucket: tuple[Piece, ...], wire: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    at = 0
    for piece in bucket:
        yield piece, wire[at : at + piece.size_bytes]
        at += piece.size_bytes
