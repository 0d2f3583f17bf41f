"""Files that somebody wrote to do harm: refused with a reason, before anything is allocated, run, read or written."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys

import pytest
import torch
from conftest import VOCAB, make_drafter
from safetensors.torch import load_file, save_file

from hf_hsdraft import HSDraftConfig, HSDrafter

HUGE = 10**15
REFERENCE = {"input_ids": [1, 2, 3, 4], "start": 2, "agreed": 2, "drafted": 1}
HOSTILE = {
    # sizes that would exhaust a machine
    "hidden size": {"hidden_size": HUGE, "target_hidden_size": HUGE},
    "intermediate size": {"intermediate_size": HUGE},
    "large but allowed sizes": {"intermediate_size": 2**20, "injector_hidden_size": 2**17},
    "layers": {"num_hidden_layers": HUGE},
    "heads": {"num_attention_heads": HUGE},
    "head width": {"head_dim": HUGE},
    "steps": {"num_draft_steps": HUGE, "tree_size": HUGE},
    "nodes": {"tree_size": HUGE},
    "beam": {"beam_width": HUGE},
    "rank": {"injector_rank": HUGE},
    "vocabulary": {"vocab_size": HUGE, "draft_vocab_size": HUGE},
    "labels": {"num_labels": HUGE},
    "taps": {"target_tap_layers": list(range(10**5)), "target_num_hidden_layers": 10**6},
    # values of other kinds
    "negative": {"num_hidden_layers": -1},
    "no integer": {"hidden_size": 32.0},
    "a truth value": {"num_draft_steps": True},
    "infinite": {"rope_theta": 1e400},
    "no number": {"rms_norm_eps": float("nan")},
    "an enormous integer": {"rope_theta": 10**400},
    "text for a list": {"draft_vocab_ids": "abc"},
    "a mapping for a list": {"target_tap_layers": {"0": 1}},
    "nested lists": {"draft_vocab_ids": [[1, 2], [3]]},
    "a list for a name": {"injector": ["path"]},
    "token ids out of range": {"draft_vocab_ids": [0, HUGE], "draft_vocab_size": 2},
    # other places, other code
    "weights elsewhere": {"transformers_weights": "../../../../etc/passwd"},
    "quantisation": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "kernels of the Hub": {"attn_implementation": "somebody/kernels"},
    "expert kernels of the Hub": {"experts_implementation": "somebody/kernels:run"},
    "fusions": {"fusion_config": {"a": "b"}},
    "sharding": {"distributed_config": {"tp_size": 8}},
    "a function for a dtype": {"dtype": "load"},
    "digests of files elsewhere": {"weights_digest": {"../../secret": "0" * 64}},
    "digests that are none": {"weights_digest": {"model.safetensors": "rm -rf /"}},
    # what goes to terminals and cards
    "escape sequences": {"target_name": "\x1b]0;owned\x07"},
    "several lines": {"target_name": "target\nlicense: mit"},
    "a name without end": {"target_name": "a" * 10**6},
    "a tokenizer without end": {"target_tokenizer_hash": "a" * 10**6},
    "special tokens": {"eos_token_id": {"a": 1}},
    "a text of other tokens": {"target_reference": {**REFERENCE, "input_ids": [1, HUGE, 2]}},
    "a text without end": {"target_reference": {**REFERENCE, "input_ids": [1] * 10**5}},
    "a text from before its beginning": {"target_reference": {**REFERENCE, "start": -5}},
    "a text from a list": {"target_reference": [1, 2]},
    # versions
    "a format of the future": {"format_version": 10**5},
    "a format that is none": {"format_version": "two"},
}


@pytest.fixture
def folder(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_configuration_is_refused_before_anything_is_allocated(folder, kind):
    change(folder, **HOSTILE[kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "labels":  # means nothing to a drafter
        assert "LABEL_2" not in HSDrafter.from_pretrained(folder).config.id2label.values()
    else:
        with pytest.raises(ValueError) as error:
            HSDrafter.from_pretrained(folder)
        assert len(str(error.value)) < 4000 and str(error.value).isprintable(), error.value
        [first, *_] = HOSTILE[kind]
        assert any(name in str(error.value) for name in HOSTILE[kind]) or "do not match" in str(error.value), first
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kilobytes
    assert grown < 200_000


def test_a_newer_format_asks_for_an_upgrade_and_older_ones_load(folder):
    change(folder, format_version=99, injector="of the future")
    with pytest.raises(ValueError, match="upgrade hf_hsdraft"):
        HSDrafter.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    new = (
        "format_version",
        "target_revision",
        "target_tokenizer_hash",
        "target_reference",
        "weights_digest",
        "auto_map",
    )
    old = {name: value for name, value in config.items() if name not in new} | {"injector": "path"}
    (folder / "config.json").write_text(json.dumps(old))
    for path in (*folder.glob("*.py"), folder / "README.md", folder / "custom_generate"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    drafter = HSDrafter.from_pretrained(folder)
    assert drafter.config.format_version == 1
    drafter.save_pretrained(folder)
    assert HSDraftConfig.from_pretrained(folder).format_version == 2


def test_fields_of_no_meaning_are_left_out(folder):
    change(folder, nonsense="x", _name_or_path="/etc", custom_generate="evil/repo")
    config = HSDrafter.from_pretrained(folder).config
    assert not hasattr(config, "nonsense") and not hasattr(config, "custom_generate")


class Harm:
    """What unpickling would do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_never_read(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    with pytest.raises((OSError, ValueError), match="safetensors"):
        HSDrafter.from_pretrained(folder)
    assert not (tmp_path / "harmed").exists()


def test_an_index_cannot_point_elsewhere(folder, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "secret.bin"):
        index = {"metadata": {}, "weight_map": {"fuse.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="beside it"):
            HSDrafter.from_pretrained(folder)


def test_weights_in_several_files_load(target, tmp_path):
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = HSDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in drafter.state_dict().items())
    drafter.save_pretrained(tmp_path)  # into one file now; the others would be stale
    assert [path.name for path in tmp_path.glob("model*.safetensors*")] == ["model.safetensors"]


def test_a_flipped_bit_is_noticed(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256"):
        HSDrafter.from_pretrained(folder)
    assert path.exists()  # somebody's file, not the cache's


@pytest.mark.parametrize("content", ["{", "[]", "null", "[" * 100_000, "\ufeff{}", '{"model_type": 5}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_none(folder, name, content):
    if name == "generation_config.json" and content.startswith('{"model'):
        pytest.skip("an unknown option, told by generate()")
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"damaged|not a drafter"):
        HSDrafter.from_pretrained(folder)


def test_json_without_end_is_not_read(folder):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2**31)  # sparse
    with pytest.raises(ValueError, match="bytes"):
        HSDrafter.from_pretrained(folder)


def test_options_without_end_are_refused(folder, target, prompt):
    (folder / "generation_config.json").write_text(json.dumps({"tree_size": HUGE, "beam_width": HUGE}))
    drafter = HSDrafter.from_pretrained(folder)
    with pytest.raises(ValueError, match="tree_size"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)


def test_weights_that_are_no_numbers(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fuse.weight"] = tensors["fuse.weight"].to(torch.int64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="floating point"):
        HSDrafter.from_pretrained(folder)


def test_an_adapter_in_the_folder_does_not_lead_elsewhere(folder, target, tmp_path):
    """A drafter's folder that names another base is still that drafter; an adapter alone is none."""
    pytest.importorskip("peft")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "elsewhere")}
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match="load the drafter it adapts"):
        HSDrafter.from_pretrained(alone)


def test_other_models_are_told_apart(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model of type 'llama', not a drafter"):
        HSDrafter.from_pretrained(tmp_path)


def test_no_code_beside_the_weights_is_run_by_the_package(folder, tmp_path):
    for path in folder.glob("*.py"):
        path.write_text(f"import os; os.mkdir({str(tmp_path / 'harmed')!r})")
    change(folder, auto_map={"AutoConfig": "evil/repo--x.Y", "AutoModel": "evil/repo--x.Y"})
    HSDrafter.from_pretrained(folder)
    assert not (tmp_path / "harmed").exists() and "x" not in sys.modules


def test_saving_fails_whole(target, tmp_path, monkeypatch):
    """What goes wrong in the middle of saving leaves the former drafter as it was."""
    first, second = make_drafter(target, seed=1), make_drafter(target, seed=2)
    first.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("hf_hsdraft.publication.write_card", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        second.save_pretrained(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert not list(tmp_path.glob(".saving*"))
    assert HSDrafter.from_pretrained(tmp_path).config.vocab_size == VOCAB


def test_saving_does_not_change_what_others_have_mapped(target, tmp_path):
    make_drafter(target, seed=1).save_pretrained(tmp_path)
    mapped = load_file(tmp_path / "model.safetensors")
    before = {name: value.clone() for name, value in mapped.items()}
    make_drafter(target, seed=2).save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in mapped.items())
