"""An adversary changes the folder at any moment: what is loaded is what was hashed, or a clear error; no signal."""

import hashlib
import itertools
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest

from safeload.errors import CheckpointError, IntegrityError, SafeLoadError, SourceError
from tests.files import clip_sharded, clip_single, clip_tensors, lock, write
from tests.ranks import run_on_ranks

WEIGHTS = {"single": "model.safetensors", "sharded": "model-00002-of-00002.safetensors"}


def files_of(layout, seed=0):
    return clip_single(seed) if layout == "single" else clip_sharded(seed)


def overwrite(path, other):
    with open(path, "r+b") as file:
        file.write(other)


def swap_for_link(path, other):
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(other)
    path.unlink()
    path.symlink_to(elsewhere)


def rename_over(path, other):
    new = path.with_name("new")
    new.write_bytes(other)
    new.replace(path)


ATTACKS = {
    "overwrite": overwrite,
    "truncate": lambda path, other: os.truncate(path, 100),
    "empty": lambda path, other: os.truncate(path, 0),
    "grow": lambda path, other: os.truncate(path, 2 * path.stat().st_size),
    "rename": rename_over,
    "symlink": swap_for_link,
    "unlink": lambda path, other: path.unlink(),
    "remove the folder": lambda path, other: shutil.rmtree(path.parent),
}
MOMENTS = (
    "after resolve",
    "after expect",
    "between open and read",
    "while read",
    "before load",
    "while loaded",
    "after",
)


class Strike:
    """Carries out the attack once, at its moment."""

    def __init__(self, folder, layout, attack, moment):
        self.path = folder / WEIGHTS[layout]
        self.other = files_of(layout, seed=1)[self.path.name]
        self.attack, self.moment, self.done = ATTACKS[attack], moment, False

    def __call__(self, moment):
        if moment == self.moment and not self.done:
            self.done = True
            self.attack(self.path, self.other)


def hook(strike, patch):
    """Let the strike come between the opening and the first read, and between two chunks of one file."""
    from safeload import reading

    original = reading._read_chunk

    def read_chunk(source, buffer):
        if source.name == strike.path.name:
            strike("between open and read")
        chunk = original(source, buffer)
        if source.name == strike.path.name:
            strike("while read")
        return chunk

    patch.setattr(reading, "_CHUNK_BYTES", 1000)
    patch.setattr(reading, "_read_chunk", read_chunk)


def use_memory(memory, patch):
    """Have the system offer no memory that can be sealed, unless it is to."""
    if memory != "memfd":
        patch.delattr(os, "memfd_create")


def load_under_attack(folder, strike, memory):
    """Load with the strike at its moment; returns the digests of what was loaded, and of the tensors in it."""
    from transformers import CLIPVisionModel

    from safeload.examining import examine
    from safeload.resolving import resolve
    from safeload.sealing import open_folder, seal
    from safeload.verifying import expect, verify

    with pytest.MonkeyPatch.context() as patch:
        hook(strike, patch)
        use_memory(memory, patch)
        checkpoint = resolve(folder)
        strike("after resolve")
        manifest = expect(checkpoint)
        strike("after expect")
        with seal(checkpoint, manifest) as sealed:
            assert all((file.path is None) == (memory == "memfd") for file in sealed.files)
            verify(manifest, sealed.digests)
            examine(sealed)
            strike("before load")
            with open_folder(sealed) as private:
                strike("while loaded")
                model = CLIPVisionModel.from_pretrained(private)
            expected = {name: raw for file in sealed.weight_files for name, raw in unpack(sealed.read(file.name))}
            digests = {file.name: file.sha256 for file in sealed.files}
            assert digests == {name: hashlib.sha256(sealed.read(name)).hexdigest() for name in sealed.names}
    strike("after")
    assert strike.done
    assert values_of(model) == expected
    return digests


def unpack(data):
    """The tensors of a safetensors file, as bytes by name."""
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + place for place in entry["data_offsets"])
            yield name, data[begin:end]


def values_of(model):
    values = model.state_dict().items()
    return {f"vision_model.{name.removeprefix('vision_model.')}": value.numpy().tobytes() for name, value in values}


def run_all(tmp_path, memory, layout):
    """All attacks at all moments, with and without a lock; the outcome of each by its name."""
    outcomes = {}
    warnings.filterwarnings("ignore", message=".*no expected digest")
    moments = MOMENTS if layout == "single" else MOMENTS[3:5]
    for attack, moment, locked in itertools.product(ATTACKS, moments, (True, False)):
        folder = write(Path(tmp_path) / f"{attack}-{moment}-{locked}", files_of(layout))
        if locked:
            (folder / "SHA256SUMS").write_text(lock(files_of(layout)))
        try:
            outcome = load_under_attack(folder, Strike(folder, layout, attack, moment), memory)
        except SafeLoadError as error:
            outcome = error
        outcomes[attack, moment, locked] = outcome
    return outcomes


@pytest.mark.parametrize("memory", ["memfd", "private file"])
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_what_is_loaded_is_what_was_hashed(memory, layout, tmp_path):
    (result,) = run_on_ranks(1, run_all, tmp_path, memory, layout, timeout_s=100, store="none")
    assert result.ok, result.trace + result.output
    assert len(result.value) >= 2 * 2 * len(ATTACKS)
    good = {name: hashlib.sha256(data).hexdigest() for name, data in files_of(layout).items()}
    for (attack, moment, locked), outcome in result.value.items():
        case = f"{attack}, {moment}, locked={locked}: {outcome!r:.500}"
        too_late = moment in ("before load", "while loaded", "after")
        if isinstance(outcome, SafeLoadError):
            assert not too_late, case
            assert type(outcome) in (SourceError, IntegrityError, CheckpointError), case
        elif locked or too_late:
            assert outcome == good, case
    assert any(isinstance(outcome, IntegrityError) for outcome in result.value.values())


@pytest.mark.parametrize("memory", ["memfd", "private file"])
def test_tensors_stay_what_they_were_after_the_load(memory, tmp_path):
    (result,) = run_on_ranks(1, attack_after_load, tmp_path, memory, timeout_s=60, store="none")
    assert result.ok, result.trace + result.output


def attack_after_load(tmp_path, memory):
    """Everything is closed, and the file emptied: the tensors keep their values, and can still be written to."""
    from transformers import CLIPVisionModel

    from safeload.digests import Manifest
    from safeload.resolving import resolve
    from safeload.sealing import open_folder, seal

    folder = write(Path(tmp_path) / "tower", clip_single())
    with pytest.MonkeyPatch.context() as patch:
        use_memory(memory, patch)
        with seal(resolve(folder), Manifest(provenance="none", source="")) as sealed, open_folder(sealed) as private:
            model = CLIPVisionModel.from_pretrained(private)
    overwrite(folder / "model.safetensors", clip_single(seed=1)["model.safetensors"])
    os.truncate(folder / "model.safetensors", 0)
    good = {name: raw for name, (_, raw) in clip_tensors().items()}
    assert values_of(model) == good
    for parameter in model.parameters():
        parameter.data.zero_()
    assert all(not any(raw) for raw in values_of(model).values())
