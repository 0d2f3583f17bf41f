"""What a trunk attends to and keeps: its own text, within its window, in training, in batches and in decoding."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target
from session_helpers import accept, borrow, drafted_by, hidden_session, pairs_of
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hsdraft.core.tuning import SPARE_TOKENS
from hf_hsdraft.drafters.base import packed_texts
from hf_hsdraft.drafters.hidden_state import trunk
from hf_hsdraft.drafters.hidden_state.draft_session import RollOut
from hf_hsdraft.drafters.hidden_state.network import WorkingWeights


def read(drafter, lengths):
    """Hidden states of several texts that are read at once; the numbers depend on the lengths alone."""
    taps, embeds, _ = pairs_of(drafter, sum(lengths), seed=sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor(lengths).cumsum(0) - 1
    texts = packed_texts.PackedTexts(positions, documents, starts, drafter.config.sliding_window, 3)
    x, ropes = trunk.read(drafter.trunk(), taps, embeds, positions, texts, 2)
    return torch.stack(trunk.roll(drafter.trunk(), x, ropes, texts))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 6])
def test_blocks_of_rows_give_what_all_rows_give(monkeypatch, window, tuned):
    drafter = make_drafter(make_target(), num_hidden_layers=2, sliding_window=window)
    first = read(drafter, [20, 20, 20])
    sizes, attention = [], packed_texts.shared_attention

    def noting(queries, keys, values, seen):
        sizes.append(seen.numel())
        return attention(queries, keys, values, seen)

    monkeypatch.setattr(packed_texts, "shared_attention", noting)
    tuned(large_mask=0, mask_rows=4)
    torch.testing.assert_close(read(drafter, [20, 20, 20]), first, rtol=1e-4, atol=1e-3)
    assert max(sizes) <= 4 * 20, "four rows of one text and what they see"


@torch.no_grad()
def test_a_batch_keeps_what_its_window_shows(target):
    drafter, rooms = make_drafter(target, sliding_window=8), []
    session = hidden_session(drafter, borrow(drafter, target), rows=3)
    for first in range(0, 600, 3):
        taps, _, positions = pairs_of(drafter, 3, first=first)
        for row in range(3):
            accept(session, taps, (positions + 5) % 90, positions, row=row)
        drafted_by(session)
        rooms += [text.keys[0].shape[1] for text in session._roll_out._texts]
    assert max(rooms) <= 2 * 8 + 2 * SPARE_TOKENS


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
    pairs = pairs_of(drafter, 900)

    def states(block):
        tuned(mask_rows=block)
        rolled = RollOut(weights, drafter)
        for part in (slice(0, before), slice(before, 900)):
            if part.stop:
                with _Largest() as made:
                    hidden = rolled({0: part.stop - part.start}, tuple(each[part] for each in pairs), 4)
        return hidden, made.size

    expected, _ = states(1000)
    hidden, largest = states(256)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-3)
    blocks = 2 * 256  # a block's rows for each of a group's heads
    assert largest <= blocks or (window is None and not before), "without a mask the kernel takes all rows"


WINDOW, STEPS = 7, 4


@pytest.fixture(params=[1, 2], ids=["one layer", "two layers"])
def windowed(request, target):
    return make_drafter(target, sliding_window=WINDOW, num_hidden_layers=request.param)


def states_of(drafter, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(drafter(*args, **kwargs).hidden_states)


def test_what_is_out_of_reach_changes_nothing_and_the_rest_does(windowed):
    taps, embeds, positions = pairs_of(windowed, 30)
    reach = windowed.config.num_hidden_layers * (WINDOW - 1) + 1
    expected, kept, fewer = (
        states_of(windowed, taps[-count:], embeds[-count:], positions[-count:]) for count in (30, reach, reach - 1)
    )
    torch.testing.assert_close(kept, expected, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(fewer, expected, atol=1e-4)


def test_chains_of_packed_texts_see_their_own_last_positions(windowed):
    taps, embeds, positions = pairs_of(windowed, 50)
    documents = torch.tensor([0] * 20 + [1] * 30)
    positions = torch.cat([torch.arange(20), torch.arange(30)])
    starts = torch.tensor([12, 19, 25, 49])
    packed = states_of(windowed, taps, embeds, positions, starts, documents)
    for column, (begin, end) in enumerate([(0, 13), (0, 20), (20, 26), (20, 50)]):
        part = slice(begin, end)
        alone = states_of(windowed, taps[part], embeds[part], positions[part])
        torch.testing.assert_close(packed[:, column], alone[:, 0], atol=1e-3, rtol=1e-3)
