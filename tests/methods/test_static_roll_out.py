"""The roll-out of fixed shapes: what it computes, how often it is compiled, and whose tensors it uses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from oracles.device_reads import host_reads
from session_helpers import pairs_of
from test_static_cache import Graphs, decode

from hf_hsdraft import HSDrafter
from hf_hsdraft.drafters.hidden_state.draft_session import RollOut
from hf_hsdraft.drafters.hidden_state.quick_weights import QuickWeights, quick_weights
from hf_hsdraft.methods.static_roll_out import StaticRollOut, static_roll_out

STEPS, ROOM = 4, 70


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def drafter_of(window: int | None) -> HSDrafter:
    return make_drafter(make_target(), sliding_window=window, num_hidden_layers=2)


def working_of(drafter: HSDrafter) -> QuickWeights:
    modules = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB)
    return QuickWeights.of(drafter, drafter.borrow(*modules).head)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("prompt", [1, 3, 40])
def test_it_is_the_roll_out_that_grows(window, prompt):
    """Round by round, also where more is read than a round accepts, fewer steps are wanted, or a text is resumed."""
    drafter = drafter_of(window)
    working = working_of(drafter)
    growing, static = RollOut(working, drafter), StaticRollOut(working, drafter, ROOM, STEPS)
    inputs, read, end = pairs_of(drafter, 60, first=3), 0, prompt
    rooms = [keys.data_ptr() for keys in static._text.keys]
    for accepted, steps in ((1, STEPS), (5, STEPS), (2, 2), (8, STEPS), (1, 1), (3, STEPS)):
        part = tuple(column[read:end] for column in inputs)
        rolled = (each({0: len(part[0])}, part, steps) for each in (static, growing))
        torch.testing.assert_close(*rolled, atol=1e-3, rtol=1e-3)
        read, end = end, end + accepted
        if accepted == 2:
            saved = growing.saved()
            static.begin()
            static.restore(saved)
    torch.testing.assert_close(static.saved(), growing.saved(), atol=1e-3, rtol=1e-3)
    assert rooms == [keys.data_ptr() for keys in static._text.keys]


def test_what_an_earlier_text_left_does_not_show():
    drafter = drafter_of(None)
    static = StaticRollOut(working_of(drafter), drafter, 40, STEPS)
    with torch.no_grad():
        fresh = static({0: 6}, pairs_of(drafter, 6), STEPS)
        taps, embeds, positions = pairs_of(drafter, 30)
        taps[-1] = torch.inf
        assert static({0: 30}, (taps, embeds, positions), STEPS).isnan().any()
        static.begin()
        assert torch.equal(static({0: 6}, pairs_of(drafter, 6), STEPS), fresh)


def test_nothing_is_read_back():
    drafter = drafter_of(7)
    static = StaticRollOut(working_of(drafter), drafter, 40, STEPS)
    with torch.no_grad(), host_reads() as seen:
        static({0: 3}, pairs_of(drafter, 3), STEPS)
    assert not seen


def rolled_out(graphs: Graphs, drafter: HSDrafter) -> int:
    """Graphs that read taps as a round hands them on."""
    columns = drafter.config.num_draft_steps + 1
    taps = (columns, len(drafter.config.target_tap_layers) * drafter.config.target_hidden_size)
    return sum(taps in shapes for shapes in graphs.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 1.5}])
def test_generate_compiles_it_once(prompt, graphs, settings):
    """Whatever the prompt, and whatever is accepted; the next call finds it as it was."""
    target, longer = make_target(), torch.cat([prompt, prompt], dim=1)
    drafter = make_drafter(target)
    call = {"cache_implementation": "static", "compile_config": graphs.config(), "max_cache_len": 100, **settings}
    for ids in (prompt, longer, prompt):
        assert decode(target, ids, drafter, **call).sequences.equal(decode(target, ids, **settings))
        assert rolled_out(graphs, drafter) == 1
    before = len(graphs.shapes)
    assert decode(target, longer, drafter, **call).sequences.equal(decode(target, longer, **settings))
    assert len(graphs.shapes) == before


@pytest.mark.slow
def test_drafts_are_those_of_the_roll_out_that_grows(prompt, graphs):
    """With a text that more layers read than roll on, and steps that have parameters each."""
    target = make_target()
    drafter = make_drafter(target, num_hidden_layers=3, num_roll_layers=1, num_step_modules=3)
    grown = decode(target, prompt, drafter, cache_implementation="static", disable_compile=True)
    compiled = decode(target, prompt, drafter, cache_implementation="static", compile_config=graphs.config())
    assert rolled_out(graphs, drafter) == 1 and compiled.sequences.equal(decode(target, prompt))
    assert compiled.statistics.accepted_lengths == grown.statistics.accepted_lengths
    assert compiled.statistics.drafted_nodes == grown.statistics.drafted_nodes


@pytest.mark.slow
def test_an_adapted_drafter_is_not_compiled_for_every_call(prompt, graphs, target):
    """Its weights may change without a trace, so they are joined anew for each call."""
    from peft import LoraConfig, inject_adapter_in_model

    drafter = make_drafter(target)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["fuse"]), drafter)
    call = {"cache_implementation": "static", "compile_config": graphs.config()}
    assert decode(target, prompt, drafter, **call).sequences.equal(decode(target, prompt))
    assert rolled_out(graphs, drafter) == 0


@pytest.mark.slow
def test_other_lengths_and_depths_are_graphs_of_their_own(prompt, graphs):
    """None of them becomes a graph of variable sizes, which the backend here refuses; near lengths share one."""
    drafter, config, found = make_drafter(make_target()), graphs.config(), []
    for length, depth in ((100, 4), (700, 4), (120, 3), (130, 4)):
        target = make_target(max_position_embeddings=1024)  # transformers keeps the longest cache of a target
        drafter.generation_config.num_assistant_tokens = depth
        call = {"cache_implementation": "static", "compile_config": config, "max_cache_len": length}
        assert decode(target, prompt, drafter, **call).sequences.equal(decode(target, prompt))
        found.append(sum((depth + 1, 96) in shapes for shapes in graphs.shapes))
    assert found[:3] == [1, 2, 1]


def test_under_autocast():
    drafter = drafter_of(None)
    working = working_of(drafter)
    growing = RollOut(working, drafter)
    static = StaticRollOut(working, drafter, 40, STEPS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            static({0: 3}, pairs_of(drafter, 3), STEPS).float(),
            growing({0: 3}, pairs_of(drafter, 3), STEPS).float(),
            atol=0.4,
            rtol=0.2,
        )


def test_calls_at_the_same_time_have_rooms_of_their_own(target):
    drafter = make_drafter(target)
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    weights = quick_weights(drafter, *modules), drafter.borrow(*modules)
    with static_roll_out(drafter, *weights, 50, STEPS, None) as one:
        with static_roll_out(drafter, *weights, 50, STEPS, None) as two:
            assert one is not two
        with static_roll_out(drafter, *weights, 500, STEPS, None) as longer:
            assert longer not in (one, two)
    with static_roll_out(drafter, *weights, 60, STEPS, None) as again:  # of as much room
        assert again in (one, two)


def test_they_stay_with_their_weights(target):
    """Of each target, until target or drafter is gone or other weights are loaded."""
    drafter, others = make_drafter(target), [make_target(seed=seed) for seed in (1, 2)]

    def used_by(model) -> StaticRollOut:
        modules = model.get_input_embeddings(), model.get_output_embeddings()
        weights = quick_weights(drafter, *modules), drafter.borrow(*modules)
        with static_roll_out(drafter, *weights, 50, STEPS, None) as each:
            return each

    first, second = used_by(others[0]), used_by(others[1])
    assert first is not second and used_by(others[0]) is first and used_by(others[1]) is second
    gone, head = weakref.ref(second), weakref.ref(others[1].get_output_embeddings().weight)
    del second
    others.pop()
    gc.collect()
    assert gone() is None and head() is None
    with torch.no_grad():
        drafter.fuse.weight.add_(1.0)
    assert used_by(others[0]) is not first
