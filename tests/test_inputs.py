"""What callers pass beside plain prompts: positions of their own, other integer types."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers import AutoModelForCausalLM, GPT2Config, StoppingCriteria, StoppingCriteriaList

from hf_hsdraft import CachebackDrafter

TABLE = 40


@pytest.fixture(scope="module")
def learned():
    """A target with a table of positions, beyond which nothing can be read."""
    torch.manual_seed(0)
    fields = {"n_positions": TABLE, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=VOCAB, eos_token_id=None, bos_token_id=1, pad_token_id=0, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


def drafters(target, plain):
    """One that guesses badly, and one that knows the text."""
    return make_drafter(target), CachebackDrafter(plain.tolist(), node_cost=0.0, depth_cost=0.0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("offset", [0, 13, 20])
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
    call = {"position_ids": torch.arange(11)[None] + offset, "do_sample": False, "max_new_tokens": 40}
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
        drafted = target.generate(
            ids.int(), **call, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([types])
        )
        assert drafted.dtype == torch.int64 and torch.equal(drafted, plain)
        assert types.seen == {torch.int64}
