"""Numbers of one gradient, taken where it is.

Receives gradients; gives their extremes, norms and counts, with no copy of a whole gradient and one wait a device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from safeload.rewrapping import local_part
from safeload.walking import is_lazy

__all__ = ["DECADES", "count_decades", "local_gradient", "measure_all"]

DECADES: Final = range(-12, 6)  # of the magnitudes in a histogram; float16 goes from 6e-8 to 65504
_PIECE: Final = 4 << 20  # elements at a time where a copy in float64 cannot be helped: 32 MiB


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The part of a gradient that is on this rank; the values of a sparse one. None: there is none."""
    if is_lazy(parameter) or parameter.grad is None:
        return None
    gradient = local_part(parameter.grad.detach())
    # what a sparse gradient does not hold is zero, and is counted as such in `_row`
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as numbers that can be compared: complex ones as pairs, float8 as float32."""
    if gradient.is_complex():
        return torch.view_as_real(gradient)
    return gradient if gradient.is_floating_point() and gradient.dtype.itemsize > 1 else gradient.float()


def _measure(gradient: torch.Tensor) -> torch.Tensor:
    """Min, max, norm and nonzeros of a gradient, on its device: no whole copy of it, and no wait."""
    wide = torch.float32 if gradient.device.type == "mps" else torch.float64
    real = _real(gradient)
    low, high = torch.aminmax(real)  # NaN goes through both, infinity shows in one: so `finite` costs no pass
    # a norm in another dtype makes a copy in that dtype first
    norms = [torch.linalg.vector_norm(piece, dtype=wide) for piece in _pieces(real.reshape(-1))]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return torch.stack([low.to(wide), high.to(wide), norm, torch.count_nonzero(gradient).to(wide)])


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start : start + _PIECE] for start in range(0, flat.numel(), _PIECE)]


def measure_all(gradients: list[torch.Tensor | None]) -> list[list[float] | None]:
    """Measure every gradient that has elements here, with one wait a device."""
    measured: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for position, gradient in enumerate(gradients):
        if gradient is not None and gradient.numel() and gradient.device.type != "meta":
            measured.setdefault(gradient.device, []).append((position, _measure(gradient)))
    numbers: list[list[float] | None] = [None] * len(gradients)
    for found in measured.values():
        for (position, _), values in zip(found, torch.stack([each for _, each in found]).tolist(), strict=True):
            numbers[position] = values
    return numbers


def count_decades(gradient: torch.Tensor, scale: float) -> tuple[int, ...]:
    """Count magnitudes by decade; what is beyond the ends is counted at the ends, zeros and nonfinites nowhere."""
    magnitudes = _real(gradient).float().abs().div_(scale)
    magnitudes = magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0)]
    decades = magnitudes.log10_().floor_().clamp_(DECADES.start, DECADES.stop - 1) - DECADES.start
    return tuple(torch.bincount(decades.long(), minlength=len(DECADES)).tolist())
