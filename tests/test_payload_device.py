"""Where the buckets travel: on one type of device on every rank, whatever each of them wants."""

from __future__ import annotations

import socket

import pytest
import torch

from safeload.broadcasting import payload_device
from safeload.grouping import Group
from safeload.sharing import Answer, choose


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
