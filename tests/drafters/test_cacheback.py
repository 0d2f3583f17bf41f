"""Drafting without a network: exact as any, and quick where texts repeat."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_drafter, make_target
from transformers import AutoModelForSeq2SeqLM, BartConfig

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.runtime.target_runtime import TargetRuntime

REPEATING = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8, 9, 8]])
FREE = {"node_cost": 0.0, "depth_cost": 0.0}


def test_padding_and_ids_that_are_no_tokens_are_not_drafted(target):
    """Placeholders stand beside `inputs_embeds`; nothing of them may reach the target's embedding."""
    ids = torch.tensor([[VOCAB + 5, VOCAB + 5, 7, VOCAB + 5, VOCAB + 5, 7, VOCAB + 5, VOCAB + 5, 7]])
    embeds = target.get_input_embeddings()(ids.clamp(max=VOCAB - 1))
    call = {"inputs_embeds": embeds, "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(ids, **call)
    assert target.generate(ids, **call, assistant_model=CachebackDrafter(**FREE)).tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_no_room_for_a_tree_is_no_error(rows):
    """So close to the last position nothing is drafted, n-grams neither, however much the prompt repeats."""
    target = make_target(max_position_embeddings=64, rope_parameters=None)
    ids = torch.tensor([[5, 6, 7, 5, 8, 7, 5, 6, 9]]).repeat(rows, 7)[:, :62]
    plain = target.generate(ids, max_new_tokens=2, do_sample=False)
    for drafter in (CachebackDrafter(**FREE), make_drafter(target)):
        assert (
            target.generate(ids, max_new_tokens=2, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
        )


@pytest.mark.parametrize("options", [FREE, {**FREE, "beam_width": 1}, {"tree_sizing": "fixed"}, {}])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_are_the_targets_own(target, options, rows, do_sample):
    inputs = REPEATING[:rows]
    call = {"attention_mask": (inputs > 0).long(), "max_new_tokens": 24, "do_sample": do_sample}
    outputs = []
    for assistant in (None, CachebackDrafter(**options)):
        torch.manual_seed(0)
        outputs.append(target.generate(inputs, **call, assistant_model=assistant))
    expected = outputs[0]
    if do_sample and rows > 1:
        del call["attention_mask"]
        expected = each_with_its_seed(target, inputs, (inputs > 0).long(), seed=0, **call)
    assert outputs[1].tolist() == expected.tolist()


def test_repetition_saves_forwards_and_statistics_say_so(prompt):
    target = make_target(initializer_range=0.02)  # its text soon goes in circles
    call = {"max_new_tokens": 80, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, **call)
    output = target.generate(prompt, **call, assistant_model=CachebackDrafter(**FREE))
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert output.statistics.target_forwards < 40 and output.statistics.tau > 2
    assert output.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def test_other_texts_help_where_the_running_one_knows_nothing(target, prompt):
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    known = CachebackDrafter(texts=[plain[0].tolist()], **FREE)
    call = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    forwards = {}
    for name, drafter in {"alone": CachebackDrafter(**FREE), "known": known}.items():
        output = target.generate(prompt, **call, assistant_model=drafter)
        assert output.sequences.tolist() == plain.tolist()
        forwards[name] = output.statistics.target_forwards
    assert forwards["known"] < 0.7 * forwards["alone"]
    before = [dict(table.followers) for table in known.frozen]
    target.generate(REPEATING[1:], **call, assistant_model=known)
    assert [dict(table.followers) for table in known.frozen] == before


def test_no_ngram_reaches_from_one_text_into_the_next():
    drafter = CachebackDrafter(texts=[[1, 2], [3, 4]], ngram_length=1)
    assert set(drafter.frozen[0].followers) == {(1,), (3,)}


def test_encoder_decoders_too():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, eos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    target = AutoModelForSeq2SeqLM.from_config(config).eval()
    plain = target.generate(REPEATING[1:], max_new_tokens=30, do_sample=False)
    output = target.generate(
        REPEATING[1:],
        max_new_tokens=30,
        do_sample=False,
        assistant_model=CachebackDrafter(**FREE),
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist() and output.statistics.tau > 1


def test_wrong_arguments_are_refused_before_any_work(target, prompt):
    for length in (0, True):
        with pytest.raises(ValueError, match=f"ngram_length={length}"):
            CachebackDrafter(ngram_length=length)
    for unknown in ({"tree_sise": 3}, {"temperature": 0.3}, {"tree_builder": "gumbel"}):
        with pytest.raises(ValueError, match=next(iter(unknown))):
            CachebackDrafter(**unknown)
    with pytest.raises(ValueError, match=f"token {VOCAB}"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(texts=[[1, VOCAB, 2]]))
    with pytest.raises(ValueError, match="tree_size"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(tree_size=0))
    with pytest.raises(ValueError, match="num_assistant_tokens=True"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(num_assistant_tokens=True))


def test_without_ngrams_there_is_nothing_to_draft_by(target, prompt, monkeypatch):
    drafter = CachebackDrafter()
    drafter.generation_config.ngram_length = 0
    monkeypatch.setattr(TargetRuntime, "prefill", None)  # refused before any work
    with pytest.raises(ValueError, match=r"ngram_length=0 is invalid: expected an integer from 1,.*CachebackDrafter"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
