"""Long prompts of a batch: the trunk scores no text against another, and keeps no more than its window shows."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hsdraft.drafters.base import packed_texts
from hf_hsdraft.drafters.hidden_state.draft_session import RollOut
from hf_hsdraft.drafters.hidden_state.network import WorkingWeights


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
def test_blocks_of_rows_give_what_all_rows_give(monkeypatch, window, tuned):
    drafter = make_drafter(make_target(), num_hidden_layers=2, sliding_window=window)
    first, context = read(drafter, [20, 20, 20])
    expected, _ = read(drafter, [5, 1, 9], context)
    sizes, attention = [], packed_texts.shared_attention

    def noting(queries, keys, values, seen):
        sizes.append(seen.numel())
        return attention(queries, keys, values, seen)

    monkeypatch.setattr(packed_texts, "shared_attention", noting)
    tuned(large_mask=0, mask_rows=4)
    torch.testing.assert_close(read(drafter, [20, 20, 20])[0], first, rtol=1e-4, atol=1e-3)
    assert max(sizes) <= 4 * 20, "four rows of one text and what they see"
    torch.testing.assert_close(read(drafter, [5, 1, 9], context)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("new_tokens", [30])
def test_a_batch_keeps_what_its_window_shows(monkeypatch, new_tokens):
    target, lengths = make_target(), []
    drafter, packed = make_drafter(target, sliding_window=8), RollOut._packed

    def noting(self, *args):
        lengths.append(self._batch.length)
        return packed(self, *args)

    monkeypatch.setattr(RollOut, "_packed", noting)
    ids = torch.randint(2, VOCAB, (3, 25), generator=torch.Generator().manual_seed(0))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    expected = target.generate(ids, **call)
    assert target.generate(ids, **call, assistant_model=drafter).tolist() == expected.tolist()
    assert len(lengths) > 3 and max(lengths) == 3 * 7


class _Largest(TorchDispatchMode):
    """The greatest second-largest axis of all tensors made inside: of a mask `[T, T]` it is T."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                self.size = max(self.size, sorted(tensor.shape)[-2])
        return made


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40])
def test_no_tensor_is_as_large_as_the_square_of_a_batch(window):
    drafter = make_drafter(make_target(), num_hidden_layers=3, sliding_window=window)
    with _Largest() as made:
        read(drafter, [600, 500, 7])
    assert made.size <= 600, "a mask of all texts has 1107 rows and columns"
    with _Largest() as made:
        read(drafter, [1500])
    assert made.size <= 2 * 256, "a block's rows for each of a group's heads"


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 300])
@pytest.mark.parametrize("window", [None, 40, 300])
def test_a_long_text_is_read_in_blocks(window, before, tuned):
    drafter = make_drafter(make_target(), num_hidden_layers=2, sliding_window=window, head="trained")
    weights = WorkingWeights.of(drafter, None)
    embeds = torch.randn(900, 32)
    taps = torch.randn(900, drafter.config.target_hidden_size * len(drafter.config.target_tap_layers))

    def states(block):
        tuned(mask_rows=block)
        rolled = RollOut(weights, drafter.config, drafter.device, drafter.dtype)
        for part in (slice(0, before), slice(before, 900)):
            if part.stop:
                with _Largest() as made:
                    hidden = rolled(taps[part], embeds[part], torch.arange(900)[part], 4)
        return hidden, made.size

    expected, _ = states(1000)
    hidden, largest = states(256)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-3)
    blocks = 2 * 256  # a block's rows for each of a group's heads
    assert largest <= blocks or (window is None and not before), "without a mask the kernel takes all rows"
