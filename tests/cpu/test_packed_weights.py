"""Packed copies of a target's weights: the same products, of the weights there are, and nothing stays on the target."""

import copy
import gc
import io
import itertools
import pickle
import time
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, Meanwhile, make_drafter, make_target, model_of
from rich.console import Console
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.bench.calls import Settings
from hf_hsdraft.bench.systems import System
from hf_hsdraft.cli import _try
from hf_hsdraft.core.kept import kept_with
from hf_hsdraft.core.stand_ins import Placed
from hf_hsdraft.cpu import packed_weights as module
from hf_hsdraft.cpu.packed_weights import PackedWeights, has_kernel, linears_to_pack
from hf_hsdraft.drafters.hidden_state import modeling_hsdraft
from hf_hsdraft.methods import round_profile as profile
from hf_hsdraft.pace.pacing import MeasuredCosts

TYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_kernel(torch.ones(1, 1, dtype=dtype))]
pytestmark = pytest.mark.skipif(not TYPES, reason="this processor has no such kernel")
IDS = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def packings(monkeypatch):
    """Layers whose weights were packed, call by call."""
    made, original = [], module.PackedLinears.run

    def noting(self, linear, args, kwargs):
        new, output = self._copy is None, original(self, linear, args, kwargs)
        if new and self._copy is not None:
            made.append(linear)
        return output

    monkeypatch.setattr(module.PackedLinears, "run", noting)
    return made


@pytest.fixture
def copies(monkeypatch):
    """The number of a target's weights that were copied; copying takes long enough for another thread to come by."""
    made, original = [], torch.ops.mkldnn._reorder_linear_weight

    def noting(weight, *args):
        made.append(weight.data_ptr())
        time.sleep(0.002)
        return original(weight, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", noting)

    def of(target):  # drafters copy their own weights, and the head
        return sum(made.count(linear.weight.data_ptr()) for linear in linears_to_pack(target.model, True))

    return of


@pytest.fixture
def no_least(tuned):
    tuned(packed_least_numbers=0)


def drafter_of(target, packed: bool | None = True, **fields):
    drafter = make_drafter(target, **fields)
    drafter.generation_config.packed_weights = packed
    return drafter


def text(target, drafter=None, ids=IDS, **call):
    torch.manual_seed(0)
    return target.generate(ids, assistant_model=drafter, **{"max_new_tokens": 20, "do_sample": False, **call})


def own_forwards(target) -> list[str]:
    """Layers that do not run as their class does."""
    return [name for name, part in target.named_modules() if {"forward", "_compiled_call_impl"} & set(vars(part))]


SEEN, UNSEEN = ["replace", "other data", "in place"], ["data", "columns"]  # the latter change no version and no place


def change(head, way: str) -> None:
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    if way == "replace":
        head.weight = nn.Parameter(head.weight.detach() + noise)
    elif way == "other data":
        head.weight.data = head.weight.detach() + noise
    elif way == "data":
        head.weight.data += noise
    elif way == "columns":
        head.weight.data[:, :4] = head.weight.data[:, :4].roll(1, 1)
    else:
        with torch.no_grad():
            head.weight += noise


# Products


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 40])
@torch.no_grad()
def test_products_are_the_same_but_for_rounding(dtype, bias, rows):
    torch.manual_seed(rows)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    linear = nn.Linear(48, 33, bias=bias).to(dtype)
    every_second = torch.randn(2, rows, 96).to(dtype)[..., ::2]
    for x in (torch.randn(2, rows, 48).to(dtype), every_second, torch.randn(rows, 48).to(dtype), every_second[:0]):
        exact = linear.double()(x.double())
        linear.to(dtype)
        with PackedWeights([linear]).in_use():
            y = linear(x)
        assert y.dtype == dtype and y.shape == exact.shape
        torch.testing.assert_close(y.double(), exact, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("bias", [torch.randn(66)[::2], torch.randn(1).expand(33), torch.randn(1, 33)])
def test_unusual_biases(bias):
    linear, x = nn.Linear(48, 33), torch.randn(6, 48)
    linear.bias = nn.Parameter(bias)
    expected = linear(x)
    with PackedWeights([linear]).in_use():
        torch.testing.assert_close(linear(x), expected)


def test_gradients_autocast_and_other_types_take_the_weights_themselves():
    linear = nn.Linear(16, 8)
    packed, x = PackedWeights([linear]), torch.randn(3, 16)
    with packed.in_use():
        linear(x).sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad(), packed.in_use(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    with torch.no_grad(), packed.in_use(), pytest.raises(RuntimeError, match="dtype"):  # as without
        linear(x.double())


@torch.no_grad()
def test_without_room_for_a_copy_the_weight_is_taken(monkeypatch):
    linear, x = nn.Linear(64, 64), torch.randn(5, 64)

    def failing(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", failing)
    with PackedWeights([linear]).in_use():
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


# Texts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_plain_decodings(target, packings, batch, do_sample):
    ids = torch.randint(2, VOCAB, (batch, 9), generator=torch.Generator().manual_seed(batch))
    # Rows of a drawn batch have their own generators, so that is compared with a drafted one.
    plain = drafter_of(target, packed=False) if do_sample and batch > 1 else None
    expected = text(target, plain, ids, do_sample=do_sample)
    assert not packings
    assert torch.equal(text(target, drafter_of(target), ids, do_sample=do_sample), expected)
    assert set(packings) == set(linears_to_pack(target, True)) and target.lm_head in packings


def test_only_layers_that_run_are_packed(packings):
    """Of an encoder-decoder the encoder runs once, before."""
    fields = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    target = model_of("t5", AutoModelForSeq2SeqLM, decoder_start_token_id=0, **fields)
    assert torch.equal(text(target, CachebackDrafter(packed_weights=True)), text(target))
    assert packings and not {*packings} & {*target.encoder.modules()}


@pytest.mark.usefixtures("no_least")
def test_weights_are_packed_once_that_pays_and_stay_packed(target, packings, tuned):
    """Rounds of all calls count, also those that draft nothing; changed weights are counted from the start."""
    tuned(packing_saves_float32=0.25, packing_forwards=3.0, packing_patience=2.5)  # after 12 rounds, or after 30
    drafter, layers = CachebackDrafter(node_cost=1.0, depth_cost=1.0), len(linears_to_pack(target, True))

    def call(new=9):
        packings.clear()
        output = text(target, drafter, max_new_tokens=new, return_dict_in_generate=True)
        assert torch.equal(output.sequences, text(target, max_new_tokens=new))
        return len(packings), output.statistics.packed_weights

    assert [call() for _ in range(2)] == [(0, False)] * 2, "too few tokens are left to win it back"
    assert [call(new) for new in (33, 9, 9)] == [(layers, True), (0, True), (0, True)]
    assert call(3) == (0, False), "too short to gain from copies"
    with torch.no_grad():
        target.lm_head.weight.data *= 1.01  # which no version counts
    assert [call() for _ in range(5)] == [(0, False)] * 3 + [(layers, True), (0, True)], "all calls are short"


@pytest.mark.usefixtures("no_least")
def test_calls_that_are_too_short_to_try_a_target_pack_nothing_and_prepare_no_drafts(
    target, packings, monkeypatch, tuned
):
    tuned(trial_numbers=0, trial_room=60, packing_saves_float32=1.0)
    monkeypatch.setattr(modeling_hsdraft, "quick_weights", lambda *_: pytest.fail("nothing is drafted"))
    drafter, expected = make_drafter(target), text(target, max_new_tokens=20)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None
    output = text(target, drafter, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and "in so short a call" in output.statistics.reason
    assert not output.statistics.packed_weights and not packings, "each logit is plain decoding's"


@pytest.mark.parametrize("way", SEEN)
def test_weights_that_are_changed_in_a_call_are_seen(way, packings):
    found = []
    for packed in (False, True):
        target = make_target()
        # Hardly anything is drafted: a node may have been verified before the step.
        drafter = drafter_of(target, num_draft_steps=1, beam_width=1, tree_size=1) if packed else None
        if drafter is not None:
            drafter.generation_config.ngram_length = 0
        step = Meanwhile(lambda target=target: change(target.lm_head, way), 11)
        found.append(text(target, drafter, stopping_criteria=[step]))
    assert packings and torch.equal(*found)
    assert not torch.equal(found[0], text(make_target())), "the step changes the text"


@pytest.mark.parametrize("way", [SEEN[0], SEEN[2], *UNSEEN])
def test_a_call_takes_no_copy_of_what_has_been_changed(target, way):
    """Even where no version is counted, and the first call goes on."""

    def step():
        change(target.lm_head, way)
        return text(target, drafter_of(target)), text(target)

    before, meanwhile = text(target), Meanwhile(step, 11)
    text(target, drafter_of(target), stopping_criteria=[meanwhile])
    [(drafted, plain)] = meanwhile.results
    assert torch.equal(drafted, plain) and not torch.equal(plain, before)


def test_a_demo_says_why_it_gained_more_than_tau(target, tokenizer, monkeypatch, no_least):
    """Timed by a clock by which plain decoding takes a hundred times as long."""
    for packed in (True, False):
        printed, times = io.StringIO(), itertools.count()
        drafter = CachebackDrafter(packed_weights=packed, tree_sizing="fixed")
        monkeypatch.setattr(_try, "time", SimpleNamespace(perf_counter=times.__next__))
        console, trial = Console(file=printed, width=200), _try.Trial("target", "n-grams", "", [], {})
        _try.decode(trial, target, tokenizer, drafter, ["w1 w2 w3"], 24, console)
        trial.tried[0].plain.seconds *= 100
        _try.report(trial, console)
        said = printed.getvalue()
        assert ("rounds also have packed weights" in said) == packed
        assert said.index("\ntau ") < said.index("greater than tau: ") < said.index("\ndrafter ")
        assert ("something else slowed plain decoding down" in said) != packed and "same text   yes" in said


# Copies


def test_nothing_stays_on_the_target_and_copies_go_with_it(monkeypatch):
    made, original = [], PackedWeights.__init__

    def noting(self, linears):
        original(self, linears)
        made.append(weakref.ref(self))

    monkeypatch.setattr(PackedWeights, "__init__", noting)
    target = make_target()
    text(target, drafter_of(target))
    assert len(made) == 1 and made[0]() is not None and own_forwards(target) == []
    del target
    gc.collect()
    assert made[0]() is None


def test_nothing_stays_after_an_error(target):
    def failing(*args):
        assert own_forwards(target), "the layers are replaced within a forward"
        raise RuntimeError("stop")

    target.model.norm.register_forward_hook(failing)
    packed = PackedWeights(linears_to_pack(target, True))
    with pytest.raises(RuntimeError, match="stop"), torch.no_grad(), packed.in_use():
        target(IDS)
    assert own_forwards(target) == []


def test_calls_share_copies(target, copies):
    """Those that run at the same time, and later ones."""
    expected, layers = text(target), len(linears_to_pack(target.model, True))
    meanwhile = Meanwhile(lambda: text(target, drafter_of(target)), 11)
    for _ in range(2):
        assert torch.equal(text(target, drafter_of(target), stopping_criteria=[meanwhile]), expected)
        assert torch.equal(meanwhile.results[0], expected) and copies(target) == layers


@pytest.mark.parametrize("first", [True, None])
def test_what_was_asked_for_serves_the_default(target, copies, monkeypatch, first, tuned):
    """And what the default has packed is not packed again where more is asked for."""
    tuned(packed_least_numbers=2000, packing_forwards=0.3)  # the default packs in the third round
    drafter, expected = make_drafter(target), text(target, max_new_tokens=16)
    every, some = (len(linears_to_pack(target.model, asked_for)) for asked_for in (True, None))
    assert 0 < some < every
    packed = []
    for asked_for in (first, not first or None, True, None, True, None):
        drafter.generation_config.packed_weights = asked_for
        gc.collect()  # copies that only a call of before would keep
        output = text(target, drafter, max_new_tokens=16, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and output.statistics.packed_weights
        packed.append(copies(target))
    assert packed == [every if first else some, *[every] * 5]
    with torch.no_grad():  # of a layer that the default would leave alone
        target.model.layers[0].self_attn.k_proj.weight.data[:] *= -1
    assert torch.equal(text(target, drafter, max_new_tokens=16), text(target, max_new_tokens=16))


def test_copies_beyond_the_limit_stay_for_calls_that_ask_for_them(target, copies, tuned):
    # The default would pack in the third round.
    tuned(packed_bytes=0, packed_least_numbers=0, packing_forwards=0.3)
    drafter, expected = make_drafter(target), text(target)
    for asked_for in (True, None, True):
        drafter.generation_config.packed_weights = asked_for
        gc.collect()
        output = text(target, drafter, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and output.statistics.packed_weights == bool(asked_for)
    assert copies(target) == len(linears_to_pack(target.model, True))


@torch.no_grad()
def test_calls_that_pack_at_the_same_moment_make_one_copy(target, copies):
    together, expected = Barrier(2), target(IDS).logits

    @torch.no_grad()
    def run(own):
        together.wait()
        with own.in_use():
            torch.testing.assert_close(target(IDS).logits, expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [PackedWeights(linears_to_pack(target, True)) for _ in range(2)]))
    assert copies(target) == len(linears_to_pack(target.model, True))


@pytest.mark.usefixtures("no_least")
def test_the_limit_is_that_of_the_process(monkeypatch, tuned):
    gc.collect()
    monkeypatch.setattr(module, "_alive", weakref.WeakSet())  # others in this process are not ours
    targets = [make_target(), make_target()]
    size = sum(4 * linear.weight.numel() for linear in linears_to_pack(targets[0], None))
    tuned(packed_bytes=2 * size - 1)
    first = PackedWeights.of(targets[0], None)
    assert first is not None and PackedWeights.of(targets[0], None) is not None, "they share"
    assert PackedWeights.of(targets[1], None) is None
    assert PackedWeights.of(targets[1], True) is not None, "they were asked for"
    del first
    gc.collect()
    assert PackedWeights.of(targets[1], None) is not None


# Layers


def test_what_is_left_as_it_is(target, monkeypatch):
    every = linears_to_pack(target, True)
    assert len(every) == 3 * 7 + 1 and linears_to_pack(target, None) == [] == linears_to_pack(target, False)
    hooked = target.model.layers[0].mlp.up_proj
    handle = hooked.register_forward_hook(lambda *args: None)
    assert hooked not in linears_to_pack(target, True)
    handle.remove()
    torch.nn.utils.parametrizations.weight_norm(hooked)
    assert hooked not in linears_to_pack(target, True) and len(linears_to_pack(target, True)) == len(every) - 1
    target.model.layers[1].mlp.up_proj.to(torch.float64)
    assert len(linears_to_pack(target, True)) == len(every) - 2
    gpt2 = model_of("gpt2", n_layer=1, n_head=2)
    assert linears_to_pack(gpt2, True) == [gpt2.lm_head]  # its other products are of another kind of layer
    compiled, replaced = make_target(), make_target()
    compiled.model.layers[0].compile()
    replaced.model.layers[0].forward = torch.compile(replaced.model.layers[0].forward)
    for other in (compiled, replaced, make_target().to(torch.float64), make_target().to("meta")):
        assert linears_to_pack(other, True) == []
    with torch.backends.mkldnn.flags(enabled=False):
        assert linears_to_pack(target, True) == []
    for owner, name in ((nn.functional, "linear"), (nn.Linear, "forward")):  # products that are not torch's own
        with monkeypatch.context() as patched:
            own = getattr(owner, name)
            patched.setattr(owner, name, lambda *args, own=own: own(*args))
            assert linears_to_pack(target, True) == []
    assert linears_to_pack(target, True)


def test_large_targets_are_packed_when_asked_for_alone(tuned):
    target = make_target(hidden_size=256, num_hidden_layers=1)
    by_default = linears_to_pack(target, None)
    assert by_default and all(linear.weight.numel() >= 2**16 for linear in by_default)
    assert set(by_default) < set(linears_to_pack(target, True))
    size = sum(4 * linear.weight.numel() for linear in by_default)
    tuned(packed_bytes=size)
    assert linears_to_pack(target, None) == by_default
    tuned(packed_bytes=size - 1)
    assert linears_to_pack(target, None) == [] and linears_to_pack(target, True)


@torch.no_grad()
def test_other_threads_and_copies_run_the_layers_as_they_are():
    linear, x = nn.Linear(64, 64), torch.randn(5, 64)
    expected = linear(x)
    with PackedWeights([linear]).in_use(), ThreadPoolExecutor(1) as pool:
        packed = linear(x)
        elsewhere, packed_there = pool.submit(lambda: (linear(x), module.packed_now(linear))).result()
        copied = pickle.loads(pickle.dumps(linear)), copy.deepcopy(linear)
        for each in copied:
            each.weight.data.zero_()
            each.bias.data.zero_()
            assert not each(x).any(), "it has its own weights"
    assert torch.equal(elsewhere, expected) and packed_there == []
    torch.testing.assert_close(packed, expected)
    assert not any(each(x).any() for each in copied)
    assert all(own_forwards(each) == [] for each in copied), "they run as their class does"


@torch.no_grad()
@pytest.mark.parametrize("way", ["forward", "hook", "compiled"])
@pytest.mark.parametrize("when", ["before", "within"])
def test_what_others_put_on_a_layer_counts_and_stays(way, when):
    linear, x = nn.Linear(64, 64), torch.randn(5, 64)
    expected, original = linear(x) + 1.0, linear.forward

    def put():
        if way == "forward":
            linear.forward = lambda input: original(input) + 1.0
        elif way == "compiled":
            linear._compiled_call_impl = lambda input: original(input) + 1.0
        else:
            linear.register_forward_hook(lambda part, args, output: original(*args) + 1.0)

    packed = PackedWeights([linear])
    if when == "before":
        put()
    with packed.in_use():
        if when == "within":
            put()
        assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x), expected), "it stays"


@torch.no_grad()
def test_hooks_of_all_modules_are_called():
    linear, x, calls = nn.Linear(64, 64), torch.randn(5, 64), []
    hook = nn.modules.module.register_module_forward_hook(lambda *args: calls.append(args))
    with hook, PackedWeights([linear]).in_use():
        linear(x)
    assert len(calls) == 1


@torch.no_grad()
def test_a_thread_goes_on_when_another_has_ended():
    """The first to end takes nothing from the other, and the last one leaves nothing."""
    linear, x = nn.Linear(64, 64), torch.randn(5, 64)
    first, second, ended = PackedWeights([linear]), PackedWeights([linear]), Barrier(2)

    def other():
        with second.in_use():
            ended.wait()
            ended.wait()
            return type(vars(linear).get("_compiled_call_impl"))

    with ThreadPoolExecutor(1) as pool:
        event = pool.submit(other)
        with first.in_use():
            ended.wait()
            linear(x)
        ended.wait()
        assert event.result() is Placed
    assert own_forwards(linear) == []


@torch.no_grad()
def test_what_is_compiled_meanwhile_is_the_layer():
    target = make_target(num_hidden_layers=1)
    expected = target(IDS).logits
    compiled = torch.compile(target, backend="eager")
    with PackedWeights(linears_to_pack(target, True)).in_use():
        torch.testing.assert_close(compiled(IDS).logits, expected)
    torch.testing.assert_close(compiled(IDS).logits, expected)
    assert own_forwards(target) == []


@torch.no_grad()
def test_what_an_interrupt_leaves_behind_does_nothing(target):
    linear, x = target.lm_head, torch.randn(3, 32)
    vars(linear)["_compiled_call_impl"] = Placed(linear)
    linear.weight.data *= 2.0
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight)) and linear in linears_to_pack(target, True)
    with PackedWeights([linear]).in_use():
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight))
    assert own_forwards(target) == []


# Time


def test_a_profile_repeats_forwards_by_packed_weights(target):
    system = System("ours", {"assistant_model": drafter_of(target)}, ours=True)
    call = profile._verifying_call(target, system, {"input_ids": IDS, "attention_mask": IDS > 0}, Settings(12), 17)
    assert call is not None and set(call.packed) == set(linears_to_pack(target, True))
    assert profile.packed_now(target) == [] and own_forwards(target) == []
    assert all(milliseconds > 0 for milliseconds in profile._forward_times(target, call))


@pytest.mark.parametrize("asked_for", [True, None])
@pytest.mark.usefixtures("no_least")
def test_the_round_that_packs_is_not_timed(target, asked_for, monkeypatch, tuned):
    tuned(packing_saves_float32=0.2, packing_patience=1.0)
    echo = CachebackDrafter([text(target, max_new_tokens=60)[0].tolist()], packed_weights=asked_for)
    events = []
    original, timed = module.PackedLinears.run, MeasuredCosts.add

    def running(self, *call):
        events.append("packs" if self._copy is None else "runs")
        return original(self, *call)

    def timing(self, *args):
        events.append("timed")
        return timed(self, *args)

    monkeypatch.setattr(module.PackedLinears, "run", running)
    monkeypatch.setattr(MeasuredCosts, "add", timing)
    for _ in range(10):
        output = text(target, echo, max_new_tokens=60, return_dict_in_generate=True)
    assert output.statistics.packed_weights and events.count("timed") >= 2
    packing = [place for place, event in enumerate(events) if event == "packs"]
    after = events[packing[-1] :]
    assert "timed" not in events[packing[0] : packing[-1]]
    assert after.index("runs") < after.index("timed"), "a second round has run"


@pytest.mark.usefixtures("no_least")
def test_costs_are_those_of_packed_weights(target, packings, tuned):
    """They are measured apart from those without."""
    tuned(packing_saves_float32=0.2, packing_patience=1.0)
    echo = CachebackDrafter([text(target, max_new_tokens=200)[0].tolist()])
    for _ in range(3):
        text(target, echo, max_new_tokens=200)
    known = {kind.packed: costs for kind, costs in kept_with(target, "costs", dict).items()}
    assert packings and set(known) == {True, False}
    assert known[True].plain is not None and known[True].widest > 0


@pytest.mark.parametrize("slower", ["copy", "weight"])
def test_each_number_of_rows_is_multiplied_in_the_quicker_way(monkeypatch, tuned, slower):
    """Both take turns first, for each number of rows; all products are the weight's."""
    tuned(raced_products=4)
    monkeypatch.setattr(module, "_races", defaultdict(module._Race))
    weight, calls = torch.randn(48, 64).to(TYPES[0]), []
    by_copy, by_weight = module.packed_product, module.F.linear

    def noted(name, product):
        def run(*args):
            calls.append(name)
            time.sleep(0.01 if name == slower else 0.0)
            return product(*args)

        return run

    monkeypatch.setattr(module, "packed_product", noted("copy", by_copy))
    monkeypatch.setattr(module, "F", SimpleNamespace(linear=noted("weight", by_weight)))
    packed = module.PackedWeight(weight)
    for rows in (2, 9):
        calls.clear()
        x = torch.randn(1, rows, 64).to(TYPES[0])
        for _ in range(12):
            torch.testing.assert_close(packed(x), by_weight(x, weight))
        assert sorted(calls[:8]) == ["copy"] * 4 + ["weight"] * 4 and slower not in calls[8:] and len(calls) == 12


def test_joined_products_by_the_weights_are_rounded_as_the_layers(monkeypatch):
    x, layers = torch.randn(5, 64).bfloat16(), [nn.Linear(64, 48).bfloat16() for _ in range(2)]
    bias = torch.cat([nn.init.normal_(layer.bias, std=9.0).detach() for layer in layers])
    monkeypatch.setattr(module, "_races", defaultdict(lambda: SimpleNamespace(by_copy=False, decided=True)))
    with torch.no_grad():
        found = module.PackedLinears(*layers)(x, bias)
        assert torch.equal(found, torch.cat([layer(x) for layer in layers], dim=-1))


@pytest.mark.parametrize("value", ["yes", 1])
def test_other_values_are_refused(target, value):
    with pytest.raises(ValueError, match="packed_weights"):
        text(target, drafter_of(target, value))
