"""Drafts by the kernel's operators, compared with the drafter's own modules; what they do not take is left to these."""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import make_drafter, make_target
from torch import nn

from hf_hsdraft.core.draft_tree import FoundNodes, TreeLimits, searched
from hf_hsdraft.cpu.products import in_full_precision
from hf_hsdraft.cpu.small_weights import KERNEL
from hf_hsdraft.drafters.base.tree_session import ParallelExpansion
from hf_hsdraft.drafters.hidden_state.draft_session import RollOut, bias_of
from hf_hsdraft.drafters.hidden_state.network import WorkingWeights
from hf_hsdraft.drafters.hidden_state.quick_weights import QuickWeights

pytestmark = pytest.mark.skipif(KERNEL.operators(wait=True) is None, reason="no compiler, or another processor")

DTYPES = [torch.float32, torch.bfloat16]
WIDE = {"intermediate_size": 192, "injector_hidden_size": 64, "injector_rank": 64}
FORMS = {
    "one layer": {},
    "two layers": {"num_hidden_layers": 2},
    "few roll": {"num_hidden_layers": 3, "num_roll_layers": 2},
    "own steps": {"num_hidden_layers": 2, "num_roll_layers": 1, "num_step_modules": 3},
    "window": {"num_hidden_layers": 2, "sliding_window": 6},
}


def pair_of(dtype: torch.dtype, **fields):
    """A drafter whose norms' weights and biases are no ones and zeros, and what it borrows."""
    target = make_target(hidden_size=64, num_attention_heads=2, head_dim=32).to(dtype)
    drafter = make_drafter(target, **{**WIDE, **fields})
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name != "injector.up.weight":
                parameter.mul_(0.3)  # so that rounding is not amplified from state to state
    drafter = drafter.to(dtype)
    return drafter, drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())


def pairs_of(drafter, begin: int, count: int):
    config = drafter.config
    taps = torch.randn(count, len(config.target_tap_layers) * config.target_hidden_size).to(drafter.dtype)
    embeds = torch.randn(count, config.target_hidden_size).to(drafter.dtype)
    return taps, embeds, torch.arange(begin, begin + count)


def are_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return found.shape == expected.shape and bool(
        error < (1e-5 if (dtype or expected.dtype) == torch.float32 else 0.06)
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_states_are_those_of_the_layers(form, dtype):
    """Of a prompt, then of one to seven accepted positions, and with positions that are dropped again."""
    torch.manual_seed(0)
    drafter, weights = pair_of(dtype, num_draft_steps=5, **FORMS[form])
    working = QuickWeights.of(drafter, weights.head)
    assert working.rolling is not None
    # In float32 to the last digits, by the same weights of 8 bits.
    modules = replace(working, rolling=None) if dtype == torch.float32 else WorkingWeights.of(drafter, weights.head)
    plain, quick = RollOut(modules, drafter), RollOut(working, drafter)
    begin = 0
    for count, steps in ((70, 5), (1, 5), (7, 1), (3, 4), (2, 5)):
        pairs = pairs_of(drafter, begin, count)
        assert are_close(quick({0: count}, pairs, steps), plain({0: count}, pairs, steps))
        begin += count
        for roll_out in (plain, quick):
            roll_out.drop({0: 1})
        begin -= 1
    for (keys, values), (own_keys, own_values) in zip(plain.saved(), quick.saved(), strict=True):
        assert are_close(own_keys, keys) and are_close(own_values, values)


def trees_of(working, weights, hidden, since, roots, limits, temperature):
    logits = working.logits(hidden)
    expansion = ParallelExpansion(logits, bias_of(working, weights, hidden, logits, since), temperature)
    assert (expansion.search(roots, limits) is None) == (getattr(working, "searching", None) is None)
    return FoundNodes.of(*searched(expansion, roots, weights.vocab_ids, limits))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 11])
@pytest.mark.parametrize("resampled", [False, True])
def test_trees_are_those_of_the_modules(resampled, width, dtype, tuned):
    """Of two texts, among all columns and the likely ones; also of states that were drafted without the root."""
    torch.manual_seed(0)
    drafter, weights = pair_of(dtype, num_draft_steps=4)
    plain, working = WorkingWeights.of(drafter, weights.head), QuickWeights.of(drafter, weights.head)
    hidden, roots = torch.randn(2, 4, drafter.config.hidden_size).to(dtype), torch.tensor([3, 8])
    since = plain.after((5, 6), weights.embed).expand(2, 1, -1) if resampled else None
    for size, temperature, columns in ((12, 1.0, 2048), (40, 0.7, 2048), (40, 1.0, 20)):
        if columns == 20 and dtype == torch.bfloat16:  # equal logits: either column may be among them
            continue
        tuned(likely_columns=columns)
        limits = TreeLimits(size, width, 0.0, [4, 4])
        given = hidden, since, roots
        by_modules = replace(working, searching=None) if dtype == torch.float32 else plain
        if columns == 20:  # modules for several texts look at all columns
            given = tuple(each if each is None else each[:1] for each in given)
        ways = [trees_of(each, weights, *given, limits, temperature) for each in (working, by_modules)]
        found, expected = ways
        assert found.depths == expected.depths
        assert are_close(*(torch.tensor(each.scores) for each in ways), dtype)
        if dtype == torch.float32:
            assert found.tokens == expected.tokens and found.parents == expected.parents


@torch.no_grad()
def test_logits_that_are_no_numbers_are_not_drafted():
    drafter, weights = pair_of(torch.float32, num_draft_steps=2)
    working = QuickWeights.of(drafter, weights.head)
    hidden = torch.full((1, 2, drafter.config.hidden_size), float("nan"))
    found = trees_of(working, weights, hidden, None, torch.tensor([3]), TreeLimits(6, 2, 0.0, [2]), 1.0)
    assert len(found.best_tree(0, 6, 2, 0.0)) == 1


@torch.no_grad()
@pytest.mark.parametrize("change", ["hook", "other norm", "full precision"])
def test_what_is_not_plain_is_left_to_the_modules(change):
    drafter, weights = pair_of(torch.float32)
    if change == "hook":
        drafter.layers[0].mlp_norm.register_forward_hook(lambda module, args, output: 2 * output)
    if change == "other norm":
        drafter.roll_norm = nn.LayerNorm(drafter.config.hidden_size)
    with in_full_precision() if change == "full precision" else contextlib.nullcontext():
        working = QuickWeights.of(drafter, weights.head)
    assert working.rolling is None
    with in_full_precision():  # the parts that are left are rounded otherwise
        working = QuickWeights.of(drafter, weights.head)
    pairs = pairs_of(drafter, 0, 3)
    found = RollOut(working, drafter)({0: 3}, pairs, 4)
    assert are_close(found, RollOut(WorkingWeights.of(drafter, weights.head), drafter)({0: 3}, pairs, 4))


@pytest.mark.parametrize("reuse", ["none", "ensemble", "resample"])
def test_texts_are_plain_decodings(reuse):
    """And drafts accept as many tokens as those by modules."""
    target = make_target(hidden_size=64, num_attention_heads=2, head_dim=32)
    drafter = make_drafter(target, **WIDE)
    drafter.generation_config.reuse, drafter.generation_config.tree_sizing = reuse, "fixed"
    ids = torch.arange(2, 11)[None]
    call = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    found = target.generate(ids, assistant_model=drafter, **call)
    with mock.patch.object(KERNEL, "operators", lambda *args: None):
        expected = target.generate(ids, assistant_model=copy.deepcopy(drafter), **call)
    assert torch.equal(found.sequences, target.generate(ids, **call).sequences)
    assert found.statistics.accepted_lengths == expected.statistics.accepted_lengths


@pytest.mark.parametrize("part", ["norm of the steps in float32", "weight with gaps"])
def test_parts_that_the_operators_do_not_take_draft_by_modules(part):
    target = make_target(hidden_size=64, num_attention_heads=2, head_dim=32).bfloat16()
    drafter = make_drafter(target, **WIDE)
    if part == "weight with gaps":
        up = drafter.injector.up.weight
        up.data = up.data.t().contiguous().t()
    else:
        drafter.roll_norm.float()
    drafter.generation_config.tree_sizing = "fixed"
    call = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "assistant_model": drafter}
    assert target.generate(torch.arange(2, 11)[None], **call).statistics.drafted_nodes
