"""Repo id, folder or file -> the files that a load needs, by name.

Receives what the caller wrote in place of `pretrained_model_name_or_path`; gives a `Checkpoint`: where the files are,
what they are called, and which of them are weights. Only names are looked at here, no file of the checkpoint is opened,
so nothing said here about a file can be outdated by the time `sealing` opens it. Which shards an index names is read
later, from the sealed bytes of the index.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safeload.errors import CheckpointError, SourceError, UnsafeFormatError
from safeload.indexes import fold_name, is_plain_name

__all__ = ["Checkpoint", "choose_files", "resolve"]

CONFIG_NAMES: Final = ("config.json", "generation_config.json")  # all that from_pretrained of a model reads
_STEMS: Final = ("model", "diffusion_pytorch_model")
_ANY_NAME: Final = tuple(f"{stem}.safetensors" for stem in _STEMS)
_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a load needs, by name; nothing has been opened yet.

    `folder` holds the files; `small` are the JSON (and, where allowed, Python) files; exactly one of `weights` and
    `index` is set. `load_as` are the names under which transformers and diffusers look for `weights` or `index`.
    `origin` is what the caller wrote, `repo_id` and `commit` are set for a repository of the Hub. Names are relative
    to `folder`, which is already the `subfolder`.
    """

    origin: str
    folder: Path
    small: tuple[str, ...]
    weights: str | None
    index: str | None
    load_as: tuple[str, ...]
    subfolder: str = ""
    variant: str | None = None
    repo_id: str | None = None
    commit: str | None = None
    pickled: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All the names known before the index is read."""
        return (*self.small, *(name for name in (self.weights, self.index) if name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    small: tuple[str, ...]
    weights: str | None
    index: str | None
    load_as: tuple[str, ...]
    pickled: bool


def resolve(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Find the files that a load of this checkpoint needs.

    Args:
        pretrained_model_name_or_path: A folder, one .safetensors file, or the id of a repository.
        revision: Branch, tag or commit of a repository.
        subfolder: Plain relative folder below it.
        variant: As in from_pretrained: "fp16" takes `model.fp16.safetensors`.
        cache_dir: The Hub cache; None is the usual one.
        token: For private and gated repositories.
        local_files_only: Make no request.
        allow_pickle: Take `.bin` files where there is nothing safer.
        trust_remote_code: Take the repository's Python files too.

    Returns:
        The checkpoint, by name.

    Raises:
        SourceError: Not found or ambiguous; says what was looked for and where.
        UnsafeFormatError: Only pickle files are there.

    Ranks:
        Source rank only; no other rank looks at the checkpoint.
    """
    origin = os.fspath(pretrained_model_name_or_path)
    if subfolder and not is_plain_name(subfolder):
        raise SourceError(f"subfolder={subfolder!r} is not a plain relative path.", path=origin)
    local = Path(origin).expanduser()
    mode = _mode_of(local)
    if mode is not None and stat.S_ISDIR(mode):
        folder = local / subfolder
        choice = choose_files(
            _list_names(folder, origin),
            where=str(folder),
            variant=variant,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        return _checkpoint(choice, origin=origin, folder=folder, subfolder=subfolder, variant=variant)
    if mode is not None:
        return _resolve_file(local, origin=origin)
    raise SourceError(f"{origin}: no such folder or file.", path=origin, looked_for=[str(local.absolute())])


def choose_files(
    names: Iterable[str], *, where: str, variant: str | None, allow_pickle: bool, trust_remote_code: bool
) -> _Choice:
    """Choose, from the names in a folder, the ones that a load needs.

    Args:
        names: All names directly in the folder.
        where: The folder or repository, for messages.
        variant: As in from_pretrained.
        allow_pickle: Whether `.bin` files may be taken where there is nothing safer.
        trust_remote_code: Whether Python files are taken too.

    Returns:
        The choice: small files, and the one weight file or index.

    Raises:
        SourceError: No weights, or more than one candidate; a name that differs only in case or Unicode form is said.
        UnsafeFormatError: Only pickle files are there.
    """
    present = sorted(names)
    small: list[str] = [name for name in CONFIG_NAMES if name in present]
    if trust_remote_code:
        small += [name for name in present if name.endswith(".py")]
    candidates = _candidates(present, _STEMS, "safetensors", variant)
    looked_for = [
        _with_variant(f"{stem}.safetensors{tail}", variant) for stem in _STEMS for tail in ("", ".index.json")
    ]
    if not candidates and variant is None:
        candidates = [(name, _ANY_NAME) for name in present if name.endswith(".safetensors")]
        looked_for.append("one *.safetensors")
    pickled = not candidates
    if pickled and allow_pickle:
        candidates = _candidates(present, _PICKLE_STEMS, "bin", variant)
    if len(candidates) > 1:
        raise SourceError(
            f"{where}: ambiguous, there are {', '.join(name for name, _ in candidates)}: keep one, or give the path of "
            "one file.",
            path=where,
            looked_for=looked_for,
        )
    if not candidates:
        raise _nothing_found(present, where=where, looked_for=looked_for, variant=variant)
    name, load_as = candidates[0]
    is_index = name.endswith(".json")
    return _Choice(
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
    pickles = [name for name in present if name.endswith((*_PICKLE_SUFFIXES, ".bin.index.json"))]
    others = [name for name in present if name.endswith((".safetensors", ".safetensors.index.json"))]
    near = [name for name in present for wanted in looked_for if fold_name(name) == fold_name(wanted)]
    hint = f" There is {', '.join(map(ascii, near))}: names are compared byte for byte." if near else ""
    if variant and others:
        hint = f" variant={variant!r} was asked for; there are {', '.join(others[:5])}."
    if pickles and not others and not near:
        return UnsafeFormatError(
            f"{where}: only pickle files ({', '.join(pickles[:5])}), which can run code when loaded. Convert them "
            "once, where you trust them: load with torch.load(path, weights_only=True) and write with "
            "safetensors.torch.save_file(state_dict, 'model.safetensors', metadata={'format': 'pt'}); or pass "
            "allow_pickle=True to load them with weights_only=True.",
            path=where,
            looked_for=looked_for,
        )
    return SourceError(
        f"{where}: no weights; looked for {', '.join(looked_for)}.{hint}", path=where, looked_for=looked_for
    )


def _checkpoint(choice: _Choice, *, origin: str, folder: Path, subfolder: str, variant: str | None) -> Checkpoint:
    return Checkpoint(
        origin=origin,
        folder=folder,
        small=choice.small,
        weights=choice.weights,
        index=choice.index,
        load_as=choice.load_as,
        pickled=choice.pickled,
        subfolder=subfolder,
        variant=variant,
    )


def _resolve_file(path: Path, *, origin: str) -> Checkpoint:
    if path.suffix != ".safetensors":
        kind = UnsafeFormatError if path.name.endswith(_PICKLE_SUFFIXES) else SourceError
        raise kind(f"{origin}: not a .safetensors file; expected a folder or a .safetensors file.", path=origin)
    return Checkpoint(origin=origin, folder=path.parent, small=(), weights=path.name, index=None, load_as=_ANY_NAME)


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ELOOP, EACCES, ENAMETOOLONG, a NUL in the name
        raise SourceError(f"{path}: cannot be looked at: {error}.", path=str(path)) from error


def _list_names(folder: Path, origin: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        raise SourceError(f"{origin}: cannot list {folder}: {error.strerror}.", path=str(folder)) from error


def require_known_weights(config: object, checkpoint: Checkpoint) -> None:
    """Refuse a config that sends transformers to weights other than the ones that were chosen.

    Args:
        config: The parsed `config.json`.
        checkpoint: What was chosen.

    Raises:
        CheckpointError: `transformers_weights` names another file.
    """
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is not None and named not in (checkpoint.weights, checkpoint.index):
        chosen = checkpoint.weights or checkpoint.index
        raise CheckpointError(
            f"config.json: transformers_weights names {named!r}, which is not the file that was chosen ({chosen}): "
            "rename the file to model.safetensors and drop the key.",
            path="config.json",
        )
