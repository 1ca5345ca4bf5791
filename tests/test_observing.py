"""The watch over opened files sees each road by which a load can open one."""

import mmap
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from safeload.observing import observe_opens


@pytest.fixture
def files(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.arange(4096.0)}, tmp_path / name)
    return [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def python_open(path):
    path.read_bytes()


def os_open(path):
    os.close(os.open(path, os.O_RDONLY))


def rust_open(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        file.get_tensor("x")


def load_by_safetensors(path):
    load_file(path)


def torch_map(path):
    return torch.from_file(str(path), size=64, dtype=torch.uint8)  # torch's own open, no audit event


def by_a_link(path):
    link = path.with_suffix(".link")
    link.symlink_to(path)
    load_file(link)


def by_a_relative_path(path):
    load_file(os.path.relpath(path))


ROADS = [python_open, os_open, rust_open, load_by_safetensors, torch_map, by_a_link, by_a_relative_path]


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_each_road_is_seen(files, road):
    if road is torch_map and not Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell what is mapped")
    with observe_opens(files) as opened:
        kept = road(files[0])
    assert opened.names == ("a.safetensors",)
    del kept


def test_nothing_is_seen_where_nothing_was_opened(files):
    with observe_opens(files) as opened:
        (files[0].parent / "other").write_text("x")
        os.stat(files[0])
    assert opened.names == ()


def test_a_copy_elsewhere_is_another_file(files, tmp_path):
    copy = tmp_path / "copy.safetensors"
    shutil.copy(files[0], copy)
    with observe_opens(files) as opened:
        load_file(copy)
        with copy.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[:1]
    assert opened.names == ()


def test_the_watch_ends_with_its_block(files):
    import safetensors
    import safetensors.torch

    before = safetensors.safe_open
    with observe_opens(files) as opened:
        assert safetensors.torch.safe_open is not before
    assert safetensors.safe_open is safetensors.torch.safe_open is before
    load_file(files[0])
    assert opened.names == ()
