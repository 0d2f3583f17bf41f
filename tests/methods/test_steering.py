"""A small language model that its target steers: what it drafts, on and off, its files, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import VOCAB, make_target
from lm_helpers import GREEDY, drafted_call, drafts_of, layered_target, padded, steered, tiny, with_fixed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_hsdraft import AutoDrafter, CausalLMDrafter, SteeredLMDrafter
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.distillation.layer_subset import with_layers
from hf_hsdraft.methods.estimate.reads import reads_of
from hf_hsdraft.methods.steering.steered_lm import Steering, SteeringSizes


@pytest.fixture(scope="module")
def target():
    return layered_target()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_new_steering_drafts_as_the_plain_drafter_does(target, rows):
    model = with_layers(target, [0, 2, 5])
    plain = with_fixed(CausalLMDrafter(model))
    new = with_fixed(SteeredLMDrafter(model, steering=Steering(SteeringSizes.of(model, target))))
    other = steered(target)
    expected = drafts_of(target, plain, padded(rows))
    assert drafts_of(target, new, padded(rows)) == expected
    assert drafts_of(target, other, padded(rows)) != expected
    other.generation_config.steering = False
    assert drafts_of(target, other, padded(rows)) == expected


def test_the_steering_may_have_another_dtype_than_the_model(target):
    """What it adds takes the dtype of the model: here rounding it makes no difference, as it is zero."""
    rounded = copy.deepcopy(target).to(torch.bfloat16)
    model = with_layers(rounded, [0, 2, 5])
    drafter = with_fixed(SteeredLMDrafter(model, steering=Steering(SteeringSizes.of(model, rounded)).float()))
    plain = with_fixed(CausalLMDrafter(with_layers(rounded, [0, 2, 5])))
    assert drafts_of(rounded, drafter, padded(2)) == drafts_of(rounded, plain, padded(2))


def test_a_drafter_without_a_steering_says_how_to_get_one(target, tmp_path):
    drafter = SteeredLMDrafter(with_layers(target, [0, 2, 5])).eval()
    with pytest.raises(DraftingRefused, match=r"no steering yet: .*steer_by.*--family steered-lm"):
        target.generate(**padded(1), **GREEDY, assistant_model=drafter)
    with pytest.raises(ValueError, match="no steering yet"):
        drafter.save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists(), "nothing is written before"


@torch.no_grad()
def test_each_drafted_token_is_steered_by_the_last_verified_position(target):
    """The drafts' scores, by a forward written out here: gated blocks with deltas, tokens read one text at a time."""
    drafter, inputs = steered(target), padded(1)
    plain = target.generate(**inputs, **GREEDY)[0].tolist()
    taps = target(torch.tensor([plain]), output_hidden_states=True).hidden_states
    taps = torch.cat([taps[layer][0] for layer in drafter.taps], dim=-1)
    steering, model = drafter.steering, with_layers(target, [0, 2, 5])

    def logits(tokens: list[int], root: int) -> torch.Tensor:
        """After tokens whose root stands at a position: those behind it know no more than the root does."""
        norm = steering.norm.weight, steering.norm.bias
        vectors = torch.nn.functional.layer_norm(taps @ steering.fuse.weight.T, (32,), *norm)
        known = torch.cat([torch.zeros(1, 3 * 64), vectors @ steering.up.weight.T])  # nothing before the first token
        deltas = known[[min(place, root) for place in range(len(tokens))]]
        for number, layer in enumerate(model.model.layers):

            def gated(x, mlp=layer.mlp, delta=deltas[:, 64 * number : 64 * (number + 1)]):
                return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * (mlp.up_proj(x) + delta))

            layer.mlp.forward = gated
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)

    drafts, output = drafted_call(target, drafter, inputs)
    position, accepted = inputs["input_ids"].shape[1], output.statistics.accepted_lengths
    assert len(drafts) == len(accepted) and sum(accepted) > 0
    for [(tokens, parents, scores)], length in zip(drafts, accepted, strict=True):
        assert tokens[0] == plain[position]
        for node in range(1, len(tokens)):
            path, each = [], node
            while each > 0:
                path.insert(0, each)
                each = parents[each]
            said = logits([*plain[: position + 1], *(tokens[each] for each in path)], position)
            expected = sum(said[position + depth, tokens[each]].item() for depth, each in enumerate(path))
            assert scores[node] == pytest.approx(expected, abs=2e-3), (position, node)
        position += length + 1


def test_a_steered_drafter_is_saved_beside_an_ordinary_model(target, tmp_path):
    drafter = steered(target)
    drafter.save_pretrained(tmp_path)
    ids = padded(1)["input_ids"]
    small = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, with_layers(target, [0, 2, 5])(ids).logits)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is SteeredLMDrafter and loaded.taps == drafter.taps
    assert drafts_of(target, loaded, padded(1)) == drafts_of(target, drafter, padded(1))
    assert AutoDrafter.from_pretrained(tmp_path, steering=False).generation_config.steering is False
    plain = with_fixed(CausalLMDrafter.from_pretrained(tmp_path))
    unsteered = with_fixed(CausalLMDrafter(with_layers(target, [0, 2, 5])))
    assert drafts_of(target, plain, padded(1)) == drafts_of(target, unsteered, padded(1))
    assert drafts_of(target, plain, padded(1)) != drafts_of(target, drafter, padded(1))
    weights = load_file(tmp_path / "steering.safetensors")
    for taps in ([5, 3, 1], [1, 1, 3]):
        sizes = {"taps": taps, "inner_sizes": list(drafter.steering.sizes.inner_sizes), "target_hidden_size": 32}
        save_file(weights, tmp_path / "steering.safetensors", {"sizes": json.dumps(sizes)})
        with pytest.raises(ValueError, match=r"steering\.safetensors is damaged \(sizes .* are invalid"):
            AutoDrafter.from_pretrained(tmp_path)
    (tmp_path / "steering.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"steering\.safetensors is damaged"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_steering_for_other_models_is_refused(target):
    drafter = steered(target)
    with pytest.raises(DraftingRefused, match=r"hidden_size=16.*reads hidden_size=32"):
        drafter.check(make_target(hidden_size=16, num_hidden_layers=6))
    with pytest.raises(DraftingRefused, match=r"num_hidden_layers=2.*reads hidden states"):
        drafter.check(make_target(num_hidden_layers=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be steered: layer 0 has 0 gated"):
        SteeringSizes.of(tiny("gpt2"), target)
    with pytest.raises(ValueError, match="expected the model that it was trained with"):
        SteeredLMDrafter(with_layers(target, [0, 5]), steering=drafter.steering)
    with pytest.raises(ValueError, match="steering=1 is invalid: expected True or False"):
        with_fixed(drafter, steering=1).check_options()
    hooked = [layer.mlp.up_proj._forward_hooks for layer in target.model.layers]
    assert not any(hooked), "the layers that are shared stay as they were"


def test_a_chat_goes_on_from_what_a_steered_drafter_had_read(target):
    drafter, inputs = steered(target), padded(1)
    unsteered = with_fixed(CausalLMDrafter(with_layers(target, [0, 2, 5])))
    text = target.generate(**inputs, **GREEDY)
    ids = torch.cat([text, torch.tensor([[9, 8, 7]])], dim=1)
    plain = target.generate(ids, **GREEDY).tolist()
    for before, after in ((True, True), (True, False), (False, True)):
        drafter.generation_config.steering = before
        first = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(first.sequences, text)
        drafter.generation_config.steering = after
        cache, read = first.past_key_values, []
        hook = drafter.model.get_input_embeddings().register_forward_hook(
            lambda table, inputs, output, read=read: read.append(inputs[0].shape[1])
        )
        drafts, output = drafted_call(target, drafter, {"input_ids": ids}, past_key_values=cache)
        hook.remove()
        # What it had read in the same way is not read again: all but the text's last tokens.
        assert max(read) < 15 if before == after else max(read) >= ids.shape[1] == 26
        assert output.sequences.tolist() == plain
        if not after:  # what the steered drafter had read is not gone on from
            expected = drafts_of(target, unsteered, {"input_ids": ids})
            assert [each[0][0] for each in drafts] == [each[0][0] for each in expected]


def test_what_a_draft_reads_is_counted(target):
    drafter = steered(target)
    layers, head, *table, steering = reads_of(drafter, 3, 4)
    untied = not drafter.model.config.tie_word_embeddings
    assert [(each.weights, each.times) for each in table] == [(VOCAB * 32, 0)] * untied, "in memory, not in a draft"
    config = drafter.model.config
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * (32 // config.num_attention_heads) * 50
    assert drafter.numbers_kept(50) == kept
    assert layers.weights == sum(weight.numel() for weight in drafter.model.model.layers.parameters()) + 32  # the norm
    assert (layers.times, layers.rows, head.weights) == (3, 4, VOCAB * 32)
    assert steering.weights == sum(weight.numel() for weight in drafter.steering.parameters()) and steering.times == 1
