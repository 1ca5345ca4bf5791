"""A plan carries every tensor of a module to another module, byte for byte, whatever its layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from safeload.errors import CheckpointError
from safeload.listing import list_tensors
from safeload.placing import allocate, check_module, place
from safeload.planning import LoadPlan, plan, reorder, segment_views

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Ties, views, gaps, odd dtypes, empty and 0-dim tensors, and tensors held as plain attributes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)
        self.b = nn.Linear(5, 3)
        self.b.weight = self.a.weight
        base = torch.randn(4, 6)
        self.left = nn.Parameter(base[:, :3])
        self.right = nn.Parameter(base[:, 3:])
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.wide = nn.Parameter(torch.randn(1, 5).expand(4, 5))
        self.channels = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", None)
        self.register_buffer("table", torch.arange(9).expand(1, -1), persistent=False)
        self.register_buffer("seeded", torch.rand(3), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.randn(6).to(torch.float8_e4m3fn))
        self.register_buffer("brain", torch.randn(5).to(torch.bfloat16))
        self.register_buffer("unsigned", torch.arange(5).to(torch.uint16))
        self.register_buffer("turns", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("empty", torch.empty(0, 4))
        self.original = self.table


def carry(source: nn.Module, target: nn.Module) -> None:
    """Send through JSON and bytes, as between ranks."""
    sent = LoadPlan.from_json(plan(source).to_json())
    check_module(target, sent)
    memory = allocate(sent, CPU)
    for to, of in zip(memory, segment_views(source, sent), strict=True):
        to.copy_(of)
    place(target, sent, memory, device=CPU)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


def test_every_kind_of_tensor_arrives_bit_for_bit_on_a_meta_module():
    torch.manual_seed(1)
    source = Odd()
    with torch.device("meta"):
        target = Odd()
    carry(source, target)
    got = {item.name: item for item in list_tensors(target)}
    for item in list_tensors(source):
        assert got[item.name].kind == item.kind
        assert got[item.name].persistent == item.persistent
        assert got[item.name].tensor.dtype == item.tensor.dtype, item.name
        assert got[item.name].tensor.shape == item.tensor.shape, item.name
        assert got[item.name].tensor.stride() == item.tensor.stride(), item.name
        assert same_bits(got[item.name].tensor, item.tensor), item.name


def test_ties_and_views_are_ties_and_views_again():
    source, target = Odd(), Odd()
    carry(source, target)
    assert target.a.weight is target.b.weight
    assert target.original is target.table
    assert target.right.data_ptr() - target.left.data_ptr() == 3 * 4


def test_tied_and_overlapping_memory_is_sent_once():
    planned = plan(Odd())
    by_name = {spec.name: spec for spec in planned.tensors}
    assert by_name["b.weight"].same_as == "a.weight"
    assert by_name["left"].segment == by_name["right"].segment
    assert planned.segments[by_name["wide"].segment].size_bytes == 5 * 4
    assert by_name["empty"].segment == -1


def test_neighbours_in_one_file_are_separate_segments():
    flat = torch.randn(20)
    module = nn.Module()
    module.x, module.y = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    assert [segment.size_bytes for segment in plan(module).segments] == [40, 40]


def test_parameters_flags_stay_and_gradients_are_off():
    with torch.device("meta"):
        target = nn.Linear(5, 3)
    target.weight._is_hf_initialized = True
    carry(nn.Linear(5, 3), target)
    assert target.weight._is_hf_initialized
    assert not target.weight.requires_grad


def test_the_receivers_own_dtype_and_strides_are_never_used():
    source, target = nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4)
    carry(source, target)
    assert target.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.empty(3, 5, device="meta"))), "meta"),
        (lambda m: m.register_buffer("odd", torch.eye(3).to_sparse()), "sparse"),
        (lambda m: m.register_buffer("odd", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)), "odd"),
        (lambda m: m.register_buffer("odd", torch.randn(3, dtype=torch.complex64).conj()), "odd"),
        (lambda m: m.register_buffer("odd", torch.randn(3).as_subclass(type("Sub", (torch.Tensor,), {}))), "Sub"),
    ],
)
def test_what_is_not_plain_memory_is_refused_by_name(spoil, words):
    module = nn.Linear(5, 3)
    spoil(module)
    with pytest.raises(CheckpointError, match=words) as caught:
        plan(module)
    assert len(caught.value.mismatched) == 1


def test_another_module_is_refused_with_every_difference():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(9, 5))
            self.register_buffer("bias", torch.empty(3))
            self.extra = nn.Parameter(torch.empty(1))

    with pytest.raises(CheckpointError) as caught:
        check_module(Other(), plan(nn.Linear(5, 3)))
    assert set(caught.value.mismatched) == {"weight", "bias", "extra"}
    assert "[3, 5] on the source rank, [9, 5] on this rank" in str(caught.value)


def test_a_missing_tensor_is_refused():
    with pytest.raises(CheckpointError, match="bias: on the source rank only"):
        check_module(nn.Linear(5, 3, bias=False), plan(nn.Linear(5, 3)))


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"format": 9}', b'{"format": 1}', b'{"format": 1, "tensors": [{}]}'])
def test_what_is_not_a_plan_is_refused(raw):
    with pytest.raises(CheckpointError, match="plan"):
        LoadPlan.from_json(raw)


@pytest.mark.parametrize("name", ["name", "strides", "same_as"])
def test_a_plan_that_does_not_tell_all_of_every_tensor_is_refused(name):
    fields = json.loads(plan(nn.Linear(2, 2)).to_json())
    del fields["tensors"][name][-1]
    with pytest.raises(CheckpointError, match=r"lists of \[1, 2\] values"):
        LoadPlan.from_json(json.dumps(fields).encode())
    del fields["tensors"][name]
    with pytest.raises(CheckpointError, match=f"cannot be read: KeyError.*{name}"):
        LoadPlan.from_json(json.dumps(fields).encode())


def test_an_unknown_dtype_in_a_plan_is_refused():
    fields = json.loads(plan(nn.Linear(2, 2)).to_json())
    fields["tensors"]["dtype"][0] = "float4_e2"
    target = nn.Linear(2, 2)
    sent = LoadPlan.from_json(json.dumps(fields).encode())
    with pytest.raises(CheckpointError, match="float4_e2"):
        place(target, sent, allocate(sent, CPU), device=CPU)


def test_a_plan_is_the_same_in_json_and_in_another_order():
    load_plan = plan(Odd())
    assert LoadPlan.from_json(load_plan.to_json()) == load_plan
    order = tuple(reversed(range(len(load_plan.segments))))
    turned = reorder(load_plan, order)
    assert turned != load_plan
    assert [segment.size_bytes for segment in turned.segments] == [
        segment.size_bytes for segment in reversed(load_plan.segments)
    ]
    for moved, spec in zip(turned.tensors, load_plan.tensors, strict=True):
        assert moved == replace(spec, segment=order.index(spec.segment) if spec.segment >= 0 else -1)
    assert reorder(turned, order) == load_plan
