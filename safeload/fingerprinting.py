"""Receive a tensor, give a short fingerprint of its values, much faster than a cryptographic hash.

The bytes themselves are verified once, with sha256, while the file is read. What follows is a guard against accidents:
a cast and a cast back, an optimizer's weight decay, an initialiser that writes through `.data`. A fingerprint is a dot
product of the tensor's 64-bit words with fixed odd coefficients, modulo 2**64, row by row and then over the rows. Any
change of one word changes it; a change of more words goes unseen with a chance of about 2**-64. It does not withstand
someone who wants it to collide. It depends on dtype, shape and values, not on strides or device.

A glimpse is a handful of values of each tensor: enough to see that a tensor was written as a whole, at no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["few_values", "fingerprint", "glimpse"]

_ROW_WORDS: Final = 4096  # 32 KiB a row: the coefficients stay in the first-level cache; 8.7 GB/s on one core
_BLOCK_WORDS: Final = 2**22  # words multiplied at a time where there is no integer matrix product (accelerators)
_GLIMPSE_VALUES: Final = 8
_SEED: Final = 20231


@functools.cache
def _drawn() -> bytes:
    """Draw the coefficients once a process: that takes as long as to fingerprint a megabyte. Nobody can change them."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(-(2**62), 2**62, (_ROW_WORDS,), dtype=torch.int64, generator=generator, device="cpu")
    return (drawn * 2 + 1).numpy().tobytes()


def _coefficients(device: torch.device) -> torch.Tensor:
    """Return a copy of the coefficients, `[_ROW_WORDS]`."""
    return torch.frombuffer(bytearray(_drawn()), dtype=torch.int64).to(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _words_of(raw: torch.Tensor) -> torch.Tensor:
    """Return `[n]` int64 words of `[m]` bytes, the last one padded with zeros; a view where that is possible."""
    whole = raw.numel() // 8 * 8
    if whole == raw.numel() and raw.storage_offset() % 8 == 0:
        return raw.view(torch.int64)
    padded = torch.zeros((raw.numel() + 7) // 8 * 8, dtype=torch.uint8, device=raw.device)
    padded[: raw.numel()] = raw
    return padded.view(torch.int64)


def _dot_rows(rows: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    if rows.device.type == "cpu":
        return torch.mv(rows, coefficients)
    step = _BLOCK_WORDS // _ROW_WORDS
    return torch.cat([(part * coefficients).sum(-1) for part in torch.split(rows, step)])


def _fold(words: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return one digest a row of `_ROW_WORDS` words, the last row being shorter."""
    whole = words.numel() // _ROW_WORDS * _ROW_WORDS
    parts = []
    if whole:
        parts.append(_dot_rows(words[:whole].view(-1, _ROW_WORDS), coefficients))
    if whole < words.numel():
        rest = words[whole:]
        parts.append((rest * coefficients[: rest.numel()]).sum().reshape(1))
    return torch.cat(parts)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's dtype, shape and values.

    Reads the tensor once, at about the speed of memory; equal on every device and for every stride.

    Args:
        tensor: A dense tensor with real storage. A non-contiguous one is copied first.

    Returns:
        Text such as `"float32[2,3]:00f3..."`: dtype, shape and 16 hex digits.
    """
    shape = ",".join(str(size) for size in tensor.shape)
    label = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"
    if tensor.numel() == 0:
        return f"{label}:{0:016x}"
    with torch.device(tensor.device):  # an ambient meta or default device must not reach the small helper tensors
        coefficients = _coefficients(tensor.device)
        words = _words_of(_bytes_of(tensor))
        digests = _fold(words, coefficients)
        while digests.numel() > 1:
            digests = _fold(digests, coefficients)
    return f"{label}:{int(digests.item()) % 2**64:016x}"


def few_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of at most `_GLIMPSE_VALUES` values, spread over a contiguous tensor.

    Args:
        tensor: A dense tensor, contiguous and without gradients.
    """
    step = max(1, tensor.numel() // _GLIMPSE_VALUES)
    return tensor.view(-1)[::step][:_GLIMPSE_VALUES]


def _few_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a few values; nothing is copied but them."""
    plain = tensor.detach()
    if not plain.is_contiguous():
        for dim in range(plain.dim()):
            plain = plain.narrow(dim, 0, min(plain.shape[dim], 2))
        return _bytes_of(plain)[: 8 * _GLIMPSE_VALUES]
    return _bytes_of(few_values(plain))


@torch.no_grad()
def glimpse(tensors: Sequence[torch.Tensor]) -> tuple[bytes, ...]:
    """Return a few values of each tensor, as bytes, with one transfer a device.

    Args:
        tensors: Dense tensors with real storage.

    Returns:
        One byte string a tensor, in their order.
    """
    few = [_few_bytes(tensor) for tensor in tensors]
    seen: dict[int, bytes] = {}
    for device in {part.device for part in few}:
        places = [place for place, part in enumerate(few) if part.device == device]
        joined = torch.cat([few[place] for place in places]).to("cpu").numpy().tobytes()
        start = 0
        for place in places:
            seen[place] = joined[start : start + few[place].numel()]
            start += few[place].numel()
    return tuple(seen[place] for place in range(len(few)))
