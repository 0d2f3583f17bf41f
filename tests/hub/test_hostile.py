"""Files that somebody wrote to do harm: refused with a reason, before anything is allocated, run, read or written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

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
    "layers to roll on": {"num_roll_layers": HUGE},
    "sets of parameters": {"num_step_modules": HUGE},
    "candidates": {"injector_top_k": HUGE},
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
    "a list for a number": {"num_roll_layers": [1]},
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
    "code elsewhere": {"code_files": ["../../secret.py"]},
    "code without end": {"code_files": ["a.py"] * 10**5},
    "digests that are none": {"weights_digest": {"model.safetensors": "rm -rf /"}},
    # what goes to terminals and cards
    "escape sequences": {"target_name": "\x1b]0;owned\x07"},
    "several lines": {"target_name": "target\nlicense: mit"},
    "a name without end": {"target_name": "a" * 10**6},
    "a tokenizer without end": {"target_tokenizer_hash": "a" * 10**6},
    "special tokens": {"eos_token_id": {"a": 1}},
    "special tokens without limit": {"eos_token_id": 10**400},
    "other configuration files": {"configuration_files": ["config.4.0.0.json"]},
    "a field of Python's": {"self": 1},
    "a type without end": {"model_type": "a" * 10**6},
    "a text of other tokens": {"target_reference": {**REFERENCE, "input_ids": [1, HUGE, 2]}},
    "a text without end": {"target_reference": {**REFERENCE, "input_ids": [1] * 10**5}},
    "a text from before its beginning": {"target_reference": {**REFERENCE, "start": -5}},
    "a text from a list": {"target_reference": [1, 2]},
    # versions
    "a format of the future": {"format_version": 10**5},
    "a format that is none": {"format_version": "two"},
}


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_drafter(target).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "drafter"))


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_hostile_configurations_are_refused_with_a_reason_and_nothing_is_allocated(folder, tmp_path):
    """All in a process that may take 600 MB more than it has: refused for what they are, not for memory."""
    configs = {kind: {**json.loads((folder / "config.json").read_text()), **HOSTILE[kind]} for kind in HOSTILE}
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    code = f"""
import json, pathlib, resource
from hf_hsdraft import HSDrafter
folder, told = pathlib.Path({str(folder)!r}), {{}}
HSDrafter.from_pretrained(folder)
configs = json.loads(pathlib.Path({str(tmp_path / "configs.json")!r}).read_text())
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20,) * 2)
for kind, config in configs.items():
    (folder / "config.json").write_text(json.dumps(config))
    try:
        told[kind] = list(HSDrafter.from_pretrained(folder).config.id2label.values())
    except ValueError as error:
        told[kind] = str(error)
print("TOLD", json.dumps(told))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.rpartition("TOLD ")[2])
    labels = told.pop("labels")  # means nothing to a drafter
    assert isinstance(labels, list) and "LABEL_2" not in labels
    for kind, message in told.items():
        assert isinstance(message, str) and len(message) < 4000 and message.isprintable(), (kind, message)
        reasons = (*HOSTILE[kind], "do not match", "a model of type")
        assert any(reason in message for reason in reasons), (kind, message)


def test_a_newer_format_asks_for_an_upgrade_and_older_ones_load(folder):
    change(folder, format_version=99, injector="of the future")
    with pytest.raises(ValueError, match="upgrade hf_hsdraft"):
        HSDrafter.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    new = {"format_version", "target_revision", "target_tokenizer_hash", "target_reference", "weights_digest"}
    old = {name: value for name, value in config.items() if name not in new | {"code_files", "auto_map"}}
    (folder / "config.json").write_text(json.dumps({**old, "injector": "path"}))
    shutil.rmtree(folder / "custom_generate")
    (folder / "README.md").unlink()
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
    """Also where the folder held other weights before."""
    (tmp_path / "model.safetensors").write_bytes(b"left by somebody")
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


def test_an_adapter_beside_the_weights_is_not_looked_at(folder, tmp_path):
    pytest.importorskip("peft")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "elsewhere"), "r": 2**22}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    drafter = HSDrafter.from_pretrained(folder)
    assert not getattr(drafter, "_hf_peft_config_loaded", False)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match="load the drafter it adapts"):
        HSDrafter.from_pretrained(alone)


def test_what_files_say_reaches_no_terminal_as_it_is(folder, tmp_path, monkeypatch):
    from hf_hsdraft.cli._describe import describe

    escape = "\x1b]0;owned\x07"
    hostile = {"benchmarks": [{"settings": {"dtype": escape}}], "training": {"history": [{"eval_tau": escape}]}}
    (folder / "figures.json").write_text(json.dumps(hostile))
    (folder / "training_recipe.json").write_text(json.dumps({"training": {escape: escape}, "limits": 5}))
    lines = [text for section in describe(str(folder)).values() for line in section.items() for text in line]
    assert all(line.isprintable() for line in lines)
    (folder / "generation_config.json").write_text(json.dumps({f"ngram_length{escape[:3]}": 1}))
    with pytest.raises(ValueError, match="ngram_length is one") as error:
        HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "elsewhere")
    assert str(error.value).isprintable()
    (folder / "generation_config.json").write_text(json.dumps({escape: 1}))
    warned = []
    monkeypatch.setattr("hf_hsdraft.drafters.base.draft_options.logger.warning_once", warned.append)
    HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "elsewhere")
    assert "owned" in warned[0] and warned[0].isprintable()
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{escape}{index}": torch.zeros(1) for index in range(10_000)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not match") as error:
        HSDrafter.from_pretrained(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "figures",
    [5, [], {"benchmarks": 5}, {"benchmarks": [{"settings": {}}, 7]}, {"training": 5}, {"training": {"history": [5]}}],
)
def test_documents_of_other_forms_count_as_nothing_measured(folder, tmp_path, figures):
    (folder / "figures.json").write_text(json.dumps(figures))
    (folder / "training_recipe.json").write_text(json.dumps({"commands": 5, "training": [1]}))
    (folder / "README.md").write_bytes(b"my own words \xe9\xff")
    HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").read_bytes() == b"my own words \xe9\xff"
    (tmp_path / "copy" / "README.md").unlink()
    HSDrafter.from_pretrained(tmp_path / "copy").save_pretrained(tmp_path / "copy")
    assert "Speed: not measured" in (tmp_path / "copy" / "README.md").read_text()


def test_the_code_map_of_a_file_is_not_passed_on(folder, tmp_path):
    change(folder, auto_map={"AutoTokenizer": ["evil/repo--x.Y", None], "AutoModelForCausalLM": "evil/repo--x.Y"})
    HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    assert set(json.loads((tmp_path / "copy" / "config.json").read_text())["auto_map"]) == {"AutoConfig", "AutoModel"}
    change(folder, auto_map=5)
    HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "copy")


def test_no_code_beside_the_weights_is_run_by_the_package(folder, tmp_path):
    for path in folder.rglob("*.py"):
        path.write_text(f"import os; os.mkdir({str(tmp_path / 'harmed')!r})")
    change(folder, auto_map={"AutoConfig": "evil/repo--x.Y", "AutoModel": "evil/repo--x.Y"})
    HSDrafter.from_pretrained(folder)
    assert not (tmp_path / "harmed").exists() and "x" not in sys.modules


def test_saving_fails_whole(target, tmp_path, monkeypatch):
    """What goes wrong in the middle of saving leaves the former drafter as it was."""
    first, second = make_drafter(target, seed=1), make_drafter(target, seed=2)
    first.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("hf_hsdraft.hub.publication.write_card", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
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


def test_saving_deletes_nothing_that_is_not_a_drafters(target, tmp_path):
    names = [
        "figures.json",
        "acceptance.png",
        "training_recipe.json",
        "model_best.safetensors",
        "model.safetensors.bak",
    ]
    for name in names:
        (tmp_path / name).write_text("mine")
    make_drafter(target).save_pretrained(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "custom_generate").write_text("in the way")
    with pytest.raises(OSError, match="in the way"):
        make_drafter(target).save_pretrained(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "config.json").exists()


def test_only_the_process_that_saves_completes_the_folder(target, tmp_path, monkeypatch):
    """Where several processes save, transformers writes in one of them."""
    monkeypatch.setattr(HSDrafter, "should_save_on_this_rank", lambda *_: False)
    make_drafter(target).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
