"""Copy between the cpu and an accelerator through two small pinned buffers that are used again and again.

An accelerator takes bytes from pinned memory by itself, while the cpu fills the other buffer; from ordinary memory the
driver copies first, and everybody waits. Receives tensors of bytes; promises that a buffer is not written to until the
last copy out of it has ended, and that no more than two buckets of host memory are used. Where memory cannot be pinned,
copies are made from ordinary memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import torch

__all__ = ["Bounce", "Lane"]

_BUFFERS: Final = 2  # one is filled while the other is copied from


class Lane:
    """The way between the cpu and the accelerator of this process; tests put another in its place."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where a tensor is."""
        return tensor.device

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return uint8 memory `[size_bytes]` on a device, uninitialised."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def pin(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory `[size_bytes]`; `RuntimeError` where there is none."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, to: torch.Tensor, of: torch.Tensor) -> Callable[[], None]:
        """Put a copy from pinned memory on the accelerator's current stream; return what waits for its end."""
        to.copy_(of, non_blocking=True)
        try:
            event = torch.accelerator.current_stream(to.device).record_event()
        except RuntimeError:  # a device without events: all that it has to do comes first
            return lambda: torch.accelerator.synchronize(to.device)

        def wait() -> None:
            event.synchronize()

        return wait


class Bounce:
    """Two pinned buffers of the size of the largest bucket, made when the first one is needed.

    What is let go of, torch keeps for the next pinned tensor of the process.

    Args:
        lane: The way to the accelerator.
        size_bytes: Of the largest bucket.
    """

    def __init__(self, lane: Lane, size_bytes: int) -> None:
        self.lane = lane
        self._size_bytes = size_bytes
        self._free: list[torch.Tensor] | None = None
        self._lent: dict[int, torch.Tensor] = {}
        self._waits: dict[int, list[Callable[[], None]]] = {}

    def lend(self, size_bytes: int) -> torch.Tensor | None:
        """Return pinned memory `[size_bytes]` until it is given back, once no copy from it is under way.

        Args:
            size_bytes: At most the largest bucket.

        Returns:
            The memory; None where both buffers are lent, or memory cannot be pinned.
        """
        if self._free is None:
            self._free = self._pin()
        if not self._free:
            return None
        buffer = self._free.pop(0)  # the one that was given back longest ago
        self._wait_for(buffer.data_ptr())
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:size_bytes]

    def _pin(self) -> list[torch.Tensor]:
        try:
            return [self.lane.pin(self._size_bytes) for _ in range(_BUFFERS)]
        except (
            RuntimeError,
            AssertionError,
            NotImplementedError,
        ):  # no accelerator that pins, or a limit on locked memory
            return []

    def send(self, to: torch.Tensor, of: torch.Tensor, *, lent: torch.Tensor) -> None:
        """Copy from a buffer that was lent, or begin to.

        Args:
            to: On the accelerator.
            of: A part of `lent`.
            lent: From `lend`.
        """
        self._waits.setdefault(lent.data_ptr(), []).append(self.lane.start(to, of))

    def take_back(self, lent: torch.Tensor) -> None:
        """Take a buffer back; copies from it may be under way. Other memory is nobody's business here.

        Args:
            lent: From `lend`.
        """
        buffer = self._lent.pop(lent.data_ptr(), None)
        if buffer is not None and self._free is not None:
            self._free.append(buffer)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor begins where a buffer does that is lent."""
        return tensor.data_ptr() in self._lent

    def drain(self) -> None:
        """Wait for all copies."""
        for address in list(self._waits):
            self._wait_for(address)

    def _wait_for(self, address: int) -> None:
        for wait in self._waits.pop(address, ()):
            wait()

    def close(self) -> None:
        """Wait for all copies, after a failure whatever has become of them, and let go of the buffers."""
        with contextlib.suppress(RuntimeError):
            self.drain()
        self._waits.clear()
        self._lent.clear()
        self._free = []
