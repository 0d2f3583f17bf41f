"""Long prompts of a batch: the trunk scores no text against another, and keeps no more than its window shows."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

from hf_hsdraft.drafters.hidden_state import modeling_hsdraft as modeling


def read(drafter, lengths, context=None):
    """Hidden states and context of a forward over several texts; the numbers drawn depend on the lengths alone."""
    generator, config = torch.Generator().manual_seed(sum(lengths)), drafter.config
    total, size = sum(lengths), config.target_hidden_size
    taps = torch.randn(total, size * len(config.target_tap_layers), generator=generator)
    embeds = torch.randn(total, size, generator=generator)
    before = 0 if context is None else 20
    positions = torch.cat([torch.arange(before, before + length) for length in lengths])
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor(lengths).cumsum(0) - 1
    output = drafter(taps, embeds, positions, starts, documents, context=context, num_draft_steps=3)
    return torch.stack(output.hidden_states), output.context


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 6])
def test_blocks_of_rows_give_what_all_rows_give(monkeypatch, window):
    drafter = make_drafter(make_target(), num_hidden_layers=2, sliding_window=window)
    first, context = read(drafter, [20, 20, 20])
    expected, _ = read(drafter, [5, 1, 9], context)
    sizes, mix = [], modeling.HSDraftAttention._mix

    def noting(self, queries, context, mask, own=None):
        sizes.append(0 if mask is None or own is not None else mask.numel())
        return mix(self, queries, context, mask, own)

    monkeypatch.setattr(modeling.HSDraftAttention, "_mix", noting)
    monkeypatch.setattr(modeling, "_LARGE_MASK", 0)
    monkeypatch.setattr(modeling, "_BLOCK", 4)
    torch.testing.assert_close(read(drafter, [20, 20, 20])[0], first, rtol=1e-4, atol=1e-3)
    assert max(sizes) <= 3 * 60, "the last layer's three rows; before it four rows of one text and what they see"
    torch.testing.assert_close(read(drafter, [5, 1, 9], context)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("new_tokens", [30])
def test_a_batch_keeps_what_its_window_shows(monkeypatch, new_tokens):
    target, contexts = make_target(), []
    drafter, forward = make_drafter(target, sliding_window=8), modeling.HSDrafter.forward

    def noting(self, *args, context=None, **kwargs):
        contexts.append(0 if context is None else context.length)
        return forward(self, *args, context=context, **kwargs)

    monkeypatch.setattr(modeling.HSDrafter, "forward", noting)
    ids = torch.randint(2, VOCAB, (3, 25), generator=torch.Generator().manual_seed(0))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    expected = target.generate(ids, **call)
    assert target.generate(ids, **call, assistant_model=drafter).tolist() == expected.tolist()
    assert len(contexts) > 3 and 0 < max(contexts) <= 3 * 8
