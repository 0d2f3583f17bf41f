"""Files of any family that were changed to do harm: they load, or are refused in a moment and with a reason."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from family_helpers import make_block_drafter, make_eagle, make_flashmap, make_lm
from oracles.assistant_parity import CASES, loaded, made

from hf_hsdraft import AutoDrafter, CachebackDrafter, CascadeDrafter
from hf_hsdraft.drafters.base import auto_drafter
from hf_hsdraft.drafters.base.registry import TargetInfo
from hf_hsdraft.hub.drafter_files import read_json
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint

FAMILIES = {
    "hidden states": make_drafter,
    "block": make_block_drafter,
    "eagle": make_eagle,
    "flashmap": make_flashmap,
    "language model": make_lm,
    "assistant": lambda target: loaded(made(CASES[4])[1]),
    "n-grams": lambda target: CachebackDrafter(texts=[[1, 2, 3]]),
    "cascade": lambda target: CascadeDrafter([CachebackDrafter(), make_lm(target)], tokens=[4, 8]),
}
DEEP = json.loads("[" * 200 + "]" * 200)
VALUES = [
    0,
    -1,
    1,
    10**7,
    10**15,
    10**400,
    1e308,
    float("nan"),
    "",
    "somebody/kernels",
    "a" * 10**5,
    True,
    None,
    [],
    {},
]
VALUES += [DEEP, {"a": DEEP}, [10**7], [0.5] * 10**4, {"rope_type": "yarn", "factor": 0}]
SECONDS = 8.0  # on a busy machine


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    FAMILIES[request.param](make_target()).save_pretrained(folder)
    return folder


def mutated(document, rng):
    """The document with one value replaced, somewhere in it."""
    document = json.loads(json.dumps(document))
    inside = document
    while True:
        name = rng.choice([*(inside if isinstance(inside, dict) else range(len(inside)))])
        if isinstance(inside[name], dict | list) and inside[name] and rng.random() < 0.7:
            inside = inside[name]
            continue
        inside[name] = rng.choice(VALUES)
        return document


def test_any_changed_configuration_loads_or_is_refused_at_once(saved):
    path, rng, target = saved / "config.json", random.Random(0), TargetInfo.of_model(make_target())
    original = path.read_text()
    try:
        for _ in range(25):
            changed = mutated(json.loads(original), rng)
            path.write_text(json.dumps(changed))
            began = time.monotonic()
            told = _told(lambda: AutoDrafter.from_pretrained(saved))
            assert told.isprintable() and len(told) < 4000, told
            assert time.monotonic() - began < SECONDS, (told, changed)
            checkpoint = AnyCheckpoint("user/mutated", saved, _config(path))
            list(auto_drafter._fitting(checkpoint, target, ""))  # survives it
            assert time.monotonic() - began < 2 * SECONDS, (told, changed)
    finally:
        path.write_text(original)


def _told(load):
    try:
        load()
    except (OSError, ValueError, TypeError) as error:
        assert str(error), "no reason"
        return str(error)
    return ""


def _config(path):
    try:
        return read_json(path)
    except ValueError:
        return {}


LANGUAGE_MODELS = {
    "layers": {"num_hidden_layers": 10**7},
    "layers that the files lack": {"num_hidden_layers": 500},
    "layers of a part": {"text_config": {"num_hidden_layers": 10**7}},
    "no heads": {"num_attention_heads": 0},
    "labels": {"num_labels": 10**9},
    "kernels": {"attn_implementation": "somebody/kernels"},
    "kernels of parts": {"attn_implementation": {"": "somebody/kernels"}},
    "kernels by another name": {"_attn_implementation": "flash_attention_2"},
    "kernels of experts": {"experts_implementation": "somebody/kernels:run"},
    "numbers that are none": {"rms_norm_eps": float("inf")},
    "nesting": {"nested": DEEP},
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_models_are_bounded_before_they_are_built(tmp_path, monkeypatch, kind):
    make_lm(make_target()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **LANGUAGE_MODELS[kind]}))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # nothing is allocated
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"config\.json"):
        AutoDrafter.from_pretrained(tmp_path)
    assert time.monotonic() - began < SECONDS
    warned = []
    monkeypatch.setattr(auto_drafter.logger, "warning", warned.append)
    assert not list(auto_drafter._fitting(AnyCheckpoint("user/lm", tmp_path, _config(path)), _big_target(), ""))
    assert all("user/lm" in line and line.isprintable() for line in warned) and len(warned) <= 1


def _big_target():
    return TargetInfo.of_model(make_target(num_hidden_layers=6, hidden_size=64))


def test_a_large_file_of_phrases_is_loaded_in_a_moment_and_in_part(tmp_path):
    (tmp_path / "drafter").mkdir()
    path = tmp_path / "drafter" / "config.json"
    texts = [[token % VOCAB for token in range(100_000)] for _ in range(10)]
    path.write_text(json.dumps({"model_type": "cacheback", "format_version": 2, "texts": texts}))
    began = time.monotonic()
    drafter = CachebackDrafter.from_pretrained(path.parent)
    assert time.monotonic() - began < SECONDS
    assert sum(map(len, drafter.texts)) == 2**17 and drafter.texts[-1] == texts[-1]
    path.write_text(json.dumps({"model_type": "cacheback", "format_version": 2, "texts": texts * 12}))
    with pytest.raises(ValueError, match="bytes: expected at most"):
        CachebackDrafter.from_pretrained(path.parent)
    path.write_text(json.dumps({"model_type": "cacheback", "format_version": 2, "texts": [[]] * 1_000_000}))
    began = time.monotonic()
    with pytest.raises(ValueError, match="lists and objects"):
        CachebackDrafter.from_pretrained(path.parent)
    assert time.monotonic() - began < SECONDS


OPTIONS = {"verification": "rejection", "tree_builder": "gumbel", "compiled_layers": True, "history": "memory"}


@pytest.mark.parametrize("kind", ["hidden states", "block", "language model", "n-grams"])
def test_options_that_break_a_promise_or_run_something_need_consent(tmp_path, monkeypatch, kind):
    target = make_target()
    FAMILIES[kind](target).save_pretrained(tmp_path)
    name = "drafting_config.json" if kind == "language model" else "generation_config.json"
    (tmp_path / name).write_text(json.dumps({**OPTIONS, "tree_size": 5}))
    warned = []
    monkeypatch.setattr("hf_hsdraft.drafters.base.saved_drafter.logger.warning", warned.append)
    drafter = AutoDrafter.from_pretrained(tmp_path)
    [told] = warned
    assert all(f"{option}={value}" in told for option, value in OPTIONS.items()) and told.isprintable()
    defaults, found = drafter.default_generation_config(), drafter.generation_config
    assert all(getattr(found, option) == getattr(defaults, option) for option in OPTIONS) and found.tree_size == 5
    prompt, call = torch.arange(2, 11)[None], {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}
    texts = []
    for assistant in (None, drafter):
        torch.manual_seed(3)
        texts.append(target.generate(prompt, assistant_model=assistant, **call))
    assert torch.equal(*texts), "the seed's text"
    if kind != "n-grams":  # takes no builders
        asked = AutoDrafter.from_pretrained(tmp_path, **{**OPTIONS, "history": "off"})
        assert asked.generation_config.verification == "rejection" and asked.generation_config.compiled_layers


def test_arguments_and_options_that_do_not_exist_are_told_with_the_nearest(tmp_path):
    make_drafter(make_target()).save_pretrained(tmp_path)
    for load in (type(make_drafter(make_target())).from_pretrained, AutoDrafter.from_pretrained):
        with pytest.raises(TypeError, match=r"tree_sze: the nearest.* is tree_size"):
            load(tmp_path, tree_sze=5)
    with pytest.raises(ValueError, match="tree_size=0 is invalid"):
        CachebackDrafter(tree_size=0)
    with pytest.raises(ValueError, match=r"no drafting option tree_sze.*tree_size"):
        CachebackDrafter(tree_sze=5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_drafter_is_no_target(tmp_path, kind):
    from hf_hsdraft import load_target
    from hf_hsdraft.runtime.target_loading import load_config

    if kind == "language model":
        pytest.skip("it may serve as a target")
    FAMILIES[kind](make_target()).save_pretrained(tmp_path)
    for load in (lambda name: load_target(name, torch.float32), load_config, TargetInfo.of_name):
        with pytest.raises(ValueError, match=r"is a drafter.*expected its target"):
            load(str(tmp_path))
    shutil.copy(tmp_path / "config.json", Path(tmp_path, "elsewhere.json"))
    with pytest.raises(ValueError, match="is a drafter"):
        load_config(str(tmp_path / "elsewhere.json"))
