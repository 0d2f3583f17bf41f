"""A cache layer that grows in place holds what a plain one does, whatever is done to it."""

import io

import pytest
import torch
from conftest import make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_hsdraft.runtime.cache_slots import CacheSlots, GrowingLayer, make_room, move_slots

STEPS = st.lists(
    st.tuples(st.sampled_from(["read", "drop", "rows", "beams", "reset"]), st.integers(1, 90)), max_size=12
)


def states(length, rows, seed):
    return torch.randn(rows, 2, length, 3, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_it_holds_what_a_plain_layer_does(steps):
    plain, growing, rows = DynamicLayer(), GrowingLayer(), 2
    for seed, (step, count) in enumerate([("read", 5), *steps]):
        length = plain.get_seq_length()
        for layer in (plain, growing):
            if step == "read":
                keys, values = layer.update(states(count, rows, seed), states(count, rows, -seed))
                assert keys.shape == values.shape == (rows, 2, length + count, 3)
            elif step == "drop" and count < length:
                layer.crop(-count)
            elif step == "rows" and length:
                layer.batch_repeat_interleave(2)
            elif step == "beams" and length:
                layer.reorder_cache(torch.arange(rows).flip(0))
            elif step == "reset":
                layer.reset()
        rows = 2 if not plain.is_initialized else plain.keys.shape[0]
        assert growing.get_seq_length() == plain.get_seq_length()
        assert growing.get_mask_sizes(3) == plain.get_mask_sizes(3)
        if plain.is_initialized:
            assert torch.equal(growing.keys, plain.keys) and torch.equal(growing.values, plain.values)


def test_reading_moves_nothing_that_was_read_before():
    layer = GrowingLayer()
    layer.update(states(100, 1, 0), states(100, 1, 1))
    layer.update(states(1, 1, 2), states(1, 1, 3))
    places = set()
    for _ in range(200):
        layer.update(states(8, 1, 4), states(8, 1, 5))
        places.add(layer.keys.data_ptr())
        layer.crop(-6)
    assert layer.get_seq_length() == 501 and len(places) <= 5


def test_offloaded_caches_stay_as_they_are():
    cache = DynamicCache()
    cache.update(states(4, 1, 0), states(4, 1, 1), 0)
    cache.offloading = True
    make_room(cache)
    assert type(cache.layers[0]) is DynamicLayer


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_callers_cache_comes_back_plain_and_small(prompt, attention, kv_heads):
    target = make_target(attention, num_key_value_heads=kv_heads)
    output = target.generate(
        prompt, max_new_tokens=12, assistant_model=make_drafter(target), return_dict_in_generate=True
    )
    stored = {}
    for name, cache in {
        "drafted": output.past_key_values,
        "plain": target.generate(prompt, max_new_tokens=12, return_dict_in_generate=True).past_key_values,
    }.items():
        assert {type(layer) for layer in cache.layers} == {DynamicLayer}
        file = io.BytesIO()
        torch.save([layer.keys for layer in cache.layers], file)
        stored[name] = len(file.getvalue())
    assert stored["drafted"] == stored["plain"]


@pytest.mark.parametrize(("rows", "moves"), [(1, 6), (2, 8)])
def test_slots_of_all_layers_move_at_once(rows, moves):
    """For one text, layers of one shape share a buffer; one of another shape, or with tensors replaced, is apart."""
    cache = DynamicCache()
    for layer in range(4):
        cache.update(states(5, rows, layer)[:, : 1 + (layer != 2)], states(5, rows, -layer)[..., :2], layer)
    make_room(cache)
    for layer in range(4):
        cache.update(states(3, rows, layer)[:, : 1 + (layer != 2)], states(3, rows, layer)[..., :2], layer)
    cache.layers[3].reorder_cache(torch.arange(rows).flip(0))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    source, goal, moved = torch.tensor([[5, 7], [4, 6]])[:rows], torch.tensor([[5, 6], [3, 4]])[:rows], []
    CacheSlots(cache).move(source, goal, lambda each, *where: (moved.extend(each), move_slots(each, *where)))
    assert len(moved) == moves  # keys and values of two layers together, and of two apart
    for layer, held in zip(cache.layers, before, strict=True):
        for now, then in zip((layer.keys, layer.values), held, strict=True):
            for row in range(rows):
                then[row, :, goal[row]] = then[row][:, source[row]]
            assert torch.equal(now, then)
