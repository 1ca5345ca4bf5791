"""Fingerprints of tensors whose bytes arrive one after another are those of the finished tower."""

from __future__ import annotations

import torch
from torch import nn

from safeload import fingerprinting
from safeload.fingerprinting import fingerprint
from safeload.placing import tensors_of
from safeload.planning import plan, segment_views
from safeload.summing import Summing

CPU = torch.device("cpu")


def tied():
    module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(7, 5, dtype=torch.float16))
    module[2].bias = nn.Parameter(torch.empty(0, dtype=torch.float16))
    module.again = module[0].weight
    return module


def test_nobody_can_change_the_fingerprints_that_come():
    tensor = torch.arange(6.0)
    before = fingerprint(tensor)
    fingerprinting._coefficients(CPU).zero_()
    assert fingerprint(tensor) == before
    assert memoryview(fingerprinting._drawn()).readonly


def test_the_fingerprints_are_those_of_the_finished_tensors():
    source = tied()
    load_plan = plan(source)
    segments = tuple(torch.zeros(segment.size_bytes, dtype=torch.uint8) for segment in load_plan.segments)
    with Summing(load_plan, segments, device=CPU) as summing:
        for number, view in reversed(list(enumerate(segment_views(source, load_plan)))):
            segments[number].copy_(view)
            summing.add(number)
        found = summing.result(check=lambda doing: None)
    tensors = tensors_of(load_plan, segments, device=CPU)
    own = {spec.name for spec in load_plan.tensors if spec.segment >= 0 and spec.same_as is None}
    assert set(found) == own
    assert found == {name: fingerprint(tensors[name]) for name in own}
    assert found["1.running_var"] == fingerprint(source[1].running_var)
