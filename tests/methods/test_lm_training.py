"""Training of small language models, and of what steers them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, make_target
from lm_helpers import GREEDY, drafts_of, layered_target, padded, steered, tiny, with_fixed
from tokenizers import models
from training_helpers import planned, run
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_hsdraft import AutoDrafter, CausalLMDrafter, LayerSkipDrafter, SteeredLMDrafter
from hf_hsdraft.methods.distillation.layer_subset import layers_of, with_layers
from hf_hsdraft.methods.souping.pruning import prune
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.evaluate.parity import parity
from hf_hsdraft.training.families.trainable import TRAINABLE, as_trained, family_of
from hf_hsdraft.training.loop.start import drafter_to_start_from, prepared
from hf_hsdraft.training.loss.chains import Chains, Pack, true_labels, unroll


@pytest.fixture(scope="module")
def target():
    return layered_target()


def pruned_folder(target, tokenizer, folder):
    prune(target, tokenizer, [0, len(layers_of(target)[1]) - 1], folder)
    return str(folder)


@pytest.fixture(scope="module")
def tied():
    """A target that ends its turns, and whose output rows are its embeddings, as small models have them."""
    made = make_target(eos_token_id=4, tie_word_embeddings=True)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(
    ("family", "kind", "arguments"),
    [
        ("lm", CausalLMDrafter, {"bf16": True, "data_policy": "mixed", "activation_checkpointing": True}),
        ("steered-lm", SteeredLMDrafter, {}),
    ],
)
def test_training_lowers_the_loss_and_saves_an_ordinary_model(tied, tokenizer, tmp_path, family, kind, arguments):
    start = pruned_folder(tied, tokenizer, tmp_path / "small")
    plan = planned(tmp_path, family, init_from=start)
    run(tied, tokenizer, plan, **{"max_steps": 25, "eval_steps": 25, "learning_rate": 1e-2}, **arguments)
    history = json.loads((tmp_path / "out" / "figures.json").read_text())["training"]["history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert max(entry["eval_parity"] for entry in history if "eval_parity" in entry) < 1e-3
    loaded = AutoDrafter.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(loaded) is kind and loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.tree_size == 6 and loaded.tokenizer is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16).state_dict()
    same = all(torch.equal(value.bfloat16(), before[name]) for name, value in plain.state_dict().items())
    assert same == (family == "steered-lm")  # there the language model stays as it was
    inputs = padded(1)
    text = tied.generate(**inputs, **GREEDY)
    assert tied.generate(**inputs, **GREEDY, assistant_model=loaded).tolist() == text.tolist()
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())["training"]
    assert recipe["family"] == family and "2 layers of width 32" in recipe["drafter"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| family | {family} |" in card and ("reads hidden states" in card) == (family == "steered-lm")


def test_a_steering_is_trained_further_and_a_language_model_made_on_the_way(tied, tokenizer, tmp_path):
    brief = {"max_steps": 2, "eval_steps": 2, "eval_new_tokens": 4}
    plain = run(tied, tokenizer, planned(tmp_path, "lm", drafter={"num_hidden_layers": 2}), **brief)
    assert len(layers_of(plain.model)[1]) == 2 and plain.tokenizer is not None
    fields = {"target_tap_layers": [1, 3]}
    first = planned(tmp_path, "steered-lm", init_from=str(tmp_path / "out"), out=str(tmp_path / "a"), drafter=fields)
    second = replace(first, init_from=str(tmp_path / "a"), out=str(tmp_path / "b"), drafter={})
    made, again = (run(tied, tokenizer, plan, **brief) for plan in (first, second))
    assert list(made.taps) == list(again.taps) == [1, 3]
    assert not torch.equal(made.steering.up.weight, again.steering.up.weight)
    with pytest.raises(ValueError, match=r"target_tap_layers=\[2\] is invalid: the drafter to start from reads"):
        run(tied, tokenizer, replace(second, drafter={"target_tap_layers": [2]}, out=str(tmp_path / "c")))
    with pytest.raises(ValueError, match="num_hidden_layers=3 is invalid: the drafter to start from has 2"):
        run(tied, tokenizer, replace(second, drafter={"num_hidden_layers": 3}, out=str(tmp_path / "c")))
    with pytest.raises(ValueError, match="num_draft_steps=40 is invalid"):
        run(tied, tokenizer, planned(tmp_path, "lm", drafter={"num_draft_steps": 40}, out=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


def test_chains_of_the_text_are_what_the_text_says(target):
    """Read as rows of the text, or as branches of it, they are the same; labels along the text need no branches."""
    drafter = TRAINABLE["lm"].fresh(target, {"num_draft_steps": 4, "num_hidden_layers": 3}, 64, list)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    ids = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 14)]
    chats = [TokenizedConversation(each, torch.ones(len(each), dtype=torch.bool)) for each in ids]
    pack = Pack.of(read_features(target, (), chats)).to(torch.device("cpu"), torch.float32)
    chains = Chains(torch.tensor([2, 11, 14]), 2, torch.ones(3, dtype=torch.bool))
    labels = true_labels(pack, chains, 4)
    predictions = family_of(drafter).predictions(drafter, weights)
    with torch.no_grad():
        together = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
        drafter.apart = True
        apart = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
        plain = drafter.model(input_ids=ids[1][None]).logits[0]
    assert [len(each) for each in together] == [3, 2, 2, 2]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for depth in range(4):  # chain 1 starts at the second text's position 2
        torch.testing.assert_close(drafter.logits(apart[depth][1]), plain[3 + depth], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["lm", "steered-lm"])
def test_a_start_with_other_tokens_is_refused_before_anything_is_written(tied, tokenizer, tmp_path, family):
    """Tokens that stand for others, and tokens that the drafter has no embedding of."""
    vocabulary = dict(tokenizer.get_vocab())
    swapped = copy.deepcopy(tokenizer.backend_tokenizer)
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    swapped.model = models.WordLevel(vocabulary, unk_token=tokenizer.unk_token)
    other = PreTrainedTokenizerFast(tokenizer_object=swapped, chat_template=tokenizer.chat_template)
    start = pruned_folder(tied, other, tmp_path / "other")
    with pytest.raises(ValueError, match="tokenizer is not the target's: 2 of"):
        run(tied, tokenizer, planned(tmp_path, family, init_from=start))
    start = pruned_folder(tied, tokenizer, tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(start)
    small.resize_token_embeddings(VOCAB - 10)
    small.save_pretrained(start)
    with pytest.raises(ValueError, match=f"has embeddings of {VOCAB - 10} tokens, the target's tokenizer has ids up"):
        run(tied, tokenizer, planned(tmp_path, family, init_from=start))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "steps"), [({}, 8), ({"num_draft_steps": 4}, 4)])
def test_a_new_steering_is_drafted_as_deep_as_it_is_trained(tied, tokenizer, tmp_path, given, steps):
    start = pruned_folder(tied, tokenizer, tmp_path / "small")
    assert CausalLMDrafter.from_pretrained(start).generation_config.num_assistant_tokens == 5
    family, plan = TRAINABLE["steered-lm"], planned(tmp_path, "steered-lm", init_from=start, drafter=given)
    drafter = drafter_to_start_from(family, tied, tokenizer, plan)
    assert drafter.num_draft_steps == drafter.generation_config.num_assistant_tokens == steps
    assert family.untrained(tied, given).generation_config.num_assistant_tokens == steps


def test_a_steering_without_a_language_model_is_refused(tied, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"name the model by --init-from.*--family lm` makes one"):
        prepared(planned(tmp_path, "steered-lm"), {}, "cpu")
    with pytest.raises(ValueError, match="name the model by --init-from"):
        run(tied, tokenizer, planned(tmp_path, "steered-lm"))
    assert not (tmp_path / "out").exists()


def test_drafters_are_taken_as_they_are_trained(target):
    """Their depths, options and drafts stay; a language model whose logits are more than a product can only draft."""
    for drafter in (steered(target), with_fixed(CausalLMDrafter(with_layers(target, [0, 5])))):
        taken = as_trained(drafter)
        assert family_of(taken).drafts_as is type(drafter)
        assert drafts_of(target, taken, padded(1)) == drafts_of(target, drafter, padded(1))
        report = parity(taken, target, [padded(1)["input_ids"]], max_new_tokens=16)
        assert report.passed and len(report.depths) == 5
    assert as_trained(LayerSkipDrafter.for_target(target, [1, 3])) is None
    capped = tiny("gemma2", final_logit_softcapping=0.5)
    assert as_trained(CausalLMDrafter(capped)) is None
