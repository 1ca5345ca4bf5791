"""Where the buckets travel: on one type of device on every rank, whatever each of them wants."""

from __future__ import annotations

import socket
import warnings

import pytest
import torch

from safeload.broadcasting import payload_device
from safeload.crowding import device_unit, warn_of_shared_device
from safeload.grouping import Group
from safeload.sharing import Answer, choose
from tests.ranks import run_on_ranks
from tests.towers import clip_folder


def _group(*devices):
    group = Group()
    group.devices = devices
    return group


@pytest.mark.parametrize(
    ("served", "wanted", "travels"),
    [
        (("cpu", "cuda"), ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        (("cpu", "cuda"), ["cpu", "cpu"], ["cpu", "cpu"]),
        (("cpu", "cuda"), ["cpu", "cuda:1"], ["cpu", "cpu"]),  # gloo on one rank and nccl on the other would hang
        (("cuda",), ["cpu", "cuda:1"], ["cuda", "cuda:1"]),
        (("cuda",), ["cpu", "cpu"], ["cuda", "cuda"]),
        (("cpu",), ["cuda:0", "cuda:1"], ["cpu", "cpu"]),
        ((), ["cuda:3"], ["cuda:3"]),
    ],
)
def test_every_rank_takes_the_same_type_of_device(served, wanted, travels):
    answers = [Answer(device=device, node="here", has_blocks=False) for device in wanted]
    choice = choose("auto", answers, source_rank=0)
    found = [payload_device(_group(*served), torch.device(device), choice.device_types) for device in wanted]
    assert found == [torch.device(device) for device in travels]


def test_descriptors_that_are_taken_over_are_not_inherited(tmp_path):
    import os

    from safeload.handing import Offer, take

    if not hasattr(socket, "recv_fds"):
        pytest.skip("this system hands no descriptors over")
    with open(tmp_path / "file", "wb") as file, Offer([file.fileno()]) as offer:
        from datetime import timedelta

        (fd,) = take(offer.address, 1, timeout=timedelta(seconds=5))
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_device_is_found_as_torch_2_6_tells_it(monkeypatch):
    from safeload import delivering

    def raises():  # as 2.6 does where there is no accelerator; it takes no argument
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert delivering._device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu", 0))
    assert delivering._device(None).type == "cpu"


def test_an_error_without_a_process_group_names_torchruns_rank(monkeypatch):
    from safeload.group import join_group

    monkeypatch.setenv("RANK", "3")
    assert join_group().global_rank == 3


def _answers(*units):
    return [Answer(device="cuda:0", node="here", has_blocks=False, unit=unit) for unit in units]


@pytest.mark.parametrize(
    ("units", "crowded"),
    [
        (("GPU-a", "GPU-a", "GPU-b", "GPU-a"), {0, 1, 3}),
        (("GPU-a", "GPU-b", "GPU-c"), set()),  # each process sees one GPU only, and all of them call it cuda:0
        (("", "", ""), set()),  # told with device=, or not to be had
        (("GPU-a", ""), set()),
    ],
)
def test_ranks_on_one_gpu_by_default_are_told(units, crowded):
    for rank in range(len(units)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_shared_device(_answers(*units), rank)
        assert bool(caught) == (rank in crowded)
        for each in caught:
            assert "ranks 0, 1, 3 of the group" in str(each.message)
            assert "torch.cuda.set_device" in str(each.message)


def test_the_gpu_itself_is_named_by_its_uuid(monkeypatch):
    class Properties:
        uuid = "GPU-5"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert device_unit(torch.device("cuda", 0)) == "GPU-5"
    assert device_unit(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert device_unit(torch.device("cuda", 0)) == ""


def _load_on_defaults(folder, device):
    from unittest import mock

    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained

    with (
        mock.patch("safeload.delivering.device_unit", return_value="GPU-a"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        safe_from_pretrained(CLIPVisionModel, folder, verify="off", device=device)
    return [str(each.message) for each in caught if "one and the same" in str(each.message)]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_pipeline_tells_it_where_no_device_was_asked_for(device, tmp_path):
    results = run_on_ranks(2, _load_on_defaults, clip_folder(tmp_path / "tower"), device)
    for result in results:
        assert result.ok, result.describe()
        assert len(result.value) == (device is None)
