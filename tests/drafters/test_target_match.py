"""Another target than the drafter was made for is noticed by what it writes, and told with what was measured."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from conftest import VOCAB, as_plain, make_drafter, make_target
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, pipeline

from hf_hsdraft import CachebackDrafter, HSDrafter
from hf_hsdraft.drafters.base.registry import tokenizer_hash
from hf_hsdraft.drafters.hidden_state.target_match import explain_mismatch, measure_match
from hf_hsdraft.training.families.hidden_state import record_target


@pytest.fixture
def recorded(chatty, tokenizer):
    drafter = make_drafter(chatty, target_name="org/target")
    record_target(drafter, chatty, tokenizer)
    return drafter


def warnings_of(call):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("hf_hsdraft.drafters.hidden_state.target_match")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return lines


def generate(target, drafter, **kwargs):
    ids = torch.tensor([[5, 6, 7, 8]])
    return target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=drafter, **kwargs)


def test_counts_are_those_of_counting_by_hand(chatty, recorded):
    reference = recorded.config.target_reference
    ids, start = reference["input_ids"], reference["start"]
    choices = chatty(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    weights = recorded.borrow(chatty.get_input_embeddings(), chatty.get_output_embeddings())
    agreed = drafted = 0
    for place in range(start, len(ids)):  # one call of the drafter each, as decoding does
        states = chatty(torch.tensor([ids[: place - 1]]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer][0] for layer in recorded.config.target_tap_layers], dim=-1)
        embeds = weights.embed(torch.tensor(ids[1:place]))
        hidden = recorded(taps, embeds, torch.arange(place - 1), num_draft_steps=1).hidden_states[0]
        agreed += choices[place - 1] == ids[place]
        drafted += int(weights.vocab_ids[recorded.logits(hidden, weights).argmax()]) == choices[place - 1]
    match = measure_match(chatty, recorded, ids, start)
    assert (match.tokens, match.agreed, match.drafted) == (len(ids) - start, agreed, drafted)
    assert (reference["agreed"], reference["drafted"]) == (agreed, drafted) and agreed == match.tokens


def test_its_own_target_is_recognised_in_any_dtype_and_under_any_name(chatty, tokenizer, recorded):
    assert explain_mismatch(chatty, recorded, tokenizer) == ""
    renamed = copy.deepcopy(chatty).to(torch.bfloat16)
    renamed.config.name_or_path = "somewhere/else"
    assert warnings_of(lambda: generate(renamed, recorded)) == []


def test_the_recorded_text_does_not_depend_on_how_the_target_likes_to_generate(chatty, tokenizer):
    target = copy.deepcopy(chatty)
    target.generation_config.update(repetition_penalty=1.5, do_sample=True, temperature=2.0, max_length=9)
    drafter = make_drafter(target)
    record_target(drafter, target, tokenizer)
    plain = make_drafter(chatty)
    record_target(plain, chatty, tokenizer)
    assert drafter.config.target_reference == plain.config.target_reference


def likely(drafter):
    """A drafter that is said to have guessed much of its own target's text."""
    drafter.config.target_reference["drafted"] = 80
    return drafter


def test_a_target_that_was_trained_further_is_told_once_and_still_exact(chatty, recorded, tmp_path):
    tuned, noise = copy.deepcopy(chatty), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise))
    likely(recorded).save_pretrained(tmp_path)
    drafter = HSDrafter.from_pretrained(tmp_path)
    plain = tuned.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)
    outputs = []
    [warning] = warnings_of(lambda: outputs.extend(generate(tuned, drafter) for _ in range(5)))
    assert all(output.tolist() == plain.tolist() for output in outputs)
    reference = drafter.config.target_reference
    match = measure_match(tuned, drafter, reference["input_ids"], reference["start"])
    assert match.agreed < match.tokens
    assert f"in a text of {match.tokens} tokens" in warning and "trained further" in warning
    assert f"would say {match.drafted} times, of its own target 80 times" in warning
    assert f"write {match.tokens - match.agreed} of the tokens otherwise" in warning


def test_another_tokenizer_is_named_as_the_cause(recorded, chatty):
    vocabulary = {f"t{index}": index for index in range(VOCAB)}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    stranger = make_target(eos_token_id=4, seed=9)
    [warning] = warnings_of(lambda: generate(stranger, likely(recorded), tokenizer=other))
    assert "its tokenizer has other tokens" in warning
    unrecorded = make_drafter(stranger, target_name="org/target", target_tokenizer_hash="0123456789abcdef")
    [warning] = warnings_of(lambda: generate(stranger, unrecorded, tokenizer=other))
    assert "other tokens" in warning and "could not be measured" in warning
    assert warnings_of(lambda: generate(stranger, make_drafter(stranger), tokenizer=other)) == []


def test_measuring_changes_no_text(recorded, monkeypatch):
    """Dynamic rotary frequencies stay stretched once a forward was longer: nothing is read that long."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = make_target(max_position_embeddings=32, rope_parameters=rope)
    reference = {"input_ids": [5, 6, 7] * 60, "start": 3, "agreed": 100, "drafted": 100}
    drafter = make_drafter(target, target_reference=reference)
    prompt = torch.randint(5, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(target).generate(prompt, max_new_tokens=12, do_sample=False)
    drafted = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()


def test_a_measurement_that_fails_is_no_reason_to_fail(chatty, recorded, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room for a long text")

    monkeypatch.setattr("hf_hsdraft.drafters.hidden_state.target_match.measure_match", fail)
    as_plain(copy.deepcopy(chatty), recorded, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8)


def test_a_record_of_another_target_replaces_all_of_the_former(chatty, recorded, tokenizer):
    other = make_target(eos_token_id=4, seed=9)
    assert explain_mismatch(other, recorded) == ""  # a drafter that guesses nothing loses nothing
    record_target(recorded, other, tokenizer, name="org/other")
    assert recorded.config.target_name == "org/other"
    reference = recorded.config.target_reference
    assert measure_match(other, recorded, reference["input_ids"], reference["start"]).agreed == reference["agreed"]
    with pytest.raises(ValueError, match="hidden_size=64"):
        record_target(recorded, make_target(hidden_size=64), tokenizer)


def test_a_hash_tells_tokenizers_apart_and_not_their_order(tokenizer):
    def build(words):
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")))

    assert tokenizer_hash(build({"a": 0, "b": 1})) == tokenizer_hash(build({"b": 1, "a": 0}))
    assert tokenizer_hash(build({"a": 0, "b": 1})) != tokenizer_hash(build({"a": 1, "b": 0}))


@pytest.mark.parametrize("kind", ["ngrams", "hidden states"])
@pytest.mark.parametrize("changed", [{}, {"pad_token_id": 4}, {"eos_token_id": [4, 7], "bos_token_id": None}], ids=str)
def test_a_pipeline_takes_the_drafter_in_its_constructor(chatty, tokenizer, recorded, kind, changed):
    """Whatever the target's special tokens were when the drafter was made."""
    target, drafter = copy.deepcopy(chatty), recorded if kind == "hidden states" else CachebackDrafter()
    for name, token in changed.items():
        setattr(target.config, name, token)
        setattr(target.generation_config, name, token)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafting = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert drafting("w1 w2 w3", **options) == plain("w1 w2 w3", **options)
    assert drafting.assistant_model is drafter and drafting.assistant_tokenizer is None


def test_a_pipeline_refuses_a_drafter_of_another_vocabulary(tokenizer, recorded):
    with pytest.raises(ValueError, match="different tokenizer"):
        pipeline("text-generation", model=make_target(vocab_size=50), tokenizer=tokenizer, assistant_model=recorded)


def test_the_configuration_itself_keeps_its_special_tokens(recorded, chatty):
    config = recorded.config
    assert config.eos_token_id == chatty.config.eos_token_id and config.get_text_config(decoder=True) is config
    compared = copy.deepcopy(config.get_text_config())
    assert compared.vocab_size == config.vocab_size and compared.eos_token_id == "whatever"
