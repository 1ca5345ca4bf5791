"""Verify, lock and inspect, as functions and as commands."""

import hashlib
import json
import shutil
import subprocess
import sys
import warnings

import pytest

from safeload.auditing import inspect_checkpoint, verify_checkpoint, write_lock
from safeload.cli import main
from safeload.errors import (
    CheckpointError,
    IntegrityError,
    SafeLoadError,
    SourceError,
    UnsafeFormatError,
    UnverifiedError,
)
from safeload.locking import parse_lock
from safeload.resolving import resolve
from safeload.verifying import UnverifiedWarning
from tests.files import clip_sharded, clip_single, lock, sharded, single, weights, write
from tests.test_hubs import REPO, hub  # noqa: F401  a fixture

LAYOUTS = {"single": clip_single(), "sharded": clip_sharded()}


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    return write(tmp_path / "tower", LAYOUTS[request.param])


def run(capsys, *args):
    """Run the program; returns its exit status and what it printed as JSON."""
    capsys.readouterr()
    try:
        status = main([*map(str, args), "--json"])
    except SystemExit as end:
        return end.code, None
    return status, json.loads(capsys.readouterr().out)


def flip_last(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_lock_of_a_bare_folder_is_trust_on_first_use(folder):
    with pytest.raises(UnverifiedError, match="safeload lock"):
        verify_checkpoint(folder)
    with pytest.warns(UnverifiedWarning, match="TRUST ON FIRST USE"):
        path = write_lock(folder)
    assert path == folder / "SHA256SUMS"
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    assert done.stdout.count(b": OK") == len(list(folder.iterdir())) - 1
    assert verify_checkpoint(folder).provenance == "pinned"
    flip_last(next(folder.glob("*.safetensors")))
    with pytest.raises(IntegrityError):
        verify_checkpoint(folder)


def test_lock_is_not_replaced_unasked(folder):
    (folder / "SHA256SUMS").write_text("mine")
    with pytest.raises(SourceError, match="--force"):
        write_lock(folder)
    assert (folder / "SHA256SUMS").read_text() == "mine"
    with pytest.warns(UnverifiedWarning):
        write_lock(folder, force=True)
    assert verify_checkpoint(folder).provenance == "pinned"
    assert not list(folder.glob("tmp*"))


def test_lock_that_sha256sum_wrote(folder):
    names = [path.name for path in folder.iterdir()]
    done = subprocess.run(["sha256sum", *names], cwd=folder, check=True, capture_output=True)
    (folder / "SHA256SUMS").write_bytes(done.stdout)
    assert sorted(verify_checkpoint(folder).checked) == sorted(names)


def test_pinned_lock(folder, tmp_path):
    with pytest.warns(UnverifiedWarning):
        path = write_lock(folder, tmp_path / "lock")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert verify_checkpoint(folder, manifest=path, manifest_sha256=sha256.upper()).provenance == "pinned"
    with pytest.raises(IntegrityError, match="not the lock that was pinned"):
        verify_checkpoint(folder, manifest=path, manifest_sha256="0" * 64)
    with pytest.raises(SourceError, match="manifest_sha256 is given"):
        verify_checkpoint(folder, manifest_sha256=sha256)
    with pytest.raises(SourceError, match="no such file"):
        verify_checkpoint(folder, manifest=tmp_path / "nowhere")
    pins = {path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in folder.iterdir()}
    assert verify_checkpoint(folder, manifest=pins).provenance == "pinned"


def test_locks_of_subfolders(tmp_path):
    files = {f"unet/{name}": data for name, data in single().items()}
    write(tmp_path, files)
    (tmp_path / "SHA256SUMS").write_text(lock(files))
    assert verify_checkpoint(tmp_path, subfolder="unet").provenance == "pinned"
    (tmp_path / "SHA256SUMS").rename(tmp_path / "elsewhere")
    assert verify_checkpoint(tmp_path, subfolder="unet", manifest=tmp_path / "elsewhere").provenance == "pinned"
    (tmp_path / "unet" / "SHA256SUMS").write_text(lock(single()))
    assert verify_checkpoint(tmp_path, subfolder="unet").provenance == "pinned"


def test_lock_of_a_repository_names_it(hub, tmp_path):  # noqa: F811
    commit = hub.commit(REPO, sharded())
    path = write_lock(REPO, tmp_path / "lock")
    assert path.read_text().splitlines()[:3] == [f"# repo: {REPO}", f"# revision: {commit}", "# verified against: hub"]
    read = parse_lock(path.read_bytes(), path="lock")
    assert (read.repo_id, read.commit, sorted(read.entries)) == (REPO, commit, sorted(sharded()))
    done = subprocess.run(["sha256sum", "--strict", "-c", path], cwd=resolve(REPO).folder, check=False)
    assert done.returncode == 0


def test_lock_is_not_written_from_tampered_bytes(hub, tmp_path):  # noqa: F811
    hub.commit(REPO, single())
    hub.tamper["model.safetensors"] = lambda data: data[:-1] + b"!"
    with pytest.raises(IntegrityError):
        write_lock(REPO, tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_verify_downloads_nothing(hub):  # noqa: F811
    hub.commit(REPO, single())
    with pytest.raises(SourceError, match="not in the cache"):
        verify_checkpoint(REPO)
    assert hub.log == []
    resolve(REPO)
    hub.commit(REPO, single(seed=8))
    hub.log.clear()
    assert verify_checkpoint(REPO).provenance == "hub"
    assert not any("resolve" in line for line in hub.log)
    hub.log.clear()
    assert verify_checkpoint(REPO, local_files_only=True).provenance == "cache"
    assert hub.log == []


CACHES = {
    "good": lambda folder: None,
    "weights": lambda folder: flip_last(folder / "model.safetensors"),
    "config": lambda folder: flip_last(folder / "config.json"),
    "a file that no load opens": lambda folder: flip_last(folder / "README.md"),
    "truncated": lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
    "another blob": lambda folder: (
        (folder / "model.safetensors").unlink()
        or (folder / "model.safetensors").symlink_to((folder / "config.json").resolve())
    ),
}


@pytest.mark.parametrize("damage", CACHES)
@pytest.mark.parametrize("kind", ["cache", "local_dir"])
def test_agrees_with_the_hub_client(hub, tmp_path, damage, kind, capsys):  # noqa: F811
    from huggingface_hub import HfApi, snapshot_download

    if not hasattr(HfApi, "verify_repo_checksums"):
        pytest.skip("this client has no check of its own")
    commit = hub.commit(REPO, {**single(), "README.md": b"read me"})
    local = {"local_dir": tmp_path / "local"} if kind == "local_dir" else {}
    folder = snapshot_download(REPO, **local)
    from pathlib import Path

    CACHES[damage](Path(folder))
    theirs = HfApi().verify_repo_checksums(REPO, revision=commit if local else None, **local)
    args = [folder] if local else [REPO]
    status, found = run(capsys, "verify", *args)
    assert bool(theirs.mismatches) == (damage != "good")
    assert status == int(bool(theirs.mismatches)), found
    if not theirs.mismatches:
        assert len(found["checked"]) == theirs.checked_count


def test_commands(folder, tmp_path, capsys):
    status, failed = run(capsys, "verify", folder)
    assert (status, failed["error"]["class"]) == (1, "UnverifiedError")
    status, locked = run(capsys, "lock", folder)
    assert (status, locked["trust_on_first_use"]) == (0, True)
    assert hashlib.sha256((folder / "SHA256SUMS").read_bytes()).hexdigest() == locked["sha256"]
    status, found = run(capsys, "verify", folder, "--manifest-sha256", locked["sha256"])
    assert (status, found["provenance"], found["unchecked"]) == (0, "pinned", [])
    status, found = run(capsys, "inspect", folder)
    assert (status, found["verification"]["provenance"]) == (0, "pinned")
    assert {tensor["dtype"] for tensor in found["tensors"]} == {"F32"}
    assert run(capsys, "verify", tmp_path / "nowhere")[0] == 1
    assert run(capsys, "verify")[0] == 2
    assert run(capsys, "verify", folder, "--nonsense")[0] == 2
    flip_last(next(folder.glob("*.safetensors")))
    status, failed = run(capsys, "inspect", folder)
    assert (status, failed["error"]["class"]) == (1, "IntegrityError")


def test_commands_print_text(folder, capsys):
    assert main(["lock", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "manifest_sha256=" in out
    assert "TRUST ON FIRST USE" in err
    assert main(["verify", str(folder)]) == 0
    assert "config.json: OK" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--tensors"]) == 0
    assert "class_embedding" in capsys.readouterr().out


def test_inspect_says_what_a_class_would_take(folder, capsys):
    status, found = run(capsys, "inspect", folder, "--model-class", "CLIPVisionModel")
    assert (status, found["fit"]["error"]) == (0, None)
    assert found["fit"]["parameters"] > 1000
    status, found = run(capsys, "inspect", folder, "--model-class", "transformers.BertModel")
    assert status == 1
    assert found["fit"]["missing"] or found["fit"]["error"]
    assert run(capsys, "inspect", folder, "--model-class", "no.such.Class")[0] == 1


def test_inspect_of_a_malformed_file(folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(CheckpointError, match="trailing"):
        inspect_checkpoint(folder)


def test_program_as_a_module(folder):
    done = subprocess.run(
        [sys.executable, "-m", "safeload", "verify", str(folder), "--json"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["class"] == "UnverifiedError"


def test_single_file(tmp_path):
    write(tmp_path, {"tower.safetensors": weights("a", "b"), "other.safetensors": b"?"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedWarning)
        found = inspect_checkpoint(tmp_path / "tower.safetensors")
    assert [file.name for file in found.files] == ["tower.safetensors"]
    with pytest.raises(SafeLoadError, match="ambiguous"):
        inspect_checkpoint(tmp_path)
    shutil.copy(tmp_path / "tower.safetensors", tmp_path / "tower.bin")
    with pytest.raises(UnsafeFormatError, match="allow_pickle"):
        inspect_checkpoint(tmp_path / "tower.bin")


@pytest.mark.filterwarnings("ignore::safeload.UnverifiedWarning")
def test_a_strict_folder_holds_nothing_that_the_lock_does_not_name(tmp_path, caplog):
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained
    from tests.towers import clip_folder

    folder = clip_folder(tmp_path / "tower")
    with pytest.raises(UnverifiedError, match="asked to be strict"):
        safe_from_pretrained(CLIPVisionModel, folder, strict_folder=True)
    write_lock(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").touch()
    with caplog.at_level("INFO", logger="safeload"):
        safe_from_pretrained(CLIPVisionModel, folder, strict_folder=True)
    assert "pinned" in caplog.text
    (folder / "sub").mkdir()
    (folder / "sub" / "evil.py").touch()
    (folder / "pytorch_model.bin").touch()
    safe_from_pretrained(CLIPVisionModel, folder)
    with pytest.raises(IntegrityError, match=r"pytorch_model\.bin.*evil\.py") as caught:
        safe_from_pretrained(CLIPVisionModel, folder, strict_folder=True)
    assert caught.value.stage == "expect"
