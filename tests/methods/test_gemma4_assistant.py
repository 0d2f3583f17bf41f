"""Gemma 4's assistants: drafts as transformers', exact texts, and their files."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from oracles.assistant_parity import CASES, STEPS, drafts_of_transformers, loaded, made, parity, reference
from oracles.mtp_targets import each_plain
from oracles.plain_texts import padded
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.cache_name import CACHE, returned_cache
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Call
from hf_hsdraft.drafters.base.registry import Evidence, TargetInfo
from hf_hsdraft.methods.gemma4_assistant import Gemma4AssistantDrafter
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.formats import recognise

WIDE = {"tree_size": 60, "beam_width": 40}  # so much of the vocabulary that random drafts are often right
plain_case, sliding_case = CASES[:2]


@cache
def _known(name):
    return made(next(case for case in CASES if case.name == name))


def known(case):
    return _known(case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drafts_are_those_of_the_reference(case):
    """In a batch of padded prompts, after rounds that accepted and that rejected drafts."""
    found = parity(case)
    assert found.difference < 1e-4
    assert found.rounds > 20 and found.rejected > 0 and found.accepted > 0


@torch.no_grad()
def test_the_reference_drafts_as_transformers_does():
    target, assistant = known(plain_case)
    drafts = [each for each in drafts_of_transformers(target, assistant, padded(1)["input_ids"], 20) if not each.stale]
    assert drafts
    for each in drafts:
        logits = reference(target, assistant, each.text, each.tokens[:-1])
        torch.testing.assert_close(logits, each.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_texts_are_those_of_plain_decoding(case, do_sample, rows):
    target, assistant = known(case)
    drafter, inputs = loaded(assistant, **WIDE), padded(rows)
    call = {"max_new_tokens": 24, "do_sample": do_sample}
    torch.manual_seed(7)
    output = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **call)
    assert output.sequences.tolist() == each_plain(target, inputs, 7, **call).tolist()
    assert output.statistics.draft_kind == "tree"


@pytest.mark.parametrize(
    "options",
    [
        {"beam_width": 1, "tree_size": STEPS},
        {"ngram_length": 3},
        {"tree_builder": "gumbel", "verification": "rejection"},
    ],
    ids=["chain", "ngrams", "drawn"],
)
def test_other_options_keep_greedy_texts(options):
    target, assistant = known(sliding_case)
    inputs, call = padded(2), {"max_new_tokens": 20, "do_sample": False}
    drafted = target.generate(**inputs, assistant_model=loaded(assistant, **options), **call)
    assert drafted.tolist() == target.generate(**inputs, **call).tolist()


def test_a_chat_goes_on_with_the_targets_cache():
    target, assistant = known(sliding_case)
    drafter, ids = loaded(assistant, **WIDE), padded(1)["input_ids"]
    call = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(ids, assistant_model=drafter, **call)
    longer = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    again = target.generate(longer, assistant_model=drafter, **{CACHE: returned_cache(first)}, **call)
    assert again.sequences.tolist() == target.generate(longer, **call).sequences.tolist()


def test_files_are_recognised_found_and_saved(tmp_path):
    target, assistant = known(plain_case)
    assistant.save_pretrained(tmp_path)
    checkpoint = AnyCheckpoint.open(tmp_path)
    form = recognise(checkpoint)
    assert form.name == "transformers (Gemma 4 assistant)"
    assert form.fit(checkpoint, TargetInfo.of_model(target), ()).evidence == Evidence.SIZES
    assert form.fit(checkpoint, TargetInfo.of_model(known(CASES[4])[0]), ()) is None  # another vocabulary
    shown = CliRunner().invoke(app, ["info", str(tmp_path)], env={"COLUMNS": "200"})
    assert shown.exception is None and "Gemma 4 assistant" in shown.output and "keys and values" in shown.output
    drafter = Gemma4AssistantDrafter.from_pretrained(tmp_path, beam_width=3)
    drafter.save_pretrained(tmp_path / "again")
    again = Gemma4AssistantDrafter.from_pretrained(tmp_path / "again")
    assert again.generation_config.beam_width == 3
    assert all(torch.equal(each, again.model.state_dict()[name]) for name, each in assistant.state_dict().items())


def test_clusters_that_are_not_of_tokens_are_refused(tmp_path):
    _, assistant = known(CASES[4])
    assistant.save_pretrained(tmp_path)
    with torch.no_grad():
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["masked_embedding.token_ordering"][0] = 10**6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="divides its 96 tokens into 12 clusters"):
        AutoDrafter.from_pretrained(tmp_path)


def test_other_targets_are_refused_with_a_reason():
    _, assistant = known(plain_case)
    drafter, ids = loaded(assistant), padded(1)["input_ids"]
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64))
    with pytest.raises(DraftingRefused, match="no layer of the type sliding_attention with its own keys and values"):
        llama.generate(ids, assistant_model=drafter)
    with pytest.raises(ValueError, match="model=LlamaForCausalLM is invalid: expected an assistant"):
        Gemma4AssistantDrafter(llama)
    fewer, _ = made(type(plain_case)("", {"num_key_value_heads": 4}))
    with pytest.raises(DraftingRefused, match="have num_key_value_heads=4, the assistant expects 2"):
        fewer.generate(ids, assistant_model=drafter)
    with pytest.raises(DraftingRefused, match="keys and values, which are elsewhere"):
        drafter.session(Call(known(plain_case)[0], 1, DraftOptions.of(drafter)))
