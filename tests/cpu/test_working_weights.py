"""The weights that decoding multiplies by, against the network they are made of."""

import copy
import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import make_drafter, make_target
from torch import nn

from hf_hsdraft.cpu import products
from hf_hsdraft.cpu.products import Product, in_full_precision
from hf_hsdraft.drafters.base.target_weights import TargetWeights
from hf_hsdraft.drafters.hidden_state.quick_weights import QuickWeights, quick_weights


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


def modules_of(target) -> tuple:
    return target.get_input_embeddings(), target.get_output_embeddings()


# What 8-bit weights need: a processor with a kernel for them, and inputs of whole vectors.
WIDE = {"intermediate_size": 192, "injector_hidden_size": 64, "injector_rank": 64}
HAS_KERNEL = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and sys.platform != "win32"


@torch.no_grad()
@pytest.mark.parametrize("head", ["target", "trained"])
@pytest.mark.parametrize("injector", ["path", "low_rank", "selector"])
@pytest.mark.parametrize(
    "rounded", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_KERNEL, reason="no kernel for 8 bits"))]
)
def test_the_network_is_the_drafters(injector, head, rounded, monkeypatch):
    """To the last digit in float32 without our kernel, and in half precision but for what 8 bits leave out."""
    if not rounded:
        monkeypatch.setattr(products.KERNEL, "operators", lambda **_: None)
    dtype = torch.bfloat16 if rounded else torch.float32
    target = make_target(hidden_size=64, num_attention_heads=2, head_dim=32).to(dtype)
    drafter = drafter_of(target, injector, head=head, **WIDE).to(dtype)
    weights, config = borrowed(drafter, target), drafter.config
    working = QuickWeights.of(drafter, weights.head)
    if rounded:
        layer = working.layers[0]
        every = [working.steps[0].project, layer.qkv, layer.output, layer.gate_up, layer.down, working.injector.up]
        assert all(product._small is not None for product in every)
    close = {"atol": 0.08, "rtol": 0.05} if rounded else {"atol": 1e-4, "rtol": 1e-4}

    def compare(found, expected):
        torch.testing.assert_close(found / expected.std(), expected / expected.std(), **close)

    taps = torch.randn(5, len(config.target_tap_layers) * config.target_hidden_size, dtype=dtype)
    embeds = torch.randn(3, 5, config.target_hidden_size, dtype=dtype)
    hidden = drafter.fuse_inputs(taps, embeds[0])
    compare(working.fuse_inputs(taps, embeds[0]), hidden)
    logits = drafter.logits(hidden, weights)
    compare(working.logits(hidden), logits)
    states = ours = None
    for step in embeds:
        states, ours = drafter.injector.advance(step, states), working.injector.advance(step, ours)
        compare(working.injector(hidden, ours), drafter.injector(hidden, states))
        compare(working.injector.told(logits, hidden, ours), drafter.injector.told(logits, hidden, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [24, 192])  # with and without a kernel for few rows
def test_few_rows_are_close_and_many_are_exact(dtype, inputs):
    weight, bias = torch.randn(41, inputs).to(dtype), torch.randn(41).to(dtype)
    weight[3] = 0.0  # nothing to scale by
    product, some = Product(weight, bias), torch.tensor([5, 0, 40])
    assert (product._small is not None) == (HAS_KERNEL and dtype == torch.bfloat16 and inputs == 192)
    for shape in [(1,), (8,), (2, 4), (9,), (64,), (65,), (0,)]:
        x = torch.randn(*shape, inputs).to(dtype)
        expected, found = F.linear(x, weight, bias), product(x)
        assert found.shape == expected.shape and found.dtype == dtype
        if shape in [(65,), (0,)]:
            assert torch.equal(found, expected)
            continue
        error = (found - expected).float().norm() / expected.float().norm()
        assert error < (1e-6 if dtype == torch.float32 else 0.02 if x.numel() <= 8 * inputs else 0.003)
        if x.numel() <= 8 * inputs:
            torch.testing.assert_close(product.of(some)(x), F.linear(x, weight[some]), atol=0.5, rtol=0.02)
    x = torch.randn(4, 2 * inputs).to(dtype)[:, ::2]  # not contiguous
    assert (product(x) - F.linear(x, weight, bias)).float().norm() < 0.02 * F.linear(x, weight, bias).float().norm()


@torch.no_grad()
def test_float32_is_rounded_where_the_kernel_runs():
    """Not where gradients are wanted, and not in comparisons with training."""
    target = make_target(hidden_size=64, num_attention_heads=2, head_dim=32)
    drafter = drafter_of(target, **WIDE)
    if products.KERNEL.operators(wait=True) is None or not HAS_KERNEL:
        pytest.skip("this processor has no such kernel")
    layer, x = drafter.layers[0], torch.randn(3, 64)
    expected = torch.cat([layer.gate_proj(x), layer.up_proj(x)], dim=-1)

    def error():
        found = quick_weights(drafter, *modules_of(target)).layers[0].gate_up(x)
        return float((found - expected).norm() / expected.norm())

    assert 1e-4 < error() < 0.02
    with in_full_precision():
        assert error() < 1e-6
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.cat([layer.gate_proj.weight, layer.up_proj.weight]).to(dtype)
        inputs = x.to(dtype).requires_grad_()
        with torch.enable_grad():
            Product(weight)(inputs).sum().backward()
        torch.testing.assert_close(inputs.grad, torch.ones(3, len(weight), dtype=dtype) @ weight)


@torch.no_grad()
def test_large_weights_are_packed_for_fewer_rows(monkeypatch):
    """8 bits a number are fewer to fetch, but every further row has to be multiplied one by one."""
    monkeypatch.setattr(products.KERNEL, "operators", lambda: None)
    product = Product(torch.randn(2**16, 64).to(torch.bfloat16))
    if product._small is None or product._packed is None:
        pytest.skip("this processor has no such kernels")
    product(torch.randn(2, 64).to(torch.bfloat16))
    assert product._packed._copy is None
    product(torch.randn(3, 64).to(torch.bfloat16))
    assert product._packed._copy is not None


@torch.no_grad()
def test_what_is_not_packed(tuned):
    weight, x = torch.randn(40, 24), torch.randn(5, 24)
    product = Product(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(x).dtype == torch.bfloat16
    with in_full_precision():
        assert torch.equal(Product(weight)(x), F.linear(x, weight))
    tuned(product_bytes=40 * 24 * 4 - 1)
    assert torch.equal(Product(weight)(x), F.linear(x, weight))  # copies are kept


@torch.no_grad()
@pytest.mark.usefixtures("unrounded")
def test_they_are_kept_until_something_changes(target):
    """However it is written: by optimizers that keep no count, by merges into `.data`, by another vocabulary."""
    target, drafter = copy.deepcopy(target), drafter_of(target, draft_vocab_size=40, draft_vocab_ids=list(range(40)))
    x = torch.randn(16, drafter.config.hidden_size)

    def current() -> QuickWeights:
        weights = quick_weights(drafter, *modules_of(target))
        assert quick_weights(drafter, *modules_of(target)) is weights
        torch.testing.assert_close(weights.steps[0].project(x), drafter.roll_proj(x))
        torch.testing.assert_close(weights.logits(x), drafter.logits(x, borrowed(drafter, target)))
        attention = drafter.layers[0].attention
        torch.testing.assert_close(weights.layers[0].qkv(x)[:, : attention.q_proj.out_features], attention.q_proj(x))
        return weights

    found = [current()]
    for do_sample in (False, True):  # calls do not make them again
        ids = torch.tensor([[5, 6, 7]])
        target.generate(ids, max_new_tokens=8, do_sample=do_sample, assistant_model=drafter)
        assert current() is found[0]
    drafter.roll_proj.weight.data.copy_(drafter.roll_proj.weight * 2.0)
    found.append(current())
    old = drafter.roll_proj.weight  # another tensor in its place, which was written to as often
    drafter.roll_proj.weight = nn.Parameter(old.detach(), requires_grad=False)
    assert drafter.roll_proj.weight.data_ptr() == old.data_ptr()
    found.append(current())
    target.get_output_embeddings().weight.data.mul_(3.0)
    found.append(current())
    drafter.load_state_dict(drafter_of(target, draft_vocab_size=40, draft_vocab_ids=list(range(40))).state_dict())
    found.append(current())
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1, fused=True)
        sum(parameter.sum() for parameter in drafter.parameters()).backward()
    optimizer.step()
    found.append(current())
    with in_full_precision():
        found.append(current())
    other = list(drafter.config.draft_vocab_ids)
    drafter.config.draft_vocab_ids = [other[1], other[0], *other[2:]]
    found.append(current())
    assert len(set(map(id, found))) == len(found)


@torch.no_grad()
@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("of_target", [True, False], ids=["head", "drafter"])
def test_an_edit_of_a_few_rows_is_noticed(of_target):
    """However few: a sample of the values would miss it."""
    target = make_target(vocab_size=400)
    drafter = drafter_of(target, draft_vocab_size=400)
    edited = target.get_output_embeddings().weight if of_target else drafter.injector.up.weight
    sampled = range(0, edited.numel(), edited.numel() // 32 + 1)
    untouched = set(range(len(edited))) - {place // edited.shape[1] for place in sampled}
    row = max(untouched)
    before = quick_weights(drafter, *modules_of(target))
    edited[row] = 5.0
    weights, x = quick_weights(drafter, *modules_of(target)), torch.randn(3, 32)
    assert weights is not before and quick_weights(drafter, *modules_of(target)) is weights
    torch.testing.assert_close(weights.logits(x), drafter.logits(x, borrowed(drafter, target)))
    code = torch.randn(3, drafter.config.injector_rank)
    torch.testing.assert_close(weights.injector.up(code), drafter.injector.up(code))


def test_models_made_in_inference_mode_work():
    """Their tensors count no writes. A drafter with its own head needs no other."""
    with torch.inference_mode():
        target = make_target()
        drafter = drafter_of(target, head="trained")
        weights = quick_weights(drafter, *modules_of(target))
        assert quick_weights(drafter, target.get_input_embeddings(), None) is weights
        drafter.roll_proj.weight.mul_(2.0)
        assert quick_weights(drafter, *modules_of(target)) is not weights


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_they_end_with_either_model(target, which):
    models = {"target": copy.deepcopy(target), "drafter": drafter_of(target)}
    kept = weakref.ref(quick_weights(models["drafter"], *modules_of(models["target"])))
    assert kept() is not None
    del models[which]
    gc.collect()
    assert kept() is None


def test_what_inference_mode_made_can_be_trained_on(target):
    drafter = drafter_of(target)
    with torch.inference_mode():
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    weights = quick_weights(drafter, *modules_of(target))
    states = torch.randn(2, drafter.config.hidden_size, requires_grad=True)
    weights.logits(states).sum().backward()
    assert states.grad is not None


@torch.no_grad()
@pytest.mark.usefixtures("unrounded")
def test_products_that_are_more_than_a_weight_are_called(target):
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.sum(dim=-1, keepdim=True)

    drafter = drafter_of(target)
    for owner, name in ((drafter.injector, "up"), (drafter.layers[0].attention, "k_proj"), (drafter, "fuse")):
        old = getattr(owner, name)
        adapted = Adapted(old.in_features, old.out_features, bias=False)
        adapted.load_state_dict(old.state_dict())
        setattr(owner, name, adapted)
    drafter.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2.0 + 1.0,))
    weights, config, attention = borrowed(drafter, target), drafter.config, drafter.layers[0].attention
    working = quick_weights(drafter, *modules_of(target))
    assert quick_weights(drafter, *modules_of(target)) is not working  # an adapter may be switched at any time
    taps = torch.randn(2, len(config.target_tap_layers) * config.target_hidden_size)
    embeds = torch.randn(2, config.target_hidden_size)
    hidden = working.fuse_inputs(taps, embeds)
    torch.testing.assert_close(hidden, drafter.fuse_inputs(taps, embeds))
    expected = torch.cat([attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)], dim=-1)
    torch.testing.assert_close(working.layers[0].qkv(hidden), expected)
    torch.testing.assert_close(working.logits(hidden), drafter.logits(hidden, weights), atol=1e-3, rtol=1e-4)
    states, ours = drafter.injector.advance(embeds, None), working.injector.advance(embeds, None)
    close = {"atol": 1e-3, "rtol": 1e-4}  # some numbers are in the hundreds
    torch.testing.assert_close(working.injector(hidden, ours), drafter.injector(hidden, states), **close)
