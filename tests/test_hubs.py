"""Repositories, against a Hub on localhost and the unmodified client: the right digest source, or the right error."""

import hashlib
import importlib.util
import os
import socket
import time
import types

import pytest

from safeload.errors import IntegrityError, SourceError, UnsafeFormatError, UnverifiedError
from safeload.resolving import resolve
from safeload.sealing import seal
from safeload.verifying import UnverifiedWarning, expect, verify
from tests.fakehub import FakeHub
from tests.files import sharded, single, weights, write

REPO = "org/tower"


def point_client_at(monkeypatch, tmp_path, endpoint):
    from huggingface_hub import constants, file_download

    impatient = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr(file_download, "time", impatient, raising=False)  # a second between two tries, five times
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    for module in (constants, file_download):  # older clients import the name
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=module is constants)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub() as hub:
        point_client_at(monkeypatch, tmp_path, hub.endpoint)
        yield hub


@pytest.fixture
def xet_hub(monkeypatch, tmp_path):
    pytest.importorskip("hf_xet", reason="this client downloads without Xet")
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    with FakeHub(xet=True) as hub:
        point_client_at(monkeypatch, tmp_path, hub.endpoint)
        yield hub


def check(origin, *, mode="auto", manifest=None, manifest_sha256=None, **where):
    """Run the source's stages up to the verdict."""
    checkpoint = resolve(origin, **where)
    expected = expect(checkpoint, verify=mode, manifest=manifest, manifest_sha256=manifest_sha256)
    with seal(checkpoint, expected) as sealed:
        return verify(expected, sealed.digests, mode=mode)


@pytest.mark.parametrize("files", [single(), sharded()], ids=["single", "sharded"])
def test_fresh_then_pinned_then_offline(hub, files):
    commit = hub.commit(REPO, {**files, "README.md": b"not needed", "pytorch_model.bin": b"not wanted"})
    fresh = check(REPO)
    assert (fresh.provenance, sorted(fresh.checked)) == ("hub", sorted(files))
    assert fresh.corruption_only == tuple(name for name in fresh.checked if name.endswith(".json"))
    assert not any("README" in line or "pytorch_model" in line for line in hub.log)
    hub.log.clear()
    pinned = check(REPO, revision=commit)
    assert (pinned.provenance, pinned.digest, hub.log) == ("cache", fresh.digest, [])
    offline = check(REPO, local_files_only=True, mode="strict")
    assert (offline.provenance, offline.digest, hub.log) == ("cache", fresh.digest, [])


def test_offline_mode_of_the_environment(hub, monkeypatch):
    from huggingface_hub import constants

    hub.commit(REPO, single())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"org/tower.*not in the cache"):
        check(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    check(REPO)
    hub.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check(REPO).provenance == "cache"
    assert hub.log == []


def test_moved_main_is_followed_as_one_commit(hub):
    old = hub.commit(REPO, sharded())
    first = check(REPO)
    new = hub.commit(REPO, sharded(seed=10))
    assert resolve(REPO).commit == new
    assert check(REPO).digest != first.digest
    assert check(REPO, revision=old).digest == first.digest


def test_lock_of_another_commit_is_refused(hub, tmp_path):
    files = single()
    old = hub.commit(REPO, files)
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    lock = tmp_path / "SHA256SUMS"
    lock.write_text(f"# repo: {REPO}\n# revision: {old}\n{lines}")
    assert check(REPO, manifest=lock).provenance == "pinned"
    hub.commit(REPO, single(seed=3))
    with pytest.raises(IntegrityError, match=old):
        check(REPO, manifest=lock)
    assert check(REPO, manifest=lock, revision=old).provenance == "pinned"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_tampered_body_of_the_same_size(hub, name):
    hub.commit(REPO, single())
    hub.tamper[name] = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(IntegrityError) as caught:
        check(REPO)
    assert caught.value.provenance == "hub"
    assert caught.value.path.endswith(name)
    assert "force-download" in caught.value.message


def test_corrupted_cache_is_found_offline_and_the_blob_is_named(hub):
    commit = hub.commit(REPO, single())
    check(REPO)
    path = resolve(REPO, revision=commit).folder / "model.safetensors"
    blob = os.path.realpath(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with open(path, "wb") as file:  # through the link, into the blob
        file.write(data)
    with pytest.raises(IntegrityError, match=blob) as caught:
        check(REPO, local_files_only=True)
    assert caught.value.provenance == "cache"


def test_truncated_body(hub):
    hub.commit(REPO, single())
    hub.cut.add("model.safetensors")
    with pytest.raises(SourceError, match=REPO):
        check(REPO)


def test_file_that_is_listed_but_not_served(hub):
    hub.commit(REPO, sharded())
    hub.hidden.add("two.safetensors")
    with pytest.raises(SourceError, match=r"two\.safetensors"):
        check(REPO)


def test_shard_that_the_repository_does_not_have(hub):
    files = sharded()
    del files["two.safetensors"]
    hub.commit(REPO, files)
    with pytest.raises((SourceError, IntegrityError), match=r"two\.safetensors"):
        check(REPO)


def test_index_that_leaves_the_folder(hub):
    from safeload.errors import CheckpointError
    from tests.files import index

    hub.commit(REPO, {**sharded(), "model.safetensors.index.json": index({"a": "../../../etc/x.safetensors"})})
    with pytest.raises(CheckpointError, match="etc"):
        check(REPO)


def test_only_pickle_in_the_repository(hub):
    hub.commit(REPO, {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(UnsafeFormatError, match="pytorch_model"):
        check(REPO)


@pytest.mark.parametrize(
    ("status", "match"),
    [
        ((401, "RepoNotFound"), "private"),
        ((403, "GatedRepo"), "access has to be asked for"),
        ((404, "RepoNotFound"), "no repository"),
        ((404, "RevisionNotFound"), "no such revision"),
        ((500, ""), "the Hub answered 500"),
        ((503, ""), "the Hub answered 503"),
    ],
)
def test_refusals_say_what_was_looked_for(hub, status, match):
    hub.commit(REPO, single())
    hub.status = status
    start = time.monotonic()
    with pytest.raises(SourceError, match=match) as caught:
        check(REPO)
    assert REPO in caught.value.message
    assert time.monotonic() - start < 5


@pytest.fixture
def dead_endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_dead_server(monkeypatch, tmp_path, dead_endpoint):
    point_client_at(monkeypatch, tmp_path, dead_endpoint)
    start = time.monotonic()
    with pytest.raises(SourceError, match="cannot be reached"):
        check(REPO)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("outage", ["dead", "503"])
def test_outage_with_a_warm_cache_is_said_and_the_cache_used(hub, monkeypatch, tmp_path, dead_endpoint, outage):
    hub.commit(REPO, single())
    fresh = check(REPO)
    if outage == "dead":
        point_client_at(monkeypatch, tmp_path, dead_endpoint)
    hub.status = (503, "")
    start = time.monotonic()
    with pytest.warns(UserWarning, match="Using commit"):
        found = check(REPO)
    assert (found.provenance, found.digest) == ("cache", fresh.digest)
    assert time.monotonic() - start < 5


def test_without_symlinks_the_listing_kept_on_disk_is_used(hub, monkeypatch):
    from huggingface_hub import constants, file_download

    if hasattr(constants, "HF_HUB_DISABLE_SYMLINKS"):
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    else:
        monkeypatch.setattr(file_download, "are_symlinks_supported", lambda *args: False)
    commit = hub.commit(REPO, single())
    fresh = check(REPO)
    folder = resolve(REPO, revision=commit).folder
    assert not (folder / "model.safetensors").is_symlink()
    if (folder.parent.parent / "trees").exists():
        assert check(REPO, local_files_only=True).provenance == "cache"
    else:  # older clients keep nothing in this mode: asked again where that is allowed, else said aloud or refused
        assert check(REPO, revision=commit).provenance == "hub"
        with pytest.warns(UnverifiedWarning):
            assert check(REPO, local_files_only=True).digest == fresh.digest
        with pytest.raises(UnverifiedError):
            check(REPO, local_files_only=True, mode="strict")


needs_shared_store = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub.utils._shared_blobs") is None,
    reason="this client keeps no store of blobs shared by repositories",
)


@needs_shared_store
def test_xet_two_hop_store(xet_hub):
    data = weights("a", "b")
    xet_hub.commit(REPO, {"config.json": b"{}", "model.safetensors": data})
    assert check(REPO).provenance == "hub"
    folder = resolve(REPO, local_files_only=True).folder
    blob = folder / os.readlink(folder / "model.safetensors")
    assert blob.is_symlink(), "the layout that this test is about: the blob is a link into the shared store"
    for tree in (folder.parent.parent / "trees").iterdir():
        tree.unlink()  # the names of the links are then all there is, one hop and no more
    assert check(REPO, local_files_only=True).provenance == "cache"


@needs_shared_store
def test_xet_store_entry_corrupted_for_another_repository(xet_hub):
    files = {"config.json": b"{}", "model.safetensors": weights("a", "b")}
    xet_hub.commit(REPO, files)
    check(REPO)
    path = resolve(REPO, local_files_only=True).folder / "model.safetensors"
    entry = os.path.realpath(path)
    os.chmod(entry, 0o644)
    with open(entry, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    xet_hub.commit("org/other", files)
    with pytest.raises(IntegrityError, match=entry):
        check("org/other")


def test_xet_body_tampered_with(xet_hub):
    xet_hub.commit(REPO, single())
    xet_hub.tamper["model.safetensors"] = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(IntegrityError) as caught:
        check(REPO)
    assert caught.value.provenance == "hub"


@pytest.mark.parametrize("copied", [False, True])
def test_local_dir_keeps_digests_also_after_main_moved(hub, tmp_path, copied):
    import shutil

    from huggingface_hub import snapshot_download

    hub.commit(REPO, sharded())
    folder = tmp_path / "local"
    snapshot_download(REPO, local_dir=folder)
    hub.commit(REPO, sharded(seed=5))
    if copied:
        folder = shutil.copytree(folder, tmp_path / "copy")
    hub.log.clear()
    assert check(folder, mode="strict").provenance == "local"
    assert hub.log == []
    data = bytearray((folder / "two.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "two.safetensors").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"two\.safetensors"):
        check(folder)


def test_path_into_the_cache_is_known_as_such(hub):
    hub.commit(REPO, single())
    folder = resolve(REPO).folder
    hub.log.clear()
    assert check(folder, mode="strict").provenance == "cache"
    assert hub.log == []


def test_subfolder_and_variant(hub):
    files = {
        "model_index.json": b"{}",
        "unet/config.json": b"{}",
        "unet/diffusion_pytorch_model.fp16.safetensors": weights("a"),
        "unet/diffusion_pytorch_model.safetensors": weights("b"),
    }
    commit = hub.commit(REPO, files)
    fresh = check(REPO, subfolder="unet", variant="fp16")
    assert fresh.checked == ("config.json", "diffusion_pytorch_model.fp16.safetensors")
    hub.log.clear()
    assert check(REPO, subfolder="unet", variant="fp16", revision=commit).digest == fresh.digest
    assert hub.log == []
    with pytest.raises(SourceError, match="variant='bf16'"):
        check(REPO, subfolder="unet", variant="bf16")


def test_partial_snapshot_of_a_pinned_commit_is_completed(hub):
    from huggingface_hub import hf_hub_download

    commit = hub.commit(REPO, sharded())
    for name in ("config.json", "model.safetensors.index.json", "one.safetensors"):
        hf_hub_download(REPO, name, revision=commit)
    assert check(REPO, revision=commit).provenance == "hub"


def test_copied_snapshot_has_no_digest_and_says_so(hub, tmp_path):
    import shutil

    hub.commit(REPO, single())
    copy = shutil.copytree(resolve(REPO).folder, tmp_path / "copy")
    with pytest.warns(UnverifiedWarning, match="safeload lock"):
        assert check(copy).provenance == "none"
    with pytest.raises(UnverifiedError, match="safeload lock"):
        check(copy, mode="strict")


def test_folder_that_looks_like_a_repository_id_wins(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "tower", single())
    with pytest.warns(UnverifiedWarning):
        check(REPO)
    assert hub.log == []
