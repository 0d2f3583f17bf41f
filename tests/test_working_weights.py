"""The weights that decoding multiplies by, against the network they are made of."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import make_drafter
from torch import nn

from hf_hsdraft import working_weights as module
from hf_hsdraft.modeling_hsdraft import TargetWeights
from hf_hsdraft.working_weights import Product, WorkingWeights, working_weights


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(module, "_in_8_bits", lambda weight: None)


def drafter_of(target, injector: str = "path", **fields):
    """One whose norms' weights and biases are no ones and zeros."""
    drafter = make_drafter(target, injector=injector, **fields)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return drafter


def borrowed(drafter, target) -> TargetWeights:
    return drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())


@torch.no_grad()
@pytest.mark.parametrize("head", ["target", "trained"])
@pytest.mark.parametrize("injector", ["path", "low_rank"])
def test_the_network_is_the_drafters(exact, target, injector, head):
    drafter = drafter_of(target, injector, head=head)
    weights = borrowed(drafter, target)
    working = WorkingWeights.of(drafter, weights)
    config = drafter.config
    taps = torch.randn(5, len(config.target_tap_layers) * config.target_hidden_size)
    embeds = torch.randn(3, 5, config.target_hidden_size)
    hidden = working.fuse_inputs(taps, embeds[0])
    torch.testing.assert_close(hidden, drafter.fuse_inputs(taps, embeds[0]))
    torch.testing.assert_close(working.logits(hidden), drafter.logits(hidden, weights))
    states = ours = None
    for step in embeds:
        states, ours = drafter.injector.advance(step, states), working.injector.advance(step, ours)
        found = working.injector.up(working.injector.code(working.injector.project(hidden), ours))
        torch.testing.assert_close(found, drafter.injector(hidden, states), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [24, 192])  # with and without a kernel for few rows
def test_few_rows_are_close_and_many_are_exact(dtype, inputs):
    weight, bias = torch.randn(41, inputs).to(dtype), torch.randn(41).to(dtype)
    weight[3] = 0.0  # nothing to scale by
    product, some = Product(weight, bias), torch.tensor([5, 0, 40])
    for shape in [(1,), (8,), (2, 4), (9,), (0,)]:
        x = torch.randn(*shape, inputs).to(dtype)
        expected, found = F.linear(x, weight, bias), product(x)
        assert found.shape == expected.shape and found.dtype == dtype
        if dtype == torch.float32 or len(x) > 8:
            assert torch.equal(found, expected)
        elif x.numel():
            error = (found - expected).float().norm() / expected.float().norm()
            assert error < 0.02
            torch.testing.assert_close(product.of(some)(x), F.linear(x, weight[some]), atol=0.5, rtol=0.02)
    x = torch.randn(4, 2 * inputs).to(dtype)[:, ::2]  # not contiguous
    assert (product(x) - F.linear(x, weight, bias)).float().norm() < 0.02 * F.linear(x, weight, bias).float().norm()


@torch.no_grad()
def test_they_are_kept_until_something_changes(target):
    target, drafter = copy.deepcopy(target), drafter_of(target)
    first = working_weights(drafter, borrowed(drafter, target))
    assert working_weights(drafter, borrowed(drafter, target)) is first
    drafter.roll_proj.weight.mul_(2.0)
    second = working_weights(drafter, borrowed(drafter, target))
    assert second is not first
    x = torch.randn(16, drafter.config.hidden_size)
    torch.testing.assert_close(second.roll(x), drafter.roll_proj(x))
    target.get_output_embeddings().weight.mul_(3.0)
    third = working_weights(drafter, borrowed(drafter, target))
    assert third is not second
    torch.testing.assert_close(third.logits(x), drafter.logits(x, borrowed(drafter, target)))
    drafter.layers[0].down_proj.register_forward_hook(lambda module, args, output: output + 1.0)
    fourth = working_weights(drafter, borrowed(drafter, target))
    inner = torch.randn(16, drafter.config.intermediate_size)
    torch.testing.assert_close(fourth.layers[0].down(inner), third.layers[0].down(inner) + 1.0)


@torch.no_grad()
def test_products_that_are_more_than_a_weight_are_called(exact, target):
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.sum(dim=-1, keepdim=True)

    drafter = drafter_of(target)
    for owner, name in ((drafter.injector, "up"), (drafter.layers[0].attention, "k_proj"), (drafter, "fuse")):
        old = getattr(owner, name)
        adapted = Adapted(old.in_features, old.out_features, bias=False)
        adapted.load_state_dict(old.state_dict())
        setattr(owner, name, adapted)
    weights = borrowed(drafter, target)
    working = WorkingWeights.of(drafter, weights)
    config, attention = drafter.config, drafter.layers[0].attention
    taps = torch.randn(2, len(config.target_tap_layers) * config.target_hidden_size)
    embeds = torch.randn(2, config.target_hidden_size)
    hidden = working.fuse_inputs(taps, embeds)
    torch.testing.assert_close(hidden, drafter.fuse_inputs(taps, embeds))
    expected = torch.cat([attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)], dim=-1)
    torch.testing.assert_close(working.layers[0].qkv(hidden), expected)
    states, ours = drafter.injector.advance(embeds, None), working.injector.advance(embeds, None)
    found = working.injector.up(working.injector.code(working.injector.project(hidden), ours))
    torch.testing.assert_close(found, drafter.injector(hidden, states))
