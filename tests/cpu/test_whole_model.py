"""The model around the layers in one call: its texts, states and masks are those of transformers' forward."""

import pytest
import torch
from conftest import LLAMA, VOCAB, make_drafter, model_of

from hf_hsdraft.cpu import layer_programs, whole_model
from hf_hsdraft.cpu.small_weights import KERNEL
from hf_hsdraft.cpu.whole_model import WholeModel

pytestmark = pytest.mark.skipif(KERNEL.operators(wait=True) is None, reason="no compiler, or another processor")
IDS = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4], MASK[2, :1] = 0, 0
PADDED = {"input_ids": IDS, "attention_mask": MASK}
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 32}
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
    plain = target.generate(**call)
    drafted = target.generate(**call, assistant_model=asking(target))
    assert drafted.statistics.compiled_layers and sum(runs) > 3
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
    for before, after in zip(plain.hidden_states[1:], drafted.hidden_states[1:], strict=True):
        torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("inputs", [{"input_ids": IDS[:1]}, PADDED], ids=["one", "padded"])
def test_steps_without_a_draft_are_plain_decodings(runs, inputs):
    target = KINDS["llama"]()
    resting = asking(target, ngram_length=0, node_cost=1.0, depth_cost=1.0)
    drafted = target.generate(**inputs, assistant_model=resting, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(drafted.sequences, target.generate(**inputs, **GREEDY))
    assert any(runs) and not any(drafted.statistics.drafted_nodes)


@pytest.mark.parametrize("change", [{"output_attentions": True}, {"hook": True}], ids=["attentions", "hook"])
def test_what_sees_the_layers_is_called_as_before(runs, change):
    target, seen = KINDS["llama"](), []
    if change.pop("hook", False):
        target.model.layers[1].register_forward_hook(whole_model_hook(seen))
    else:
        target.set_attn_implementation("eager")
    call = {"return_dict_in_generate": True, **change, **GREEDY}
    plain = target.generate(IDS[:1], **call)
    before = len(seen)
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **call)
    assert torch.equal(drafted.sequences, plain.sequences) and not any(runs)
    assert change or len(seen) > before


def whole_model_hook(seen):
    from hf_hsdraft import harmless

    return harmless(lambda module, args, output: seen.append(module))


@pytest.mark.parametrize("sliding_window", [None, 6])
def test_windows_are_left_to_transformers(runs, sliding_window):
    target = model_of("mistral", **SIZES, sliding_window=sliding_window)
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    assert torch.equal(drafted, target.generate(IDS[:1], **GREEDY))
    assert any(runs) == (sliding_window is None)


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
