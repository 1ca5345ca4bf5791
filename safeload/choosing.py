"""Which of the names in a folder a load needs: pure, no input or output.

Receives names; gives a `Choice`: the small files that from_pretrained of a model reads, and the one weight file or
index. Two candidates are refused rather than one of them silently preferred.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from safeload.errors import SourceError, UnsafeFormatError
from safeload.indexes import fold_name, listed

__all__ = [
    "ANY_NAME",
    "CONFIG_NAMES",
    "HOW_TO_CONVERT",
    "INDEX_PATTERNS",
    "PICKLE_SUFFIXES",
    "Choice",
    "Wanted",
    "choose_files",
]

CONFIG_NAMES: Final = ("config.json", "generation_config.json")  # all that from_pretrained of a model reads
INDEX_PATTERNS: Final = ("*.index.json", "*.index.*.json")
_STEMS: Final = ("model", "diffusion_pytorch_model")
ANY_NAME: Final = tuple(f"{stem}.safetensors" for stem in _STEMS)
_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
HOW_TO_CONVERT: Final = (
    "Convert them once, where you trust them: load with torch.load(path, weights_only=True) and write with "
    "safetensors.torch.save_file(state_dict, 'model.safetensors', metadata={'format': 'pt'}); or pass "
    "allow_pickle=True to load them with weights_only=True."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How to choose among the files of a folder; fields as the arguments of `resolve`."""

    subfolder: str = ""
    variant: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The files to take; exactly one of `weights` and `index` is set, `load_as` as in `Checkpoint`."""

    small: tuple[str, ...]
    weights: str | None
    index: str | None
    load_as: tuple[str, ...]
    pickled: bool


def choose_files(names: Iterable[str], wanted: Wanted, *, where: str) -> Choice:
    """Choose, from the names in a folder, the ones that a load needs.

    Args:
        names: All names directly in the folder.
        wanted: How to choose.
        where: The folder or repository, for messages.

    Returns:
        The choice: small files, and the one weight file or index.

    Raises:
        SourceError: No weights, or more than one candidate; a name that differs only in case or Unicode form is said.
        UnsafeFormatError: Only pickle files are there.
    """
    variant = wanted.variant
    present = sorted(names)
    small: list[str] = [name for name in CONFIG_NAMES if name in present]
    if wanted.trust_remote_code:
        small += [name for name in present if name.endswith(".py")]
    candidates = _candidates(present, _STEMS, "safetensors", variant)
    looked_for = [
        _with_variant(f"{stem}.safetensors{tail}", variant) for stem in _STEMS for tail in ("", ".index.json")
    ]
    if not candidates and variant is None:
        known = {fold_name(name) for name in ANY_NAME}  # Model.safetensors is a mistake, not a name of one's own
        others = [name for name in present if name.endswith(".safetensors") and fold_name(name) not in known]
        candidates = [(name, ANY_NAME) for name in others]
        looked_for.append("one *.safetensors")
    pickled = not candidates
    if pickled and wanted.allow_pickle:
        candidates = _candidates(present, _PICKLE_STEMS, "bin", variant)
    if len(candidates) > 1:
        raise SourceError(
            f"{where}: ambiguous, there are {listed(name for name, _ in candidates)}: keep one, or give the path of "
            "one file.",
            path=where,
            looked_for=looked_for,
        )
    if not candidates:
        raise _nothing_found(present, where=where, looked_for=looked_for, variant=variant)
    name, load_as = candidates[0]
    is_index = name.endswith(".json")
    return Choice(
        small=tuple(small),
        weights=None if is_index else name,
        index=name if is_index else None,
        load_as=load_as,
        pickled=pickled,
    )


def _candidates(
    present: list[str], stems: tuple[str, ...], suffix: str, variant: str | None
) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, tuple[str, ...]]] = []
    for stem in stems:
        single = _with_variant(f"{stem}.{suffix}", variant)
        index = _with_variant(f"{stem}.{suffix}.index.json", variant)
        old_index = f"{stem}.{variant}.{suffix}.index.json"  # what diffusers wrote before 0.29
        found += [(name, (single,)) for name in (single,) if name in present]
        found += [(name, (index,)) for name in dict.fromkeys((index, old_index)) if name in present]
    return found


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}" if variant else name


def _nothing_found(present: list[str], *, where: str, looked_for: list[str], variant: str | None) -> SourceError:
    pickles = [name for name in present if name.endswith((*PICKLE_SUFFIXES, ".bin.index.json"))]
    others = [name for name in present if name.endswith((".safetensors", ".safetensors.index.json"))]
    near = [name for name in present for wanted in looked_for if fold_name(name) == fold_name(wanted)]
    hint = f" There is {listed(map(ascii, near))}: names are compared byte for byte." if near else ""
    if variant and others:
        hint = f" variant={variant!r} was asked for; there are {listed(others)}."
    if pickles and not others and not near:
        return UnsafeFormatError(
            f"{where}: only pickle files ({listed(pickles)}), which can run code when loaded. {HOW_TO_CONVERT}",
            path=where,
            looked_for=looked_for,
        )
    return SourceError(
        f"{where}: no weights; looked for {', '.join(looked_for)}.{hint}", path=where, looked_for=looked_for
    )
