"""torch's private operators where a later torch has changed them: drafting goes on without, and says so once."""

import types

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

from hf_hsdraft.cpu import private_operators
from hf_hsdraft.cpu.packed_weights import linears_to_pack

QUICK = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and private_operators.can_pack(torch.float32)
pytestmark = pytest.mark.skipif(not QUICK, reason="this processor has no such kernels")


@pytest.fixture
def warnings(monkeypatch):
    """What is logged; each operator is tried anew."""
    said = []
    monkeypatch.setattr(private_operators.logger, "warning", said.append)
    tried = private_operators.can_pack, private_operators.can_multiply_in_8_bits
    for each in tried:
        each.cache_clear()
    yield said
    monkeypatch.undo()
    for each in tried:
        each.cache_clear()


def other_arguments(*args):
    raise TypeError("_linear_pointwise() takes 5 arguments\nand more lines")


ZEROS = types.SimpleNamespace(default=lambda x, weight, *args: x.new_zeros(*x.shape[:-1], weight.shape[0]))
CHANGES = {
    "other arguments of the copy": ("_reorder_linear_weight", other_arguments, "TypeError: _linear_pointwise"),
    "other arguments of the product": (
        "_linear_pointwise",
        types.SimpleNamespace(default=other_arguments),
        "TypeError: _linear_pointwise",
    ),
    "another product": ("_linear_pointwise", ZEROS, "wrong"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_packed_weights_are_left_out(monkeypatch, warnings, change):
    name, changed, reason = CHANGES[change]
    target, ids = make_target(), torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert linears_to_pack(target, True), "as torch is"
    monkeypatch.setattr(torch.ops.mkldnn, name, changed)
    private_operators.can_pack.cache_clear()
    for _ in range(2):
        drafted = target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=make_drafter(target))
        assert drafted.tolist() == plain.tolist()
    assert linears_to_pack(target, True) == []
    [said] = warnings
    assert reason in said and "\n" not in said


@pytest.mark.parametrize("changed", [other_arguments, lambda x, weight, scales: x.new_zeros(len(x), len(weight))])
def test_8_bit_weights_are_left_out(monkeypatch, warnings, changed):
    drafter, ids = make_drafter(make_target(hidden_size=64)).bfloat16(), torch.arange(2, 11)[None]
    target = make_target(hidden_size=64)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", changed)
    for _ in range(2):
        drafted = target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter)
        assert drafted.tolist() == plain.tolist()
    [said] = warnings
    assert "8-bit weights" in said


def test_the_trials_pass_here(warnings):
    assert private_operators.can_pack(torch.float32) and private_operators.can_multiply_in_8_bits()
    private_operators.can_pack(torch.bfloat16)
    with torch.inference_mode(), torch.autocast("cpu"):
        private_operators.can_pack.cache_clear()
        assert private_operators.can_pack(torch.float32)
    assert warnings == []
