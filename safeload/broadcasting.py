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
    room = min(_PACKED_BYTES, bucket_bytes)
    for number, segment in enumerate(load_plan.segments):
        if segment.size_bytes > room:
            for start in range(0, segment.size_bytes, bucket_bytes):
                yield (Piece(segment=number, start=start, stop=min(start + bucket_bytes, segment.size_bytes)),)
            continue
        if sum(piece.size_bytes for piece in packed) + segment.size_bytes > room:
            yield tuple(packed)
            packed = []
        packed.append(Piece(segment=number, start=0, stop=segment.size_bytes))
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
) -> None:
    """Send every segment from the source rank to the others.

    Args:
        group: The ranks.
        load_plan: The source's plan, the same on every rank.
        source: On the source rank the bytes to send, on the cpu; elsewhere None.
        target: Where this rank wants them; None where the source keeps its own memory.
        wire_device: Where the buckets travel, from `payload_device`.
        ready: On the source: called with a piece before its bytes are taken, to wait for them.
        taken: Called with a piece when its bytes are in `target`.

    Raises:
        PeerError: A rank failed or was lost meanwhile; on every rank.

    Ranks: every rank of `group`, in the same order.
    """
    if group.size == 1 and target is None:
        return  # one process keeps what it has loaded
    cut = tuple(buckets(load_plan))

    def wait(index: int) -> None:
        for piece in cut[index]:
            ready(piece)

    def fill(index: int) -> torch.Tensor:
        wire = _wire(cut[index], target if target is not None else source, wire_device)
        for piece, part in _parts(cut[index], wire) if source is not None else ():
            _copy(part, _slice(source, piece))
        return wire

    def take(index: int, wire: torch.Tensor) -> None:
        for piece, part in _parts(cut[index], wire) if target is not None else ():
            _copy(_slice(target, piece), part)
            taken(piece)

    sizes_bytes = [sum(piece.size_bytes for piece in bucket) for bucket in cut]
    group.stream("broadcast", sizes_bytes, fill, take, ready=wait, device=wire_device)


def _slice(segments: tuple[torch.Tensor, ...] | None, piece: Piece) -> torch.Tensor:
    if segments is None:
        raise AssertionError("a slice of segments that this rank does not have")
    return segments[piece.segment][piece.start : piece.stop]


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.data_ptr() != of.data_ptr():  # the wire is often the final memory itself
        to.copy_(of)


def _wire(bucket: tuple[Piece, ...], memory: tuple[torch.Tensor, ...] | None, device: torch.device) -> torch.Tensor:
    """Return what the collective works on: the final memory itself for a single slice there, else a staging bucket."""
    if len(bucket) == 1 and memory is not None and memory[bucket[0].segment].device == device:
        return _slice(memory, bucket[0])
    return torch.empty(sum(piece.size_bytes for piece in bucket), dtype=torch.uint8, device=device)


def _parts(bucket: tuple[Piece, ...], wire: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    at = 0
    for piece in bucket:
        yield piece, wire[at : at + piece.size_bytes]
        at += piece.size_bytes
