"""Heads that share keys may become rows of one: faster, and the same but for rounding."""

import functools
import importlib.util
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter, make_target
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hsdraft import CachebackDrafter, harmless
from hf_hsdraft.cpu import grouped_attention as module
from hf_hsdraft.runtime.target_runtime import Acceleration

CPU = torch.device("cpu")


def a_layer(heads=6, key_heads=2, n=5, length=40, batch=1, dtype=torch.float32, kind=torch.bool, value_size=16):
    generator = torch.Generator().manual_seed(n)
    query, key, value = (
        torch.randn(batch, tokens, count, size, generator=generator).to(dtype).transpose(1, 2)  # as models lay it out
        for count, tokens, size in ((heads, n, 16), (key_heads, length, 16), (key_heads, length, value_size))
    )
    seen = torch.rand(batch, 1, n, length, generator=generator) < 0.7
    seen[..., 0] = True
    mask = seen if kind == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True), query, key, value, mask


def attended(layer, query, key, value, mask, **kwargs):
    with module.grouped_attention(CPU):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask, **kwargs)[0]


def of_transformers(*layer, **kwargs):
    return sdpa_attention_forward(*layer, **kwargs)[0]


@pytest.fixture(params=[True, False], ids=["joined", "apart"])
def either_way(request, monkeypatch, tuned):
    monkeypatch.setattr(module, "_are_fewer_together", lambda *sizes: request.param)
    tuned(many_keys=0)


@pytest.fixture
def kernel_calls(monkeypatch):
    """Heads and rows of queries, and heads of keys, of every call of the kernel."""
    calls, kernel = [], torch.nn.functional.scaled_dot_product_attention

    @harmless
    def noting(query, key, *args, **kwargs):
        calls.append((query.shape[1], query.shape[2], key.shape[1]))
        return kernel(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(module, "_SDPA", noting)  # otherwise it were a replaced one, which is left alone
    return calls


def masked(change, **sizes):
    *layer, mask = a_layer(**sizes)
    return *layer, change(mask)


CASES = {
    f"{n} tokens of {batch} rows, {kind}": (functools.partial(a_layer, n=n, length=64, batch=batch, kind=kind), {})
    for n in (1, 5, 40)
    for batch in (1, 3)
    for kind in (torch.bool, torch.float32)
}
CASES |= {
    "a scaling of the layer": (a_layer, {"scaling": 0.7}),
    "a bias that only transformers handles": (a_layer, {"position_bias": torch.randn(1, 6, 5, 40)}),
    "values of another size than keys": (lambda: a_layer(value_size=24), {}),
    "one mask for all rows": (lambda: masked(lambda mask: mask[:1], batch=3), {}),
    "one mask for all tokens": (lambda: masked(lambda mask: mask[:, :, :1], batch=2), {}),
    "queries of one text over the keys of several": (lambda: (*a_layer()[:2], *a_layer(batch=2)[2:]), {}),
    "one token without a mask, which sees all": (lambda: masked(lambda mask: None, n=1), {}),
    "several tokens without a mask, which are causal": (lambda: masked(lambda mask: None, n=8, length=8), {}),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_transformers_computes_of(case):
    made, kwargs = CASES[case]
    layer = made()
    found = attended(*layer, **kwargs)
    torch.testing.assert_close(found, of_transformers(*layer, **kwargs), rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()


def test_an_error_of_transformers_stays():
    with pytest.raises(ValueError, match="softcap"):
        attended(*a_layer(), softcap=30.0)


@pytest.mark.parametrize("given", [{"a_later_field": 1.0}, {"dropout": 0.5}, {"s_aux": torch.zeros(6)}])
def test_keywords_that_are_not_known_are_left_to_transformers(given, registered, kernel_calls):
    """Somebody's sdpa may look at them, or a later one of transformers."""
    seen = []

    def later(layer, query, key, value, mask, **kwargs):
        seen.append(kwargs)
        return torch.zeros(()), None

    functools.update_wrapper(later, sdpa_attention_forward)
    del later.__wrapped__
    AttentionInterface.register("sdpa", later)
    copy = another_copy()
    copy._SDPA = torch.nn.functional.scaled_dot_product_attention
    copy.sdpa_attention.sdpa_attention_forward, before = later, copy.sdpa_attention.sdpa_attention_forward
    try:
        copy._install()
    finally:
        copy.sdpa_attention.sdpa_attention_forward = before
    layer = a_layer()
    with copy.grouped_attention(CPU):
        ALL_ATTENTION_FUNCTIONS["sdpa"](*layer, **given, scaling=0.5, sliding_window=4)
        ALL_ATTENTION_FUNCTIONS["sdpa"](*layer, **dict.fromkeys(given), scaling=0.5, output_attentions=False)
    assert seen == [{**given, "scaling": 0.5, "sliding_window": 4}]
    assert len(kernel_calls) == 1, "without a value they say nothing"


def test_a_mask_of_each_head_is_kept_and_no_key_repeated(kernel_calls):
    layer, query, key, value, mask = a_layer()
    mask = torch.cat([mask.roll(head, dims=-1) for head in range(6)], dim=1)
    expected = of_transformers(layer, query, key, value, mask)
    kernel_calls.clear()
    torch.testing.assert_close(attended(layer, query, key, value, mask), expected)
    assert kernel_calls == [(6, 5, 2)]


@pytest.mark.parametrize(
    ("threads", "batch", "n", "length", "call"),
    [
        (1, 1, 1, 1100, (2, 3, 2)),
        (1, 1, 5, 1100, (2, 15, 2)),  # 2 blocks of 15 rows instead of 6 of 5
        (1, 1, 20, 1100, (2, 60, 2)),  # 4 instead of 6
        (1, 1, 32, 1100, (6, 32, 2)),  # as many either way
        (1, 1, 70, 1100, (6, 70, 2)),  # so many rows together that blocks are larger
        (6, 1, 5, 1100, (6, 5, 2)),  # a thread for each head
        (1, 1, 5, 900, (6, 5, 2)),  # few keys: for one token and in batches only
        (1, 1, 1, 900, (2, 3, 2)),
        (1, 2, 5, 40, (2, 15, 2)),
    ],
)
def test_heads_are_joined_where_a_thread_gets_fewer_blocks(kernel_calls, monkeypatch, threads, batch, n, length, call):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer = a_layer(batch=batch, n=n, length=length)
    expected = of_transformers(*layer)
    kernel_calls.clear()
    torch.testing.assert_close(attended(*layer), expected)
    assert kernel_calls == [call]


def test_outside_keys_are_repeated_as_before(kernel_calls):
    layer = a_layer()
    ALL_ATTENTION_FUNCTIONS["sdpa"](*layer)
    with module.grouped_attention(CPU):
        other = Thread(target=ALL_ATTENTION_FUNCTIONS["sdpa"], args=layer)
        other.start()
        other.join()
    assert kernel_calls == [(6, 5, 6), (6, 5, 6)]


def test_other_devices_are_left_to_transformers():
    _, *tensors = a_layer()
    layer = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    with module.grouped_attention(CPU):
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, *(tensor.to("meta") for tensor in tensors))
    assert out.device.type == "meta" and out.shape == (1, 5, 6, 16)


def another_copy():
    """The module once more, as a repository of the Hub brings it."""
    copy = importlib.util.module_from_spec(importlib.util.find_spec(module.__name__))
    copy.__spec__.loader.exec_module(copy)
    return copy


def depth():
    function, found = ALL_ATTENTION_FUNCTIONS["sdpa"], 0
    while hasattr(function, "__wrapped__"):
        function, found = function.__wrapped__, found + 1
    return found


@pytest.fixture
def registered():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield
    AttentionInterface.register("sdpa", before)


def test_copies_of_the_module_get_along(registered, kernel_calls, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before, copy = depth(), another_copy()
    for each in (copy, module, copy, module):
        each._install()
    assert depth() == before + 1
    layer = a_layer(n=1)
    for each in (copy, module):
        with each.grouped_attention(CPU):
            ALL_ATTENTION_FUNCTIONS["sdpa"](*layer)
    assert kernel_calls == [(2, 3, 2)] * 2


def test_an_sdpa_of_somebody_else_stays(registered):
    def mine(*args, **kwargs):
        return torch.zeros(()), None

    AttentionInterface.register("sdpa", mine)
    another_copy()._install()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine


def test_importing_and_plain_calls_leave_transformers_attention_alone(registered, prompt):
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    another_copy()
    target = make_target()
    for assistant in (None, CachebackDrafter()):
        target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=assistant)
        assert (ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward) == (assistant is None)


def test_compiled_layers_take_the_way_of_transformers():
    layer, *tensors = a_layer()

    @torch.compile(backend="eager", fullgraph=True)
    def forward(query, key, value, mask):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask)[0]

    with module.grouped_attention(CPU):
        torch.testing.assert_close(forward(*tensors), of_transformers(layer, *tensors))


def test_every_round_of_a_call_joins_heads_and_the_prompt_does_not(kernel_calls, monkeypatch, tuned):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tuned(many_keys=0)
    target = make_target()
    heads, key_heads = target.config.num_attention_heads, target.config.num_key_value_heads
    assert heads > key_heads
    drafter = make_drafter(target, tree_size=8)
    prompt = torch.randint(target.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)  # probes the target
    kernel_calls.clear()
    seen = []
    forward = Acceleration.forward  # of rounds, not of the prompt

    def noting(*args, **kwargs):
        first = len(kernel_calls)
        seen.extend([] if seen else [set(kernel_calls)])
        output = forward(*args, **kwargs)
        seen.append(set(kernel_calls[first:]))
        return output

    monkeypatch.setattr(Acceleration, "forward", noting)
    target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    prompt_calls, *rounds = seen  # the first ones with the first draft's
    assert (heads, 12, key_heads) in prompt_calls
    assert rounds and all(call[0] == call[2] == key_heads for calls in rounds for call in calls)
