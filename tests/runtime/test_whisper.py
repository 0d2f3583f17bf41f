"""Targets with a `generate` of their own, as Whisper has: it calls transformers' once for each segment."""

import pytest
import torch
from conftest import failing, make_drafter
from transformers import WhisperConfig, WhisperForConditionalGeneration

from hf_hsdraft import CachebackDrafter, attach
from hf_hsdraft.core.statistics import DraftStatistics

VOCABULARY, FRAMES = 99, 40  # of one segment
FREE = {"node_cost": 0.0, "depth_cost": 0.0}


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_target_positions=64,
        max_source_positions=FRAMES // 2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None, init_std=0.5,
    )  # fmt: skip
    target = WhisperForConditionalGeneration._from_config(config).eval()
    target.generation_config.no_timestamps_token_id = 60
    target.generation_config.is_multilingual = False
    return target


@pytest.fixture(params=["ngrams", "hidden states"])
def assistant(request, whisper):
    return CachebackDrafter(**FREE) if request.param == "ngrams" else make_drafter(whisper, draft_vocab_size=VOCABULARY)


def sound(segments: float = 1.0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, 8, int(segments * FRAMES), generator=torch.Generator().manual_seed(1))


def both(whisper, assistant, segments: float = 1.0, rows: int = 1, **call) -> tuple:
    """What a call gives without and with a drafter, whose options it leaves as they are."""
    options, outputs = assistant.generation_config.to_dict(), []
    for drafting in ({}, {"assistant_model": assistant}):
        torch.manual_seed(0)
        call = {"max_new_tokens": 12, **call}
        outputs.append(whisper.generate(input_features=sound(segments, rows), **call, **drafting))
    assert assistant.generation_config.to_dict() == options
    return tuple(outputs)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"rows": 3},
        {"return_timestamps": True},
        {"return_timestamps": True, "segments": 2.5},
        {"return_timestamps": True, "temperature": (0.0, 0.7), "logprob_threshold": -0.1, "segments": 1.5},
        {"do_sample": True, "temperature": 0.9},
        {"suppress_tokens": [57, 8]},
    ],
    ids=str,
)
def test_texts_are_whispers_own(whisper, assistant, call):
    plain, drafted = both(whisper, assistant, **call)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("how", ["model", "call"])
@pytest.mark.parametrize("timestamps", [False, True])
def test_what_may_not_begin_a_text_does_not(whisper, assistant, how, timestamps, monkeypatch):
    """Whisper leaves these tokens to begin a text where it has an assistant; plain decoding does not."""
    free = whisper.generate(input_features=sound(), max_new_tokens=12, return_timestamps=timestamps)
    begin = [int(free[0, 0]), 2]
    if how == "model":
        monkeypatch.setattr(whisper.generation_config, "begin_suppress_tokens", begin, raising=False)
    listening = {"no_speech_threshold": 0.9, "logprob_threshold": -99.0, "temperature": 0.0}  # a processor of its own
    given = {"begin_suppress_tokens": begin} if how == "call" else {}
    plain, drafted = both(whisper, assistant, return_timestamps=timestamps, **listening, **given)
    assert drafted.tolist() == plain.tolist() != free.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_dict_outputs_are_taken_apart_and_put_together(whisper, assistant, rows):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    plain, drafted = both(whisper, assistant, rows=rows, **asked)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    if rows > 1:  # scores are 0 where a row has ended
        return
    torch.testing.assert_close(drafted.scores, plain.scores, atol=1e-4, rtol=1e-4)
    for one, other in zip(plain.decoder_hidden_states, drafted.decoder_hidden_states, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


def test_statistics_come_with_every_segment(whisper, assistant):
    asked = {"return_dict_in_generate": True, "return_timestamps": True, "segments": 2.0}
    plain, drafted = both(whisper, assistant, **asked)
    assert drafted["sequences"].tolist() == plain["sequences"].tolist()
    (results,) = [[part["result"] for part in row] for row in drafted["segments"]]
    assert results and all(result["statistics"].new_tokens > 0 for result in results)


def test_statistics_stand_for_each_row_and_are_no_sequence():
    statistics = DraftStatistics(new_tokens=4)
    assert statistics[1].cpu() is statistics
    with pytest.raises(TypeError):
        list(statistics)


def test_a_call_that_fails_changes_no_option_either(whisper, assistant, target, prompt):
    """And a drafter of n-grams serves another target afterwards."""
    criteria = [failing(RuntimeError("on purpose"))]
    options = assistant.generation_config.to_dict()
    with pytest.raises(RuntimeError, match="on purpose"):
        whisper.generate(input_features=sound(), assistant_model=assistant, stopping_criteria=criteria)
    assert assistant.generation_config.to_dict() == options
    if isinstance(assistant, CachebackDrafter):
        plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
        drafted = target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=assistant)
        assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("how", ["attached", "named"])
def test_a_drafter_that_is_attached_or_named(whisper, how, tmp_path):
    """Each segment is a call; what may not begin a text does not."""
    drafter = make_drafter(whisper, draft_vocab_size=VOCABULARY)
    free = whisper.generate(input_features=sound(), max_new_tokens=12)
    call = {"input_features": sound(2.5), "max_new_tokens": 12, "return_timestamps": True}
    call["begin_suppress_tokens"] = [int(free[0, 0]), 2]
    plain = whisper.generate(**call)
    if how == "attached":
        with attach(whisper, drafter) as attachment:
            assert whisper.generate(**call).tolist() == plain.tolist()
        assert attachment.statistics.calls >= 3 and attachment.statistics.stepped_aside == {}
    else:
        drafter.save_pretrained(tmp_path)
        assert whisper.generate(**call, assistant_model=str(tmp_path)).tolist() == plain.tolist()
