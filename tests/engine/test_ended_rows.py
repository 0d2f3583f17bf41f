"""The cache of a batch whose rows end apart: keys and values are those of plain decoding, padding included."""

from types import SimpleNamespace

import pytest
import torch
from conftest import LLAMA, make_drafter, make_target, model_of
from test_contract import assert_same_cache, batch_of, make_windowed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LogitsProcessor, StaticCache, StoppingCriteria

from hf_hsdraft.runtime.cache_slots import CacheSlots

PLACES = (3, 9, 14, 15, 6)  # of the tokens that end rows


class EndAt(LogitsProcessor):
    """Makes the end of a text certain from a length on."""

    row_wise = True

    def __call__(self, input_ids, scores):
        ended = (input_ids[:, 12:].sum(dim=1) % 5 == 0)[:, None]
        return torch.where(ended & (torch.arange(scores.shape[1]) != 7), -1e9, scores)


class Sums(StoppingCriteria):
    """Ends a row where the sum of its new tokens is divisible."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, 12:].sum(dim=1) % 4 == 0


def make_mamba():
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    fields = {**LLAMA, "head_dim": 8, "num_hidden_layers": 4, "layer_types": types, "linear_value_head_dim": 8}
    return model_of("qwen3_next", **fields, **sizes, num_experts=0, mlp_only_layers=[0, 1, 2, 3])


def make_without_trees():
    return model_of("gpt2", n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, n_positions=256)


def caches(target, kind: str, rows: int):
    """Arguments of two calls, each with a cache of its own."""
    if kind == "none":
        return {}, {}
    make = {
        "own": lambda: DynamicCache(config=target.config),
        "static": lambda: StaticCache(config=target.config, max_cache_len=80),
        "tight": lambda: StaticCache(config=target.config, max_cache_len=12 + 16 + 2),
    }[kind]
    return {"past_key_values": make()}, {"past_key_values": make()}


CASES = {
    "leave": (make_target, "none", {}),
    "own cache": (make_target, "own", {}),
    "static": (make_target, "static", {}),
    "tight static": (make_target, "tight", {}),
    "windows": (make_windowed, "none", {}),
    "windows, own cache": (make_windowed, "own", {}),
    "criteria": (make_target, "none", {"stopping_criteria": [Sums()]}),
    "criteria, windows": (make_windowed, "own", {"stopping_criteria": [Sums()]}),
    "processor": (make_target, "none", {"logits_processor": [EndAt()]}),
    "chains": (make_without_trees, "none", {}),
    "chains, criteria": (make_without_trees, "own", {"stopping_criteria": [Sums()]}),
    "recurrent": (make_mamba, "none", {}),
}


@pytest.mark.parametrize("sizing", ["fixed", "cost"])
@pytest.mark.parametrize("case", CASES)
def test_a_cache_that_outlives_the_call_holds_the_padding_of_ended_rows(case, sizing):
    make, kind, more = CASES[case]
    target, apart = make(), 0
    drafter = make_drafter(target) if "chains" not in case else make_ngrams()
    drafter.generation_config.tree_sizing = sizing
    for seed in range(2):
        inputs = batch_of(5, seed=seed)
        free = target.generate(**inputs, do_sample=False, max_new_tokens=16, eos_token_id=None)[:, 12:].tolist()
        ends = [row[PLACES[index]] for index, row in enumerate(free)][seed % 2 :]
        plain_cache, own_cache = caches(target, kind, 5)
        call = {**inputs, "do_sample": False, "max_new_tokens": 16, "eos_token_id": ends, "pad_token_id": 3, **more}
        call["return_dict_in_generate"] = True
        plain = target.generate(**call, **plain_cache)
        drafted = target.generate(**call, **own_cache, assistant_model=drafter)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        if case == "recurrent":
            assert_same_states(plain, drafted)
        else:
            assert_same_cache(plain, drafted)
        apart += bool((plain.sequences[:, 12:] == 3).any())
        if kind == "tight":
            continue
        turn = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
        ids = torch.cat([plain.sequences, inputs["input_ids"][:, -3:]], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(5, ids.shape[1] - 12, dtype=torch.int64)], dim=1)
        texts = [
            target.generate(ids, attention_mask=mask, past_key_values=each.past_key_values, **turn).tolist()
            for each in (plain, drafted)
        ]
        assert texts[0] == texts[1]
    assert apart


def assert_same_states(plain, drafted):
    """All tensors of the layers, recurrent states too."""
    for ours, theirs in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
        for name, value in vars(theirs).items():
            for one, other in zip(tree_leaves(value), tree_leaves(vars(ours).get(name)), strict=True):
                if isinstance(one, torch.Tensor):
                    torch.testing.assert_close(other, one, atol=2e-4, rtol=2e-4)


def make_ngrams():
    from hf_hsdraft import CachebackDrafter

    return CachebackDrafter()


class Embeddings(TorchDispatchMode):
    """Counts look-ups of tokens: with n-grams the target alone makes any, one in each forward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.embedding.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_for_a_cache_that_ends_with_the_call():
    target, inputs, counts = make_target(), batch_of(5), []
    free = target.generate(**inputs, do_sample=False, max_new_tokens=16)[:, 12:].tolist()
    call = {**inputs, "do_sample": False, "max_new_tokens": 16, "eos_token_id": free[0][3], "pad_token_id": 3}
    drafter = make_ngrams()
    drafter.generation_config.tree_sizing = "fixed"
    target.generate(**call, assistant_model=drafter)
    for returned in (False, True):
        with Embeddings() as embeddings:
            target.generate(**call, assistant_model=drafter, return_dict_in_generate=returned)
        counts.append(embeddings.count)
    assert 0 < counts[0] < counts[1]


def test_attentions_of_hybrid_targets_are_cut_to_their_own_windows():
    types = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    layers = [SimpleNamespace() if "linear" in each else SimpleNamespace(keys=0) for each in types]
    slots = CacheSlots.__new__(CacheSlots)
    slots.cache = SimpleNamespace(layers=layers)
    assert list(slots.attending(2)) == [1, 3]
    assert list(slots.attending(4)) == [0, 1, 2, 3]
