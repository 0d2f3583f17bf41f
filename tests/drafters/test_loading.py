"""Saving, loading, and every way in which target, drafter and call do not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, as_plain, edited, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from hf_hsdraft import AutoDrafter, CausalLMDrafter, HSDraftConfig, HSDrafter, register_drafter
from hf_hsdraft.drafters.base.registry import FAMILIES
from hf_hsdraft.hub import drafter_files


def generate(target, drafter, prompt, **kwargs):
    """Eight tokens, which have to be those of plain decoding."""
    return as_plain(target, drafter, prompt, max_new_tokens=8, **kwargs)


@pytest.mark.parametrize("head", ["target", "trained"])
@pytest.mark.parametrize("injector", ["path", "low_rank", "selector"])
def test_round_trip_keeps_weights_options_and_text(target, prompt, tmp_path, head, injector):
    drafter = make_drafter(
        target, head=head, injector=injector, draft_vocab_ids=list(range(3, 60)), draft_vocab_size=57
    )
    drafter.generation_config.reuse = "resample"
    drafter.generation_config.tree_size = 9
    drafter.save_pretrained(tmp_path)
    loaded = HSDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.reuse == "resample" and loaded.generation_config.tree_size == 9
    assert loaded.config.draft_vocab_ids == list(range(3, 60))
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("lm_head") for name in stored) == (head == "trained")
    assert not any("embed" in name for name in stored)
    rounded = HSDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    for each in (loaded, rounded):
        generate(target, each, prompt)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_draft_steps", 0, "from 1 to 64"),
        ("num_draft_steps", 2.5, "an integer"),
        ("tree_size", True, "an integer"),
        ("tree_size", 2, "at least as many nodes"),
        ("beam_width", 0, "from 1 to 4,096"),
        ("injector", "magic", "low_rank, path"),
        ("head", "other", "target, trained"),
        ("target_tap_layers", [3, 1], "ascending"),
        ("target_tap_layers", [99], "between 0"),
        ("target_tap_layers", [], "ascending"),
        ("target_tap_layers", [True, 2], "ascending"),  # Python counts it among the numbers
        ("draft_vocab_size", VOCAB + 1, f"vocab_size={VOCAB}"),
        ("draft_vocab_ids", [1, 1, 2], "distinct"),
        ("draft_vocab_ids", [1, VOCAB], f"0 to {VOCAB - 1}"),
        ("num_key_value_heads", 3, "divide"),
        ("head_dim", 7, "even"),
        ("rope_theta", 0.0, "positive"),
        ("rms_norm_eps", -1.0, "positive"),
        ("initializer_range", "x", "positive"),
        ("draft_vocab_ids", [1.5, 2.5], "token ids"),
        ("hidden_size", 48, "target_hidden_size=32"),
        ("injector_top_k", 0, "from 1 to 65,536"),
        ("num_roll_layers", 2, "the trunk has only num_hidden_layers=1"),
        ("num_roll_layers", 0, "from 1 to 64"),
        ("num_step_modules", 7, "there are only num_draft_steps=6"),
        ("num_step_modules", 0, "from 1 to 64"),
        ("num_step_modules", True, "an integer"),
        *(("sliding_window", value, "above num_draft_steps=6") for value in (0, 6, True, "all")),
    ],
)
def test_configuration_errors_name_field_value_and_remedy(target, field, value, expected):
    with pytest.raises(ValueError, match=field) as error:
        HSDraftConfig.for_target(target, **{field: value})
    assert expected in str(error.value)


def test_for_target_derives_a_drafter_that_decodes(target, prompt):
    generate(target, HSDrafter(HSDraftConfig.for_target(target)), prompt)


def test_a_drafter_without_weights_is_refused(target, prompt):
    with pytest.raises(ValueError, match="the drafter is on the meta device, where weights have no values"):
        target.generate(prompt, assistant_model=make_drafter(target).to("meta"))


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "offloaded_static"}, "its static cache is offloaded"),
    ],
)
def test_calls_that_cannot_work_say_so_and_the_next_one_works(target, drafter, prompt, kwargs, expected):
    with pytest.raises(ValueError, match=expected):
        target.generate(prompt, max_new_tokens=8, assistant_model=drafter, **kwargs)
    generate(target, drafter, prompt)


def test_prompts_beyond_the_context_window(drafter):
    """Learned positions end there; rotary ones go on, as they do without a drafter."""
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, eos_token_id=None)
    target = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="context window is 32"):
        target.generate(torch.full((1, 33), 5), max_new_tokens=8, assistant_model=make_drafter(target))
    padded = torch.cat([torch.zeros(1, 20, dtype=torch.long), torch.full((1, 20), 5)], dim=1)
    generate(target, make_drafter(target), padded, attention_mask=(padded > 0).long())
    rotary = make_target(max_position_embeddings=16)
    long = torch.randint(2, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    generate(rotary, make_drafter(rotary), long)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_assistant_tokens", 9, "an integer from 1 to 4"),
        ("num_assistant_tokens", 0, "an integer from 1 to 4"),
        ("num_assistant_tokens", 2.5, "an integer from 1 to 4"),
        ("tree_size", "8", "an integer"),
        ("tree_size", 0, "an integer from 1 to 4,096"),
        ("reuse", "always", "none, ensemble, resample"),
        ("tree_builder", "best", "beam, gumbel, stochastic_beam, p_best"),
        ("verification", "exactly", "walk, rejection"),
        ("verification", "rejection", "bias the text"),
        ("reuse_weight", -1.0, "0 or more"),
        ("assistant_confidence_threshold", 1.0, "below 1"),
        # Python counts these among the numbers.
        ("tree_size", True, "an integer"),
        ("beam_width", True, "an integer"),
        ("num_assistant_tokens", True, "an integer"),
        ("ngram_length", False, "an integer"),
        *(("ngram_length", value, "an integer from 0 .* to 16") for value in (-1, 17, 2.5)),
        *(("ngram_continuation", value, "an integer from 0 .* to 24") for value in (-1, 25, 2.5)),
        ("assistant_confidence_threshold", False, "a probability"),
        ("reuse_weight", True, "a number"),
        ("reuse_weight", float("nan"), "a number"),
        ("node_cost", True, "0 to 1"),
    ],
)
def test_drafting_options_are_checked(target, drafter, prompt, name, value, expected):
    setattr(drafter.generation_config, name, value)
    with pytest.raises(ValueError, match=expected) as error:
        target.generate(prompt, assistant_model=drafter)
    assert name in str(error.value)


@pytest.fixture
def folder(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_named_like_an_owner_hides_no_repository(folder, tmp_path, monkeypatch):
    def download(name, **_):
        if name == "Owner/drafter":
            return folder
        raise ConnectionError("no network")

    monkeypatch.setattr(drafter_files, "snapshot_download", download)
    (tmp_path / "Owner" / "other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(AutoDrafter.from_pretrained("Owner/drafter"), HSDrafter)
    with pytest.raises(OSError, match=f"there is no drafter folder {tmp_path}/Owner/nowhere, and Owner/nowhere"):
        AutoDrafter.from_pretrained("Owner/nowhere")


def test_fields_that_libraries_set_break_no_call(target, drafter, prompt, tmp_path):
    """Only a name that is nearly an option's is an error; all of a model's generation configuration may be copied."""
    options = vars(drafter.generation_config)
    options |= {
        "force_unique_generate_call": True,
        "lang_to_id": {"en": 5},
        "confidence_threshold": 0.1,
        "is_assistant": True,
    }
    before = dict(options)
    generate(target, drafter, prompt)
    assert vars(drafter.generation_config) == before
    drafter.save_pretrained(tmp_path)
    generate(target, HSDrafter.from_pretrained(tmp_path), prompt)
    for name, meant in (("tree_sise", "tree_size"), ("ngram_len", "ngram_length"), ("reuse_weights", "reuse_weight")):
        setattr(drafter.generation_config, name, 3)
        with pytest.raises(ValueError, match=f"{name} .*: {meant} is one"):
            target.generate(prompt, assistant_model=drafter)
        delattr(drafter.generation_config, name)


def test_auto_classes_load_any_family(folder, tmp_path):
    drafter = AutoDrafter.from_pretrained(folder, tree_size=9)
    assert type(drafter) is HSDrafter is type(AutoModel.from_pretrained(folder))
    make_target().save_pretrained(tmp_path / "model")
    model = AutoDrafter.from_pretrained(tmp_path / "model", tree_size=9)
    assert type(model) is CausalLMDrafter
    assert drafter.generation_config.tree_size == model.generation_config.tree_size == 9
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoDrafter()


def test_what_is_no_drafter_is_told(tmp_path):
    make_target().base_model.save_pretrained(tmp_path)  # without its output layer
    with pytest.raises(ValueError, match=r"is no drafter of a known format .*model_type=llama") as error:
        AutoDrafter.from_pretrained(tmp_path)
    assert "embed_tokens.weight" in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["hsdraft"]}))
    with pytest.raises(ValueError, match="no drafter of a known format"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_name_belongs_to_one_family():
    class Config(PreTrainedConfig):
        model_type = "hsdraft"

    before = dict(FAMILIES)
    register_drafter("hsdraft", HSDraftConfig, HSDrafter)  # again, which changes nothing
    with pytest.raises(ValueError, match="model_type='hsdraft' is taken by HSDrafter"):
        register_drafter("hsdraft", Config, HSDrafter)
    with pytest.raises(ValueError, match="expected 'other'"):
        register_drafter("other", Config, HSDrafter)
    assert before == FAMILIES


def renamed(weights):
    tensors = load_file(weights)
    moved = tensors.pop("fuse.weight")
    save_file({**tensors, "other.weight": moved}, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "kind", "messages"),
    [
        (Path.unlink, OSError, [r"model\.safetensors"]),
        (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), ValueError, ["damaged"]),
        (renamed, ValueError, [r"fuse\.weight", r"other\.weight"]),
    ],
    ids=["missing", "truncated", "incomplete and superfluous"],
)
def test_weights_that_cannot_be_used_are_told(folder, damage, kind, messages):
    damage(folder / "model.safetensors")
    for message in messages:
        with pytest.raises(kind, match=message):
            HSDrafter.from_pretrained(folder)


def test_a_configuration_is_checked_on_loading(folder):
    with pytest.raises(ValueError, match="num_draft_steps=0"):
        HSDrafter.from_pretrained(folder, num_draft_steps=0)
    edited(folder, num_draft_steps=0)
    with pytest.raises(ValueError, match="num_draft_steps=0"):
        HSDrafter.from_pretrained(folder)
    edited(folder, num_draft_steps=4, intermediate_size=80)  # unlike the weights
    with pytest.raises(ValueError, match="gate_proj"):
        HSDrafter.from_pretrained(folder)


def test_a_configuration_is_read_from_another_folder(target, folder, prompt, tmp_path):
    """As in transformers, `config` may be a name; the weights are still those of the folder that is loaded."""
    other = tmp_path / "other"
    make_drafter(target, seed=5, tree_size=7, beam_width=2, target_name="org/other").save_pretrained(other)
    weights = HSDrafter.from_pretrained(folder).state_dict()
    for given in (other, str(other), HSDraftConfig.from_pretrained(other, weights_digest=None)):
        loaded = HSDrafter.from_pretrained(folder, config=given, beam_width=3)
        assert (loaded.config.tree_size, loaded.config.beam_width, loaded.config.target_name) == (7, 3, "org/other")
        assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
        generate(target, loaded, prompt)


def test_a_configuration_from_elsewhere_is_checked(target, folder, tmp_path):
    target.save_pretrained(tmp_path / "target")
    for given, reason in ((tmp_path / "target", "not a drafter"), (target.config, "expected an HSDraftConfig"),
                          ({"tree_size": 7}, "expected an HSDraftConfig")):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            HSDrafter.from_pretrained(folder, config=given)
    for place, given in ((tmp_path / "nowhere", {}), (folder, {"config": tmp_path / "nowhere"})):
        with pytest.raises(OSError, match="no such drafter folder"):
            HSDrafter.from_pretrained(place, **given)
    wider = tmp_path / "wider"
    make_drafter(target, intermediate_size=80).save_pretrained(wider)
    with pytest.raises(ValueError, match="gate_proj"):
        HSDrafter.from_pretrained(folder, config=wider)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256"):  # by the digests beside the weights
        HSDrafter.from_pretrained(folder, config=wider, intermediate_size=64)


@pytest.mark.parametrize("layout", ["now", "at the top", "at the top, before there was a list"])
def test_code_of_an_earlier_version_goes_and_others_files_stay(target, folder, prompt, layout):
    """A folder that is saved to again has the code of this version, and whatever somebody else put there."""
    place = folder / "custom_generate"
    current = {path.name for path in place.glob("*.py")}
    assert {*edited(folder)["code_files"], "generate.py"} == current and not list(folder.glob("*.py"))
    listed = [*edited(folder)["code_files"], "former_module.py"]
    if layout != "now":
        for name in current - {"generate.py"}:
            (place / name).rename(folder / name)
        auto_map = {auto: entry.rpartition("/")[2] for auto, entry in edited(folder)["auto_map"].items()}
        edited(folder, auto_map=auto_map)
        place = folder
    (place / "former_module.py").write_text("raise RuntimeError")
    for name in ("app.py", "custom_generate/own.py"):
        (folder / name).write_text("print()")
    with (place / "hub_entry.py").open("a") as entry:
        entry.write("\nfrom .former_module import nothing\n")
    edited(folder, code_files=None if layout.endswith("list") else listed)
    loaded = HSDrafter.from_pretrained(folder)
    (place / "network.py").unlink()  # whatever is missing comes again
    for _ in range(2):
        loaded.save_pretrained(folder)
        assert {path.name for path in folder.glob("*.py")} == {"app.py"}
        assert {path.name for path in (folder / "custom_generate").glob("*.py")} == current | {"own.py"}
    generate(target, HSDrafter.from_pretrained(folder), prompt)


def test_a_list_of_code_names_no_files_elsewhere(target, folder):
    outside = folder.parent / "outside.py"
    outside.write_text("print()")
    (folder / "notes.txt").write_text("mine")
    edited(folder, code_files=["../outside.py", str(outside), "notes.txt", 5, "custom_generate"])
    with pytest.raises(ValueError, match="code_files"):
        HSDrafter.from_pretrained(folder)
    make_drafter(target).save_pretrained(folder)
    assert outside.exists() and (folder / "notes.txt").exists() and HSDrafter.from_pretrained(folder)
    outside.unlink()


@pytest.mark.parametrize("load", ["load_tokenizer", "load_config", "load_target", "target_folder"])
def test_a_target_that_is_nowhere_is_named_at_once(load, tmp_path, monkeypatch):
    from hf_hsdraft.runtime import target_loading

    arguments = () if load in ("load_tokenizer", "load_config") else (torch.float32,)
    load = getattr(target_loading, load)
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target_loading.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(target_loading.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))

    def unreachable(name, **_):
        asked.append(name)
        raise OSError("the Hub cannot be reached")

    monkeypatch.setattr(target_loading, "snapshot_download", unreachable)
    for name in ("./nowhere", str(tmp_path / "nowhere"), "runs/first/target"):
        with pytest.raises(OSError, match=f"there is no folder {tmp_path / name}$"):
            load(name, *arguments)
    assert not asked
    for name in ("runs/target", "nowhere"):
        with pytest.raises(OSError, match=f"there is no folder {tmp_path / name}, and {name} cannot be fetched"):
            load(name, *arguments)
    assert asked == ["runs/target", "nowhere"]
    with pytest.raises(ValueError, match="name is empty"):
        load("  ", *arguments)
