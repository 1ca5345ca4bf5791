"""What a failed load leaves behind, and constructors that learn from an initialiser's error."""

import hashlib
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from safeload.ambient import pristine
from safeload.errors import IntegrityError
from safeload.loading import safe_from_pretrained
from tests.ranks import on_ranks


def _files(folder, module):
    """Write a good and a bad checkpoint, and a lock that names the good one."""
    for kind in ("good", "bad"):
        (folder / kind).mkdir()
        save_file(module.state_dict(), folder / kind / "model.safetensors", metadata={"format": "pt"})
    good, bad = (folder / kind / "model.safetensors" for kind in ("good", "bad"))
    raw = bytearray(good.read_bytes())
    (folder / "lock").write_text(f"{hashlib.sha256(raw).hexdigest()}  model.safetensors\n")
    raw[-9] ^= 1
    bad.write_bytes(raw)


def _kept_module_after_a_failed_load(folder):
    """The caller's own module, a callable's return value, is no tower after its bytes were refused."""
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    own_class = type(module)
    with pytest.raises(IntegrityError):
        safe_from_pretrained(lambda: module, folder / "bad", manifest=folder / "lock", device="cpu")
    assert type(module) is own_class, "unverified bytes in a module that passes for a protected, verified tower"
    tower = safe_from_pretrained(lambda: module, folder / "good", manifest=folder / "lock", device="cpu")
    assert tower is module


def test_a_refused_module_is_no_tower(tmp_path):
    _files(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    _kept_module_after_a_failed_load(tmp_path)


@on_ranks(2)
def test_a_refused_module_is_no_tower_on_two_ranks(tmp_path):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        _files(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    dist.barrier()
    _kept_module_after_a_failed_load(tmp_path)


class AsksByTrying(nn.Module):
    """Tells a vector from a matrix by whether an initialiser takes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        try:
            nn.init.kaiming_uniform_(self.weight)
            self.is_vector = False
        except ValueError:
            self.is_vector = True


@on_ranks(2)
def test_an_initialiser_refuses_on_meta_what_it_refuses_elsewhere(tmp_path):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        save_file({"weight": torch.ones(8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    tower = safe_from_pretrained(AsksByTrying, tmp_path, verify="off", device="cpu")
    assert tower.is_vector, "the peer's module is not the source's, and nobody says so"


def _slowly(count):
    for number in range(count):
        time.sleep(0.0005)
        yield number


def test_looking_for_an_original_breaks_no_tuple_that_another_thread_builds():
    failures, stop = [], threading.Event()

    def build_tuples():
        while not stop.is_set():
            try:
                tuple(_slowly(12))
            except SystemError as error:  # a tuple that somebody else refers to cannot grow
                failures.append(error)

    thread = threading.Thread(target=build_tuples)
    thread.start()
    try:
        for _ in range(20):
            pristine(_slowly, module="torch.nn.init", qualname="nowhere_")
    finally:
        stop.set()
        thread.join()
    assert not failures
