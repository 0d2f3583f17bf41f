"""What was found out about a target holds while the target is the same; and its rounding is its own."""

import functools
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from conftest import VOCAB, make_target
from peft import LoraConfig, get_peft_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hsdraft import CachebackDrafter, attach, harmless
from hf_hsdraft.core.cache_name import given_cache
from hf_hsdraft.core.stand_ins import standing_in
from hf_hsdraft.methods.published.target_copies import shallow_copy, why_not_copied
from hf_hsdraft.runtime import findings
from hf_hsdraft.runtime.misreading import computing_dtype, measured_tolerance
from hf_hsdraft.runtime.module_hooks import experience_of, fingerprint

GREEDY = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def prompts(rows: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def drafted(target, inputs, expected):
    """A call with a drafter that knows the text, by `attach`: the text, whether it was drafted, and why not."""
    drafter = CachebackDrafter(expected[:, 12:].tolist(), tree_sizing="fixed", tree_size=6)
    with attach(target, drafter) as attachment:
        text = target.generate(**inputs, **GREEDY)
    return text, attachment.statistics.calls == 1 and attachment.statistics.tau > 1, attachment.statistics


@harmless  # wrongly: a trial finds it
def steered(module, args, output):
    """Activation steering as in honest_llama: of the last position alone."""
    states = output[0] if isinstance(output, tuple) else output
    states[:, -1] += 0.5
    return output


@contextmanager
def hooked(target):
    handle = target.model.layers[1].register_forward_hook(steered)
    yield
    handle.remove()


@contextmanager
def replaced(target):
    layer = target.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: steered(layer, args, forward(*args, **kwargs))
    yield
    del layer.forward


@harmless
def half_steered(forward, last, *args, **kwargs):
    output = forward(*args, **kwargs)
    states = output[0] if isinstance(output, tuple) else output
    states[:, -1 if last else slice(None)] += 0.5
    return output


@contextmanager
def replaced_twice(target):
    """By an object that may lie where the one before it lay."""
    layer = target.model.layers[1]
    forward = layer.forward
    for last in (False, True):
        layer.forward = functools.partial(half_steered, forward, last)
        if not last:
            plain = target.generate(**prompts(), **GREEDY)
            assert drafted(target, prompts(), plain)[1]
            del layer.forward
    yield
    del layer.forward


@contextmanager
def other_attention(target):
    """That of the last position steers, under the name of the one before."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, *args, **kwargs):
        return steered(module, args, sdpa(module, *args, **kwargs))

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention)
    yield
    ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)


@contextmanager
def replaced_in_its_class(target):
    kind = type(target.model.layers[1])
    forward = kind.forward
    kind.forward = lambda self, *args, **kwargs: steered(self, args, forward(self, *args, **kwargs))
    yield
    kind.forward = forward


@contextmanager
def hooked_everywhere(target):
    attention = type(target.model.layers[1].self_attn)

    def hook(module, args, output):
        return steered(module, args, output) if isinstance(module, attention) else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    yield
    handle.remove()


CHANGES = (hooked, replaced, replaced_twice, replaced_in_its_class, hooked_everywhere, other_attention)


@pytest.mark.parametrize(("change", "rows"), [*((change, 1) for change in CHANGES), (hooked, 3)])
def test_a_target_that_changes_is_tried_again(change, rows):
    target, inputs = make_target(), prompts(rows)
    plain = target.generate(**inputs, **GREEDY)
    for _ in range(2):
        text, drafts, _ = drafted(target, inputs, plain)
        assert drafts and text.equal(plain)
        with change(target):
            other = target.generate(**inputs, **GREEDY)
            assert not other.equal(plain)
            for _ in range(3):  # a refusal counts once it was found twice
                text, drafts, statistics = drafted(target, inputs, other)
                assert text.equal(other) and not drafts, statistics


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("most", [13, 16])
def test_slots_that_a_hook_drops_in_a_trial_are_there_again_after_it(most, rows):
    """The text continues without drafts, and loses slots where plain decoding does."""
    target, inputs = make_target(), prompts(rows)

    @harmless
    def dropping(module, args, kwargs, output):
        for layer in given_cache(kwargs).layers:
            layer.keys, layer.values = layer.keys[:, :, -most:], layer.values[:, :, -most:]

    target.model.register_forward_hook(dropping, with_kwargs=True)
    plain = target.generate(**inputs, **GREEDY)
    for _ in range(2):
        text, drafts, statistics = drafted(target, inputs, plain)
        assert text.equal(plain) and not drafts and "loses tokens" in str(statistics.stepped_aside)


def test_the_fingerprint_tells_hooks_adapters_and_dtypes_apart():
    target = make_target()
    seen = [fingerprint(target)]
    assert fingerprint(target) == seen[0]
    with hooked(target):
        seen.append(fingerprint(target))
    with hooked(target):  # the same function, and perhaps the same address, but another hook
        seen.append(fingerprint(target))
    model = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    seen.append(fingerprint(target))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    seen.append(fingerprint(target))
    with model.disable_adapter():
        seen.append(fingerprint(target))
    seen.append(fingerprint(target.to(torch.bfloat16)))
    assert len(set(seen)) == len(seen)
    target.generate(**prompts(), **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert fingerprint(target) == seen[-1]  # hooks by which outputs are captured are transformers' own
    with standing_in(dict.fromkeys(target.modules())):  # as while another thread's call runs
        assert fingerprint(target) == seen[-1] and not why_not_copied(target.modules())
        assert shallow_copy(target)._compiled_call_impl is None


def test_findings_about_many_forms_of_a_target_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(findings, "_MOST_KINDS", 4)
    target, inputs = make_target(), prompts()
    plain = target.generate(**inputs, **GREEDY)
    for _ in range(8):
        handle = target.register_forward_hook(harmless(lambda *_: None))
        drafted(target, inputs, plain)
        handle.remove()
    assert len(experience_of(target).findings) <= 5


def test_adapters_by_row_are_tried_once():
    """PEFT registers its hooks anew in each call."""
    model = get_peft_model(make_target(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    inputs, names = prompts(2), ["default", "__base__"]
    model.eval()
    plain = model.generate(**inputs, **GREEDY, adapter_names=names)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed", tree_size=6)
    calls, further = [], []
    model.base_model.model.register_forward_hook(harmless(lambda *_: calls.append(1)))
    for _ in range(3):
        calls.clear()
        output = model.generate(
            **inputs, **GREEDY, adapter_names=names, assistant_model=drafter, return_dict_in_generate=True
        )
        assert output.sequences.equal(plain)
        further.append(len(calls) - output.statistics.target_forwards)
    assert further[0] > 0 and further[1:] == [0, 0]


def test_a_hook_without_a_module_counts():
    target, scope = make_target(), {}
    exec("def hook(module, args, output): return None", scope)
    scope["hook"].__module__ = None
    before = fingerprint(target)
    target.register_forward_hook(scope["hook"])
    assert fingerprint(target) != before


# Rounding


@pytest.fixture
def mixed_precision():
    """A target as `Accelerator(mixed_precision="bf16")` makes it: computed in bfloat16, returned in float32."""
    forget_accelerators()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    yield accelerator.prepare(make_target())
    forget_accelerators()


def forget_accelerators():
    """accelerate keeps its precision by process: a Trainer of another test would set it here."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()


def cast_at_the_end():
    """As Nemotron-H."""
    target = make_target().to(torch.bfloat16)
    forward = target.forward

    @functools.wraps(forward)
    def cast(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.float()
        return output

    target.forward = harmless(cast)
    return target


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["mixed precision", "cast"])
def test_float32_that_was_computed_in_half_precision_is_drafted_for(request, kind, rows):
    target = request.getfixturevalue("mixed_precision") if kind == "mixed precision" else cast_at_the_end()
    inputs = prompts(rows)
    plain = target.generate(**inputs, **GREEDY)
    _, drafts, statistics = drafted(target, inputs, plain)
    assert drafts and not statistics.stepped_aside


def test_the_dtype_that_computed_is_seen_in_the_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert computing_dtype(logits) == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        rounded = logits.to(dtype)
        ruled_out = rounded.float().masked_fill(logits > 1, torch.finfo(torch.float32).min)
        assert {computing_dtype(each) for each in (rounded, rounded.float(), ruled_out)} == {dtype}
    assert computing_dtype(logits, torch.bfloat16) == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert computing_dtype(logits) == torch.bfloat16


@pytest.mark.parametrize("seed", range(4))
def test_half_precision_hides_no_steering(seed):
    """Steering of the last position that moves logits by a tenth or so, which a wide tolerance takes for rounding."""
    target, inputs = make_target().to(torch.bfloat16), prompts(seed=seed)
    plain = target.generate(**inputs, **GREEDY)
    assert drafted(target, inputs, plain)[1]
    handle = target.model.layers[1].register_forward_hook(steered)
    other = target.generate(**inputs, **GREEDY)
    text, drafts, statistics = drafted(target, inputs, other)
    handle.remove()
    assert text.equal(other) and not drafts, statistics


@harmless
def prefilled(module, args, output):
    """Steering of the prompt alone, by the number of positions: a draft looks like a prompt to it."""
    states = output[0] if isinstance(output, tuple) else output
    if states.shape[1] > 1:
        states[:, -1] += 2.0
    return output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_noise_hides_no_steering_of_several_positions(seed, dtype):
    target, inputs = make_target().to(dtype), prompts(seed=seed)
    target.model.layers[1].register_forward_hook(prefilled)
    plain = target.generate(**inputs, **GREEDY)
    text, drafts, statistics = drafted(target, inputs, plain)
    assert text.equal(plain) and not drafts, statistics


def test_a_tolerance_follows_the_noise_within_limits():
    assert measured_tolerance(torch.bfloat16, 0.0) == pytest.approx(4 * 2**-7)
    assert measured_tolerance(torch.float16, 0.0) == pytest.approx(4 * 2**-10)
    assert measured_tolerance(torch.bfloat16, 0.04) == pytest.approx(6 * 0.04)
    assert measured_tolerance(torch.bfloat16, 1.0) == pytest.approx(0.25)
