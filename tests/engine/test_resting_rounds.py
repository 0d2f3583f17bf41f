"""Rounds without drafts: operators as of plain decoding's steps, the same texts and cache, nothing read in vain."""

import itertools
import statistics

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from test_contract import batch_of, make_windowed
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.streamers import BaseStreamer

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import default_options
from hf_hsdraft.drafters.base.protocol import Drafter, Session
from hf_hsdraft.drafters.hidden_state.draft_session import HSDraftSession

NEW = 16


class Operators(TorchDispatchMode):
    """Counts operators that compute or copy; views cost next to nothing."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not operator.is_view
        return operator(*args, **(kwargs or {}))


class Steps(BaseStreamer):
    """Notes how many operators there were when each step's tokens arrived."""

    def __init__(self, operators):
        self.operators, self.counts = operators, []

    def put(self, value):
        self.counts.append(self.operators.count)

    def end(self):
        pass


def operators_of_steps(target, inputs, new=9, **call):
    """The number of operators of each step of a call."""
    with Operators() as operators:
        steps = Steps(operators)
        target.generate(**inputs, do_sample=False, max_new_tokens=new, streamer=steps, **call)
    return [after - before for before, after in itertools.pairwise(steps.counts)]


def resting(target):
    """A drafter whose drafts never pay."""
    drafter = make_drafter(target)
    config = drafter.generation_config
    config.ngram_length, config.packed_weights = 0, False
    config.node_cost = config.depth_cost = 1.0
    return drafter


PROCESSORS = {
    "none": {},
    "end": {"eos_token_id": VOCAB - 1},
    "least length": {"min_new_tokens": NEW, "eos_token_id": 4},
    "penalty": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize(("rows", "side"), [(1, "none"), (3, "left")])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_a_round_without_drafts_runs_no_more_operators_than_a_plain_step(target, rows, processors, side):
    inputs = batch_of(rows, length=18) if side == "left" else {"input_ids": torch.randint(5, VOCAB, (rows, 9))}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    call, drafter = {"pad_token_id": 0, **PROCESSORS[processors]}, resting(target)
    plain = statistics.mode(operators_of_steps(target, inputs, **call))
    target.generate(**inputs, do_sample=False, max_new_tokens=4, assistant_model=drafter, **call)  # tries the target
    assert statistics.mode(operators_of_steps(target, inputs, assistant_model=drafter, **call)) <= plain


def test_rounds_are_alike_while_an_ended_row_stays(target):
    """Of six rows one ends early, which are too few to leave."""
    inputs, call = batch_of(6), {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    free = target.generate(**inputs, **call)[:, 12:].tolist()
    end = next(token for token in free[0][2:8] if not any(token in row for row in free[1:]))
    call["eos_token_id"] = end
    plain = target.generate(**inputs, **call)
    assert torch.equal(target.generate(**inputs, **call, assistant_model=resting(target)), plain)
    counts = operators_of_steps(target, inputs, NEW, assistant_model=resting(target), eos_token_id=end, pad_token_id=0)
    assert len(set(counts[-6:])) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_little_waits_for_a_draft_that_never_comes(target, rows, tuned, monkeypatch):
    tuned(most_pending=4)
    waiting, observe = [], HSDraftSession.observe

    def noting(self, news):
        observe(self, news)
        waiting.extend(sum(len(part[-1]) for part in pending[1:]) for pending in self._pending)

    monkeypatch.setattr(HSDraftSession, "observe", noting)
    target.generate(**batch_of(rows), do_sample=False, max_new_tokens=2 * NEW, assistant_model=resting(target))
    assert len(waiting) > 4 * rows and max(waiting) <= 4


class Turns(Drafter):
    """Drafts what follows in known texts, of some rows in some rounds, and nothing in the rounds between."""

    num_draft_steps, taps = 4, (1, 2)

    def __init__(self, texts):
        self.texts, self.observed, self.received = texts, [], 0
        self.generation_config = self.default_generation_config()

    def default_generation_config(self):
        config = default_options(4, 12, 1)
        config.ngram_length, config.node_cost, config.depth_cost = 0, 0.0, 0.0
        return config

    def session(self, call):
        return _TurnsSession(self)


class _TurnsSession(Session):
    def __init__(self, drafter):
        self.drafter, self.new, self.rounds = drafter, {}, 0

    def draft(self, asks):
        self.rounds += 1
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask):
        text, begin = self.drafter.texts[ask.row], self.new[ask.row]
        rests = self.rounds % 3 or (self.rounds // 3 + ask.row) % 2
        tokens = text[begin : begin + min(ask.depth, ask.size, 3)] if not rests else []
        count = len(tokens) + 1
        chain = tuple(range(-1, count - 1)), tuple(range(count)), tuple(-0.1 * each for each in range(count))
        return DraftTree((ask.root, *tokens), *chain)

    def observe(self, news):
        self.drafter.received += 1
        for each in news:
            self.new[each.row] = self.new.get(each.row, 0) + len(each.tokens)
            self.drafter.observed.append((each.row, each.positions, each.taps, each.following))


def drafted_in_turns(target, inputs, **call):
    call = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "return_dict_in_generate": True, **call}
    plain = target.generate(**inputs, **call)
    texts = plain.sequences if call["return_dict_in_generate"] else plain
    drafter = Turns(texts[:, inputs["input_ids"].shape[1] :].tolist())
    return plain, target.generate(**inputs, assistant_model=drafter, **call), drafter


TARGETS = {"sdpa": make_target, "eager": lambda: make_target("eager"), "windows": make_windowed}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("call", [{}, {"repetition_penalty": 1.3}, {"return_dict_in_generate": False}])
def test_rows_of_different_lengths_rest_together(kind, rows, call):
    target, inputs = TARGETS[kind](), batch_of(rows)
    plain, drafted, _ = drafted_in_turns(target, inputs, **call)
    if not call.get("return_dict_in_generate", True):
        assert torch.equal(drafted, plain)
        return
    assert torch.equal(drafted.sequences, plain.sequences)
    assert max(drafted.statistics.accepted_lengths) > 0 and min(drafted.statistics.drafted_nodes) == 0
    real = torch.cat([inputs["attention_mask"], torch.ones(rows, NEW - 1, dtype=torch.int64)], dim=1).bool()
    for ours, theirs in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        seen = real[:, -ours.keys.shape[2] :, None, None]
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.allclose(one.transpose(1, 2) * seen, other.transpose(1, 2) * seen, atol=1e-4)


def test_rows_that_end_while_others_rest(target):
    inputs = batch_of(6)
    free, _, _ = drafted_in_turns(target, inputs)
    new = free.sequences[:, 12:]
    ends = [int(new[row, 3 + 2 * row]) for row in range(4)]
    plain, drafted, _ = drafted_in_turns(target, inputs, eos_token_id=ends, min_new_tokens=2)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert (plain.sequences == 0).any()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("pending", [2, 64])
def test_a_drafter_observes_what_was_accepted_while_it_did_not_draft(target, rows, pending, tuned):
    tuned(most_pending=pending)
    inputs = batch_of(rows)
    plain, _, drafter = drafted_in_turns(target, inputs)
    states = target(
        plain.sequences,
        attention_mask=(plain.sequences != 0) | (torch.arange(12 + NEW) >= 12),
        position_ids=None if rows == 1 else _positions(inputs["attention_mask"]),
        output_hidden_states=True,
    ).hidden_states
    for row in range(rows):
        first = 12 - int(inputs["attention_mask"][row].sum())
        seen = [each for each in drafter.observed if each[0] == row]
        positions = torch.cat([each[1] for each in seen])
        assert torch.equal(positions, torch.arange(len(positions)))
        slots = positions + first
        assert torch.equal(torch.cat([each[3] for each in seen]), plain.sequences[row, slots + 1])
        taps = torch.cat([states[layer][row, slots] for layer in Turns.taps], dim=-1)
        assert torch.allclose(torch.cat([each[2] for each in seen]), taps, atol=1e-4)


def _positions(mask):
    every = torch.cat([mask, torch.ones(len(mask), NEW, dtype=mask.dtype)], dim=1)
    return (every.cumsum(1) - 1).clamp(min=0)


class _Idle(Turns):
    def default_generation_config(self):
        config = super().default_generation_config()
        config.node_cost = config.depth_cost = 1.0
        return config


def test_a_drafter_that_never_drafts_observes_the_prompts_only(target):
    drafter = _Idle([[]] * 3)
    inputs = batch_of(3)
    call = {"do_sample": False, "max_new_tokens": NEW}
    assert torch.equal(target.generate(**inputs, **call, assistant_model=drafter), target.generate(**inputs, **call))
    assert drafter.received == 1
