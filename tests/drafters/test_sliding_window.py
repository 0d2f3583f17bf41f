"""A trunk that attends to the last positions only, in training, in batches and in decoding."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, make_drafter

from hf_hsdraft import HSDraftConfig
from hf_hsdraft.drafters.hidden_state.draft_session import RollOut
from hf_hsdraft.drafters.hidden_state.network import WorkingWeights

WINDOW, STEPS = 7, 4


@pytest.fixture(params=[1, 2], ids=["one layer", "two layers"])
def windowed(request, target):
    return make_drafter(target, sliding_window=WINDOW, num_hidden_layers=request.param)


def inputs(drafter, length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    taps = torch.randn(length, len(config.target_tap_layers) * config.target_hidden_size, generator=generator)
    return taps, torch.randn(length, config.target_hidden_size, generator=generator), torch.arange(length)


def states_of(drafter, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(drafter(*args, **kwargs).hidden_states)


def test_what_is_out_of_reach_changes_nothing_and_the_rest_does(windowed):
    taps, embeds, positions = inputs(windowed, 30)
    reach = windowed.config.num_hidden_layers * (WINDOW - 1) + 1
    expected = states_of(windowed, taps, embeds, positions)
    kept = states_of(windowed, taps[-reach:], embeds[-reach:], positions[-reach:])
    torch.testing.assert_close(kept, expected, atol=1e-3, rtol=1e-3)
    fewer = states_of(windowed, taps[1 - reach :], embeds[1 - reach :], positions[1 - reach :])
    assert not torch.allclose(fewer, expected, atol=1e-4)


@pytest.mark.parametrize("prompt", [3, 9, 40])
def test_decoding_sees_what_training_sees(windowed, prompt):
    """The roll-out of each round against one forward over the whole text."""
    taps, embeds, positions = inputs(windowed, 60)
    config = windowed.config
    embedding, head = torch.nn.Embedding(VOCAB, config.target_hidden_size), torch.nn.Linear(config.hidden_size, VOCAB)
    weights = windowed.borrow(embedding, head)
    roll_out = RollOut(WorkingWeights.of(windowed, weights.head), config, taps.device, taps.dtype)
    read, end = 0, prompt
    with torch.no_grad():
        for accepted in (1, 4, 2, 3, 1, 5):
            part = slice(read, end)
            [drafted] = roll_out(taps[part], embeds[part], positions[part], STEPS)
            expected = states_of(windowed, taps[:end], embeds[:end], positions[:end], num_draft_steps=STEPS)[:, 0]
            torch.testing.assert_close(drafted, expected, atol=1e-3, rtol=1e-3)
            resumed = RollOut(WorkingWeights.of(windowed, weights.head), config, taps.device, taps.dtype)
            resumed.resume(roll_out.context)
            read, end = end, end + accepted
            if accepted == 3:  # as the next call on a cache goes on
                roll_out = resumed
    held = roll_out.context.length
    assert held <= config.num_hidden_layers * (WINDOW - 1) + 1


def test_chains_of_packed_texts_see_their_own_last_positions(windowed):
    taps, embeds, positions = inputs(windowed, 50)
    documents = torch.tensor([0] * 20 + [1] * 30)
    positions = torch.cat([torch.arange(20), torch.arange(30)])
    starts = torch.tensor([12, 19, 25, 49])
    packed = states_of(windowed, taps, embeds, positions, starts, documents)
    for column, (begin, end) in enumerate([(0, 13), (0, 20), (20, 26), (20, 50)]):
        part = slice(begin, end)
        alone = states_of(windowed, taps[part], embeds[part], positions[part])
        torch.testing.assert_close(packed[:, column], alone[:, 0], atol=1e-3, rtol=1e-3)


def test_rows_of_a_batch_see_their_own_last_positions(windowed):
    rows = [inputs(windowed, 30, seed) for seed in (1, 2)]
    context, ends = None, [0, 0]
    for counts in ([9, 15], [2, 1], [1, 4], [5, 3]):
        parts = [slice(end, end + count) for end, count in zip(ends, counts, strict=True)]
        ends = [part.stop for part in parts]
        columns = [torch.cat([row[i][part] for row, part in zip(rows, parts, strict=True)]) for i in range(3)]
        documents = torch.tensor([0, 1]).repeat_interleave(torch.tensor(counts))
        starts = torch.tensor(counts).cumsum(0) - 1
        with torch.no_grad():
            output = windowed(*columns, starts, documents, context=context)
        context = output.context
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            alone = states_of(windowed, *(column[:end] for column in row))
            drafted = torch.stack(output.hidden_states)[:, index]
            torch.testing.assert_close(drafted, alone[:, 0], atol=1e-3, rtol=1e-3)


def test_a_window_that_holds_no_draft_is_refused(target):
    for window in (0, 4, True, "all"):
        with pytest.raises(ValueError, match="sliding_window"):
            HSDraftConfig.for_target(target, num_draft_steps=4, sliding_window=window)


def test_long_texts_are_plain(target, windowed):
    prompt = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(3))
    for ids in (prompt, prompt.view(2, 30)):
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 40}
        plain = target.generate(ids, **settings)
        assert target.generate(ids, **settings, assistant_model=windowed).tolist() == plain.tolist()
