"""What callers pass beside plain prompts: positions of their own, other integer types."""

import functools

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, model_of
from test_contract import batch_of, make_windowed
from transformers import DynamicCache, StaticCache, StoppingCriteria

from hf_hsdraft import CachebackDrafter, attach, detach

TABLE = 32


@pytest.fixture(scope="module")
def learned():
    """A target with a table of positions, beyond which nothing can be read."""
    return model_of("gpt2", n_positions=TABLE, n_layer=3, n_head=4, initializer_range=0.3)


def drafters(target, plain):
    """One that guesses badly, and one that knows the text."""
    return make_drafter(target), CachebackDrafter(plain.tolist(), node_cost=0.0, depth_cost=0.0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("offset", [0, 12, 20])
def test_no_draft_reads_beyond_a_table_of_positions(learned, rows, offset):
    """Counted from where the caller says that the prompt stands, also if the text ends before the table does."""
    ids = torch.randint(5, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(3))
    call = {"position_ids": (torch.arange(11) + offset).expand(rows, -1), "do_sample": False, "pad_token_id": 0}
    call["attention_mask"] = torch.ones_like(ids)
    free = learned.generate(ids, **call, max_new_tokens=TABLE - 11 - offset + 1)
    for drafter in drafters(learned, free):
        drafted = learned.generate(ids, **call, max_new_tokens=TABLE - 11 - offset + 1, assistant_model=drafter)
        assert drafted.tolist() == free.tolist()
    call |= {"max_new_tokens": 100, "eos_token_id": free[:, -2].tolist()}  # the table would be too short without
    plain = learned.generate(ids, **call)
    for drafter in drafters(learned, free):
        assert learned.generate(ids, **call, assistant_model=drafter).tolist() == plain.tolist()


def test_a_prompt_beyond_the_table_is_told(learned):
    ids = torch.randint(5, VOCAB, (1, 11), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(11)[None] + TABLE - 10
    with pytest.raises(ValueError, match=f"context window is {TABLE}"):
        learned.generate(ids, position_ids=positions, max_new_tokens=4, assistant_model=CachebackDrafter())


@pytest.mark.parametrize("offset", [0, 10])
def test_frequencies_change_where_the_positions_say(prompt, offset):
    """Rotary frequencies that follow the furthest position of a forward."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    target = make_target(rope_parameters=rope, max_position_embeddings=32)
    call = {"position_ids": torch.arange(11)[None] + offset, "do_sample": False, "max_new_tokens": 28}
    plain = target.generate(prompt, **call)
    for drafter in drafters(target, plain):
        assert target.generate(prompt, **call, assistant_model=drafter).tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_prompts_of_int32(target, rows):
    """All that plain decoding shows of a text is int64 after the first token."""

    class Types(StoppingCriteria):
        def __init__(self):
            self.seen = set()

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.add(input_ids.dtype)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids = torch.randint(5, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(3))
    call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    plain = target.generate(ids.int(), **call)
    assert plain.dtype == torch.int64
    for drafter in drafters(target, plain):
        types = Types()
        drafted = target.generate(ids.int(), **call, assistant_model=drafter, stopping_criteria=[types])
        assert drafted.dtype == torch.int64 and torch.equal(drafted, plain)
        assert types.seen == {torch.int64}


# Caches that hold the text's beginning

NEW = 12
READ = 8  # tokens that the cache holds
LATER = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}


def begun(target, ids, mask, cache, count: int = READ):
    """The cache with the first tokens."""
    with torch.no_grad():
        positions = positions_of(mask[:, :count])
        target(ids[:, :count], attention_mask=mask[:, :count], position_ids=positions, past_key_values=cache)
    return cache


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def evicted(cache, slots):
    """As a caller compresses it: some slots of each layer."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
    return cache


def going_on(target, kind: str, rows: int, padded: bool) -> dict:
    """A call that goes on from a cache."""
    ids, mask = batch_of(rows).values() if padded else (batch_of(rows)["input_ids"], torch.ones(rows, 12).long())
    cache = (
        StaticCache(target.config, max_cache_len=11 + NEW) if kind == "static" else DynamicCache(config=target.config)
    )
    read = 11 if kind == "one token" else READ
    cache = begun(target, ids, mask, cache, read)
    call = {"inputs": ids[:, read:], "attention_mask": mask, "position_ids": positions_of(mask)[:, read:]}
    call["past_key_values"] = cache
    if kind == "other positions":
        call["position_ids"] = call["position_ids"] + 7
    elif kind == "whole texts":
        call["inputs"] = ids
    elif kind == "embeddings":
        call |= {"inputs": None, "inputs_embeds": target.get_input_embeddings()(ids).detach()}
    elif kind == "a turn that is padded":
        call["attention_mask"][-1, read : read + 2] = 0
    elif kind in ("evicted", "evicted below the whole mask"):
        slots = [0, 1, 2, 5, 6, 7]
        evicted(cache, slots)
        if kind == "evicted":
            call["attention_mask"] = mask[:, [*slots, *range(read, 12)]]
    elif kind == "a longer mask":
        call["attention_mask"] = torch.nn.functional.pad(mask, (5, 0))
    elif kind == "hidden slots":
        call["attention_mask"][:, 3:6] = 0
    return call


GOES_ON = ["new tokens", "one token", "other positions", "whole texts", "embeddings", "a turn that is padded", "static"]
CHANGED = ["evicted", "evicted below the whole mask", "a longer mask", "hidden slots"]


@pytest.mark.parametrize(("rows", "padded"), [(1, False), (3, True)])
@pytest.mark.parametrize("kind", [*GOES_ON, *CHANGED])
def test_a_text_goes_on_from_a_cache(target, kind, rows, padded):
    """By what is given of the new tokens, and whatever the caller did to the cache."""
    plain = target.generate(**going_on(target, kind, rows, padded), **LATER)
    own = plain.past_key_values.layers[-1]
    for drafter in drafters(target, plain.sequences[:, -NEW:]):
        if kind == "static" and rows > 1:  # it has no room for a draft
            with pytest.raises(ValueError, match="max_cache_len=23"):
                target.generate(**going_on(target, kind, rows, padded), **LATER, assistant_model=drafter)
            continue
        drafted = target.generate(**going_on(target, kind, rows, padded), **LATER, assistant_model=drafter)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        slots, layer = int(own.get_seq_length()), drafted.past_key_values.layers[-1]
        assert int(layer.get_seq_length()) == slots
        torch.testing.assert_close(layer.keys[:, :, :slots], own.keys[:, :, :slots], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_go_on_from_a_cache(rows):
    target = make_windowed()
    plain = target.generate(**going_on(target, "other positions", rows, True), **LATER)
    for drafter in drafters(target, plain.sequences[:, -NEW:]):
        drafted = target.generate(**going_on(target, "other positions", rows, True), **LATER, assistant_model=drafter)
        for ours, theirs in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-3, rtol=1e-3)


def test_a_mask_that_hides_tokens_to_come_is_refused(target):
    """Plain decoding hides them."""
    call = going_on(target, "a longer mask", 1, False)
    call["attention_mask"] = torch.nn.functional.pad(torch.ones(1, 12).long(), (0, 5))
    plain = target.generate(**call, **LATER)
    attachment = attach(target, CachebackDrafter(plain.sequences.tolist()))
    call["past_key_values"] = going_on(target, "a longer mask", 1, False)["past_key_values"]
    assert target.generate(**call, **LATER).sequences.tolist() == plain.sequences.tolist()
    detach(target)
    assert "hides tokens to come" in str(attachment.statistics.stepped_aside)


def forget(cache, most, key_states, value_states, layer_idx, *args, **kwargs):
    """Keeps the last tokens of each layer."""
    seen = DynamicCache.update(cache, key_states, value_states, layer_idx, *args, **kwargs)
    evicted(cache, slice(-most, None))
    return seen


class Forgetful(DynamicCache):
    update = functools.partialmethod(forget, 16)


class Later(DynamicCache):
    update = functools.partialmethod(forget, 18)


def replaced():
    cache = DynamicCache()
    cache.update = functools.partial(forget, cache, 16)
    return cache


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [Forgetful, Later, replaced])
def test_a_cache_that_drops_tokens_is_refused_before_work(target, make, rows):
    call, drafter = {**batch_of(rows), **LATER}, make_drafter(target)
    plain = target.generate(**call, past_key_values=make())
    cache = make()
    with pytest.raises(ValueError, match="its own update"):
        target.generate(**call, past_key_values=cache, assistant_model=drafter)
    assert cache.get_seq_length() == 0
    attachment = attach(target, drafter)
    text = target.generate(**call, past_key_values=cache)
    detach(target)
    assert text.sequences.tolist() == plain.sequences.tolist()
    assert "its own update" in str(attachment.statistics.stepped_aside)


@pytest.mark.parametrize(("rows", "most"), [(3, 10), (1, 14), (1, 20), (3, 20)])
def test_a_hook_that_drops_tokens_ends_the_drafts(rows, most):
    """Nothing is drafted beside a hook that holds the cache: its text is plain decoding's, wherever it drops."""
    target = make_target()  # not tried yet: the first tokens are read one by one

    def call(drops: bool, **kwargs):
        cache = DynamicCache(config=target.config)

        def drop(module, args, output):
            evicted(cache, slice(-most, None))

        modules = [layer.self_attn for layer in target.model.layers]
        hooks = [module.register_forward_hook(drop) for module in modules if drops]
        try:
            call = {**batch_of(rows), **LATER, "max_new_tokens": 16, "past_key_values": cache}
            return target.generate(**call, **kwargs).sequences.tolist()
        finally:
            for hook in hooks:
                hook.remove()

    plain, drafter = call(True), make_drafter(target)
    if most < 20:  # the target is tried with the text's own tokens
        drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None
    assert plain != call(False)
    assert call(True, assistant_model=drafter) == plain
    attachment = attach(target, drafter)
    try:
        assert call(True) == plain and attachment.statistics.calls == 0
        assert "hook" in str(attachment.statistics.stepped_aside)
    finally:
        detach(target)


class Undone(Later):
    """It claims that its `crop` undoes what its `update` does."""

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)


def test_attached_calls_after_one_that_broke_off_step_aside(target):
    call = {**batch_of(1), **LATER}
    target.generate(**call, assistant_model=make_drafter(target))  # what is known of other caches does not count
    plain = target.generate(**call, past_key_values=Undone()).sequences.tolist()
    attachment = attach(target, make_drafter(target))
    try:
        with pytest.raises(ValueError, match="loses tokens while it is read"):
            target.generate(**call, past_key_values=Undone())
        assert target.generate(**call, past_key_values=Undone()).sequences.tolist() == plain
        assert "an earlier call ended in the middle" in str(attachment.statistics.stepped_aside)
    finally:
        detach(target)
