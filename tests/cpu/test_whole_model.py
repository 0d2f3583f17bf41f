"""The model around the layers in one call: its texts, states and masks are those of transformers' forward."""

import pytest
import torch
from conftest import LLAMA, VOCAB, make_drafter, model_of
from transformers import DynamicCache

from hf_hsdraft import harmless
from hf_hsdraft.cpu import layer_programs, whole_model
from hf_hsdraft.cpu.small_weights import KERNEL
from hf_hsdraft.cpu.whole_model import WholeModel
from hf_hsdraft.runtime.target_runtime import Acceleration

pytestmark = pytest.mark.skipif(KERNEL.operators(wait=True) is None, reason="no compiler, or another processor")
IDS = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4], MASK[2, :1] = 0, 0
PADDED = {"input_ids": IDS, "attention_mask": MASK}
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 32}
FULL = ["full_attention"] * LLAMA["num_hidden_layers"]
KINDS = {
    "llama": lambda: model_of("llama", **SIZES),
    "mistral": lambda: model_of("mistral", **SIZES, sliding_window=None),
    "qwen2": lambda: model_of("qwen2", **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": lambda: model_of("qwen3", **SIZES),
}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """For each call of the model, whether it was run without its layers. No programs are compiled."""
    found, run = [], WholeModel.run

    def noted(self, *args):
        output = run(self, *args)
        found.append(output is not NotImplemented)
        return output

    monkeypatch.setattr(WholeModel, "run", noted)
    monkeypatch.setattr(whole_model, "_tried", {})
    monkeypatch.setattr(layer_programs.Entry, "after_forward", lambda *_: False)
    return found


def asking(target, **options):
    drafter = make_drafter(target)
    drafter.generation_config.compiled_layers = drafter.generation_config.packed_weights = True
    drafter.generation_config.update(**options)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [{"input_ids": IDS[:1]}, {"input_ids": IDS}, PADDED], ids=["one", "batch", "padded"])
def test_texts_and_states_are_plain_decodings(runs, kind, inputs):
    target = KINDS[kind]()
    call = {**inputs, **GREEDY, "return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    plain, drafter = target.generate(**call), asking(target)
    for turn in range(3):  # the first packs the weights, the second compares the prompt's forward, the third runs it
        runs.clear()
        drafted = target.generate(**call, assistant_model=drafter)
        assert drafted.statistics.compiled_layers and sum(runs) > 3
        assert torch.equal(drafted.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
        for before, after in zip(plain.hidden_states, drafted.hidden_states, strict=True):
            torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)
        assert turn == 0 or inputs is PADDED or runs[0]
    # what transformers computes at the padding of a prompt is not ours, so its forward stays transformers'
    assert all(whole_model._tried.values()) or inputs is PADDED


def test_long_prompts_are_plain_decodings(runs):
    target, long = model_of("llama", **{**SIZES, "initializer_range": 0.1}), IDS[:1].repeat(1, 24)
    plain, drafter = target.generate(long, **GREEDY), asking(target)
    for _ in range(3):
        runs.clear()
        assert torch.equal(target.generate(long, **GREEDY, assistant_model=drafter), plain)
    assert runs[0]


@pytest.mark.parametrize("prompt", [IDS[:1], IDS[:1, :1]], ids=["prompt", "one-token"])
def test_a_cache_of_the_caller_is_filled(runs, prompt):
    target = KINDS["llama"]()
    plain, drafter = target.generate(prompt, **GREEDY), asking(target)
    for _ in range(3):
        cache = DynamicCache()  # without layers before the first forward
        drafted = target.generate(prompt, **GREEDY, past_key_values=cache, assistant_model=drafter)
        assert torch.equal(drafted, plain) and cache.get_seq_length() == plain.shape[1] - 1
    assert any(runs)


def test_prompts_given_as_embeddings_count_as_rows(monkeypatch):
    target, rows = KINDS["llama"](), []
    of_prompts = Acceleration.of_prompts
    monkeypatch.setattr(Acceleration, "of_prompts", lambda *args: rows.append(args[-1]) or of_prompts(*args))
    embeds = target.get_input_embeddings()(IDS[:1]).detach()
    drafted = target.generate(inputs_embeds=embeds, assistant_model=asking(target), **GREEDY)
    assert torch.equal(drafted, target.generate(inputs_embeds=embeds, **GREEDY)) and rows == [IDS.shape[1]]


def test_hooks_of_the_angles_see_transformers_keywords(runs):
    target, seen = KINDS["mistral"](), []
    hook = harmless(lambda module, args, kwargs: seen.append(sorted(kwargs)))
    target.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)
    target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    assert not any(runs) and seen and set(map(tuple, seen)) == {("position_ids",)}


@pytest.mark.parametrize("inputs", [{"input_ids": IDS[:1]}, PADDED], ids=["one", "padded"])
def test_steps_without_a_draft_are_plain_decodings(runs, inputs):
    target = KINDS["llama"]()
    resting = asking(target, ngram_length=0, node_cost=1.0, depth_cost=1.0)
    drafted = target.generate(**inputs, assistant_model=resting, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(drafted.sequences, target.generate(**inputs, **GREEDY))
    assert any(runs) and not any(drafted.statistics.drafted_nodes)


def test_hooks_of_layers_are_called_as_before(runs):
    target, seen = KINDS["llama"](), []
    target.model.layers[1].register_forward_hook(harmless(lambda module, args, output: seen.append(module)))
    plain = target.generate(IDS[:1], **GREEDY)
    before = len(seen)
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    assert torch.equal(drafted, plain) and not any(runs) and len(seen) > before


def test_attentions_are_returned_by_transformers(runs):
    target = KINDS["llama"]()
    target.set_attn_implementation("eager")
    call = {"return_dict_in_generate": True, "output_attentions": True, **GREEDY}
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **call)
    assert not any(runs)
    for before, after in zip(target.generate(IDS[:1], **call).attentions, drafted.attentions, strict=True):
        torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("windows", [{}, {"sliding_window": 6}, {"sliding_window": 6, "layer_types": FULL}])
def test_windows_are_left_to_transformers(runs, windows):
    target = model_of("mistral", **SIZES, **{"sliding_window": None, **windows})
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    assert torch.equal(drafted, target.generate(IDS[:1], **GREEDY))
    assert any(runs) == (not windows)


def test_a_model_that_computes_something_else_is_not_used(runs, monkeypatch):
    output = whole_model._output

    def louder(*args):
        found = output(*args)
        found.last_hidden_state = 1.01 * found.last_hidden_state
        return found

    monkeypatch.setattr(whole_model, "_output", louder)
    target = KINDS["llama"]()
    call = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **call)
    plain = target.generate(IDS[:1], **call)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
    assert set(whole_model._tried.values()) == {False}
