"""Drafters that a call or a pipeline names."""

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import make_drafter, make_target
from transformers import AutoModel, AutoTokenizer, pipeline
from transformers.pipelines import base as pipelines

from hf_hsdraft import HSDraftConfig, HSDrafter
from hf_hsdraft.generate import by_name

GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def folder(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def loads(monkeypatch):
    """What is loaded by name."""
    names, load = [], by_name.load_for
    monkeypatch.setattr(by_name, "load_for", lambda target, name: names.append(name) or load(target, name))
    return names


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_call_names_its_drafter(target, folder, prompt, loads, kind):
    plain = target.generate(prompt, **GREEDY)
    for _ in range(2):
        call = {**GREEDY, "return_dict_in_generate": True, "assistant_model": kind(folder)}
        output = target.generate(prompt, **call)
        assert output.sequences.tolist() == plain.tolist() and output.statistics.rounds > 0
    assert loads == [kind(folder)]


def test_it_is_loaded_once_for_each_target_and_goes_with_it(target, folder, prompt, loads):
    other = make_target(seed=3).to(torch.float64)
    for model in (target, other, target):
        plain = model.generate(prompt, **GREEDY)
        assert model.generate(prompt, **GREEDY, assistant_model=str(folder)).tolist() == plain.tolist()
    assert len(loads) == 2
    gone = weakref.ref(other)
    del other, model
    gc.collect()
    assert gone() is None


def test_calls_that_come_at_once_load_it_once(target, folder, prompt, loads):
    plain = target.generate(prompt, **GREEDY).tolist()
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda name: target.generate(prompt, **GREEDY, assistant_model=name), [str(folder)] * 3)
    assert [each.tolist() for each in found] == [plain] * 3 and len(loads) == 1


def test_names_that_are_no_drafters(target, prompt, tmp_path):
    with pytest.raises(OSError, match=r"no drafter 'ngram': the nearest name is 'ngrams', which needs no files"):
        target.generate(prompt, **GREEDY, assistant_model="ngram")
    with pytest.raises(OSError, match="no such drafter folder"):
        target.generate(prompt, **GREEDY, assistant_model=str(tmp_path / "none"))
    target.base_model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is no drafter of a known format .*model_type=llama"):
        target.generate(prompt, **GREEDY, assistant_model=str(tmp_path / "model"))
    make_drafter(make_target(vocab_size=50), draft_vocab_size=50).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="vocab_size=97, the drafter expects 50"):
        target.generate(prompt, **GREEDY, assistant_model=str(tmp_path / "other"))


def test_a_pipeline_names_its_drafter(target, folder, own_tokenizer, monkeypatch):
    target.generation_config.pad_token_id = 0
    plain = pipeline("text-generation", model=target, tokenizer=own_tokenizer)("w1 w2 w3", **GREEDY)
    pipe = pipeline("text-generation", model=target, tokenizer=own_tokenizer, assistant_model=str(folder))
    assert isinstance(pipe.assistant_model, HSDrafter) and pipe.assistant_tokenizer is None
    asked, session = [], HSDrafter.session
    monkeypatch.setattr(HSDrafter, "session", lambda *args: asked.append(1) or session(*args))
    assert pipe("w1 w2 w3", **GREEDY) == plain and asked
    named = pipeline("text-generation", model=target, tokenizer=own_tokenizer)
    assert named("w1 w2 w3", **GREEDY, assistant_model=str(folder)) == plain and len(asked) == 2


def test_a_pipeline_in_another_dtype_moves_its_drafter(target, folder, own_tokenizer):
    pipe = pipeline(
        "text-generation", model=target.to(torch.float64), tokenizer=own_tokenizer, assistant_model=str(folder)
    )
    assert pipe.assistant_model.dtype == torch.float64


def test_what_a_pipeline_looks_up_does_not_travel(target, folder):
    """Only a configuration that was read names `AutoModel`; files name the class of the drafter."""
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["HSDrafter"]
    assert HSDraftConfig.from_pretrained(folder).architectures == ["HSDrafter", "AutoModel"]
    assert HSDraftConfig.for_target(target).architectures is None
    drafter = AutoModel.from_pretrained(folder)
    drafter.save_pretrained(folder.parent / "again")
    assert json.loads((folder.parent / "again" / "config.json").read_text())["architectures"] == ["HSDrafter"]
    assert pipelines.load_assistant_model(target, drafter, None) == (drafter, None)


def test_a_drafter_has_no_tokenizer(folder):
    with pytest.raises(TypeError, match="use that of its target"):
        AutoTokenizer.from_pretrained(folder)("some text")
