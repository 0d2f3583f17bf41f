"""EAGLE-3 drafters of other projects: loaded unchanged, and in every draft step what their own code computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from eagle_references import (
    DRAFTED,
    LAYERS,
    TOKENS,
    WIDTH,
    compare,
    make_eagle_target,
    of_economize,
    of_peagle,
    of_speculators,
    saved,
    speculators_model,
)
from safetensors.torch import load_file, save_file

from hf_hsdraft import AutoDrafter, EagleDrafter
from hf_hsdraft.common.refusals import DraftingRefused
from hf_hsdraft.repository import checkpoint as checkpoints

pytest.importorskip("speculators")

VARIANTS = {
    "plain": {},
    "qwen3": {"layer": "qwen3"},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "whole vocabulary": {"draft_vocab_size": TOKENS},
    "several layers": {"layer_fields": {"num_hidden_layers": 3}, "norm_before_residual": True},
    "biases": {"layer_fields": {"attention_bias": True}},
    "five taps": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3, 5, 7]},
    "theta": {"layer_fields": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}},
    "llama3": {
        "layer_fields": {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        }
    },
    "yarn": {
        "layer_fields": {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
            }
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return make_eagle_target()


@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_files(target, tmp_path, monkeypatch, variant):
    model = speculators_model(**VARIANTS[variant])
    drafter = AutoDrafter.from_pretrained(saved(model, tmp_path))
    parity = compare("speculators eagle3", drafter, target, of_speculators(model), "Eagle3DraftModel", monkeypatch)
    assert parity.difference < 1e-4 and parity.rounds >= 5 and parity.accepted > 0, parity


@pytest.mark.parametrize("layers", [1, 2])
def test_parallel_files_of_speculators(target, tmp_path, monkeypatch, layers):
    fields = {"mask_token_id": 5, "layer_fields": {"num_hidden_layers": layers}}
    model = speculators_model("peagle", **fields)
    drafter = AutoDrafter.from_pretrained(saved(model, tmp_path))
    reference = of_peagle(model, monkeypatch)
    parity = compare("speculators peagle", drafter, target, reference, "PEagleDraftModel", monkeypatch)
    assert parity.difference < 1e-4 and parity.rounds >= 5 and parity.accepted > 0, parity
    assert drafter.num_draft_steps == 4


def test_sliding_layers_of_a_parallel_drafter(target, tmp_path, monkeypatch):
    window = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
    model = speculators_model("peagle", "qwen3", mask_token_id=5, layer_fields=window)
    drafter = AutoDrafter.from_pretrained(saved(model, tmp_path))
    assert drafter.config.windows == (6,)
    reference = of_peagle(model, monkeypatch)
    parity = compare("speculators peagle", drafter, target, reference, "PEagleDraftModel", monkeypatch)
    assert parity.difference < 1e-4, parity


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def authors_fields(**more):
    """config.json as the authors of EAGLE-3 write it."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": 40, "rms_norm_eps": 1e-6, "vocab_size": TOKENS, "draft_vocab_size": DRAFTED,
        "max_position_embeddings": 512, "hidden_act": "silu", "use_cache": True, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**fields, **more}


def without_embedding(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


AUTHORS_TAPS = [2, LAYERS // 2, LAYERS - 3]
OTHERS = {
    "authors": (AUTHORS_TAPS, {}, {}, midlayer),
    "authors, own theta": (AUTHORS_TAPS, {"rope_theta": 50.0}, {}, midlayer),
    "economize": ([1, 4, 6], {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, {}, midlayer),
    "SpecForge": (
        [2, 3, 7],
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "norm_output": True},
        {},
        midlayer,
    ),
    "SpecForge, fc_norm": (
        [2, 3, 7],
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "fc_norm": True},
        {"fc_norm": True},
        midlayer,
    ),
    "SpecForge, defaults": (
        AUTHORS_TAPS,
        {"eagle_config": {"use_aux_hidden_state": True}, "eagle_aux_hidden_state_layer_ids": None},
        {},
        midlayer,
    ),
    "DeepSpec": (
        [0, 2, 4, 6, 8],
        {"target_layer_ids": [-1, 1, 3, 5, 7], "draft_vocab_size": None, "architectures": ["Qwen3Eagle3Model"]},
        {"draft_vocab_size": TOKENS, "layer": "qwen3"},
        str,
    ),
}


@pytest.mark.parametrize("borrowed", [False, True], ids=["own embedding", "target's embedding"])
@pytest.mark.parametrize("form", OTHERS)
def test_files_of_other_projects(target, tmp_path, monkeypatch, form, borrowed):
    taps, fields, variant, renamed = OTHERS[form]
    theta = {"rope_type": "default", "rope_theta": fields.get("rope_theta", 10000.0)}
    model = speculators_model(eagle_aux_hidden_state_layer_ids=taps, layer_fields={"rope_parameters": theta}, **variant)
    if borrowed:
        model.embed_tokens.load_state_dict({"weight": target.get_input_embeddings().weight.detach()})
    folder = saved(model, tmp_path, renamed, **authors_fields(**fields))
    if borrowed:
        without_embedding(folder)
    drafter = AutoDrafter.from_pretrained(folder)
    assert list(drafter.taps_of(target)) == taps
    parity = compare(form, drafter, target, of_speculators(model), "Eagle3DraftModel, renamed", monkeypatch)
    assert parity.difference < 1e-4 and parity.accepted > 0, parity


def test_files_of_the_authors_against_a_layer_of_the_same_names(target, tmp_path, monkeypatch):
    """An old file of pickled tensors, and a reference that has `midlayer` by the authors' names."""
    model = speculators_model(eagle_aux_hidden_state_layer_ids=AUTHORS_TAPS)
    model.embed_tokens.load_state_dict({"weight": target.get_input_embeddings().weight.detach()})
    folder = saved(model, tmp_path, midlayer, **authors_fields())
    state = {name: each for name, each in load_file(folder / "model.safetensors").items() if "embed" not in name}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    drafter = AutoDrafter.from_pretrained(folder)
    reference = of_economize(state, target.get_input_embeddings().weight.detach())
    parity = compare("EAGLE-3", drafter, target, reference, "economize's Eagle3Layer", monkeypatch)
    assert parity.difference < 1e-4 and parity.rounds >= 5 and parity.accepted > 0, parity


def change(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, change_of) -> None:
    state = load_file(folder / "model.safetensors")
    change_of(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def retyped(name: str, tensor):
    return lambda state: state.__setitem__(name, tensor)


BAD_TENSORS = {
    "missing": (lambda state: state.pop("fc.weight"), r"missing: fc\.weight"),
    "renamed": (
        lambda state: state.__setitem__("layers.0.mlp.up.weight", state.pop("layers.0.mlp.up_proj.weight")),
        r"missing: layers\.0\.mlp\.up_proj\.weight; unknown: layers\.0\.mlp\.up\.weight",
    ),
    "reshaped": (retyped("fc.weight", torch.zeros(WIDTH, 2 * WIDTH)), r"fc\.weight \[32, 64\] instead of \[32, 96\]"),
    "no map": (lambda state: state.pop("d2t"), r"missing: d2t"),
    "beyond": (retyped("d2t", torch.full((DRAFTED,), TOKENS - DRAFTED + 1)), rf"d2t .* leads to tokens .* to {TOKENS}"),
    "twice": (retyped("d2t", -torch.arange(DRAFTED)), r"d2t .*25 of them twice"),
    "negative": (retyped("d2t", torch.full((DRAFTED,), -1)), r"d2t .* leads to tokens -1"),
    "no integers": (retyped("d2t", torch.zeros(DRAFTED)), r"d2t .*dtype torch\.float32"),
}


@pytest.mark.parametrize("wrong", BAD_TENSORS)
def test_wrong_tensors_are_told_before_any_is_read(tmp_path, monkeypatch, wrong):
    change_of, message = BAD_TENSORS[wrong]
    folder = saved(speculators_model(), tmp_path)
    change_tensors(folder, change_of)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_a_truncated_file_is_told(tmp_path):
    folder = saved(speculators_model(), tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="damaged"):
        AutoDrafter.from_pretrained(folder)


LAYER = {"model_type": "llama", "hidden_size": WIDTH, "vocab_size": TOKENS, "num_attention_heads": 4}
BAD_FIELDS = {
    "kind": ({"speculators_model_type": "eagle"}, r"speculators_model_type=eagle: expected one of eagle3, peagle"),
    "mtp": ({"speculators_model_type": "mtp"}, r"speculators_model_type=mtp.*MTP heads are not drafted with here"),
    "lossy": (
        {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "verifier_accept_k": 3}]}},
        r"verifier_accept_k=3",
    ),
    "unsorted": ({"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}, r"layer_ids=\[6, 1, 4\].*ascending"),
    "unknown switch": ({"use_gates": True}, r"use_gates=true: this is not known here"),
    "flag": ({"norm_output": "yes"}, r"norm_output='yes' in config.json"),
    "two norms": ({"norm_before_fc": True, "fc_norm": True}, r"norm_before_fc=True is invalid with fc_norm=True"),
    "layer": ({"transformer_layer_config": None}, r"has no transformer_layer_config"),
    "type": ({"transformer_layer_config": {"model_type": "gpt2"}}, r"model_type='gpt2' in config.json, transformer_"),
    "partial": (
        {"transformer_layer_config": {**LAYER, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}}},
        r"partial_rotary_factor=0.5",
    ),
    "huge": ({"transformer_layer_config": {**LAYER, "hidden_size": 2**40}}, r"hidden_size=1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD_FIELDS)
def test_wrong_fields_are_told_by_name(tmp_path, wrong):
    fields, message = BAD_FIELDS[wrong]
    folder = saved(speculators_model(), tmp_path)
    change(folder, **fields)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_a_parallel_drafter_needs_its_mask(tmp_path):
    folder = saved(speculators_model("peagle", mask_token_id=5), tmp_path)
    change(folder, mask_token_id=None)
    with pytest.raises(ValueError, match="has no mask_token_id"):
        AutoDrafter.from_pretrained(folder)
    change(folder, mask_token_id=TOKENS)
    with pytest.raises(ValueError, match=f"mask_token_id={TOKENS} is invalid"):
        AutoDrafter.from_pretrained(folder)


def test_states_that_are_not_normed_before_the_head_are_refused(tmp_path):
    folder = saved(speculators_model(), tmp_path, midlayer, **authors_fields(norm_output=False))
    with pytest.raises(ValueError, match="norm_output=False"):
        AutoDrafter.from_pretrained(folder)


def test_ids_that_contradict_each_other_are_refused(tmp_path):
    fields = authors_fields(target_layer_ids=[1, 2, 3], eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    folder = saved(speculators_model(), tmp_path, midlayer, **fields)
    with pytest.raises(ValueError, match=re.escape("different hidden states ((1, 2, 3) and (2, 3, 4))")):
        AutoDrafter.from_pretrained(folder)


def test_older_drafters_and_heads_inside_targets_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(authors_fields()))
    older = {"fc.weight": torch.zeros(4, 8), "layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    save_file(older, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="EAGLE-1 or EAGLE-2"):
        AutoDrafter.from_pretrained(tmp_path)
    save_file({"model.layers.61.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"own prediction heads .*eh_proj"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": TOKENS + 1}, rf"vocab_size={TOKENS + 1}, the drafter expects {TOKENS}"),
        ({"hidden_size": 2 * WIDTH}, rf"hidden_size={2 * WIDTH}, the drafter expects {WIDTH}"),
        ({"num_hidden_layers": 5}, r"num_hidden_layers=5, the drafter reads its hidden states \[1, 4, 6\]"),
    ],
)
def test_another_target_is_refused_before_any_work(tmp_path, fields, message):
    drafter = AutoDrafter.from_pretrained(saved(speculators_model(), tmp_path))
    with pytest.raises(DraftingRefused, match=message):
        make_eagle_target(**fields).generate(torch.tensor([[1, 2]]), max_new_tokens=2, assistant_model=drafter)


def test_a_target_too_small_for_the_authors_layers_is_refused(tmp_path):
    drafter = AutoDrafter.from_pretrained(saved(speculators_model(), tmp_path, midlayer, **authors_fields()))
    with pytest.raises(ValueError, match="depends on its target"):
        drafter.taps  # noqa: B018
    with pytest.raises(DraftingRefused, match=r"num_hidden_layers=4, the drafter reads its hidden states \[2, 2, 1\]"):
        drafter.check(make_eagle_target(num_hidden_layers=4))


def test_the_dtype_and_options_of_a_call_to_load(tmp_path):
    folder = saved(speculators_model(), tmp_path)
    drafter = AutoDrafter.from_pretrained(folder, dtype="bfloat16", tree_size=9)
    assert drafter.dtype == torch.bfloat16 and drafter.generation_config.tree_size == 9
    assert EagleDrafter.from_pretrained(folder).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype='int8'"):
        AutoDrafter.from_pretrained(folder, dtype="int8")
    with pytest.raises(TypeError, match="tree_sise"):
        AutoDrafter.from_pretrained(folder, tree_sise=9)


def test_nothing_is_read_of_a_file_whose_shapes_are_wrong(tmp_path, monkeypatch):
    folder = saved(speculators_model(), tmp_path)
    change(folder, draft_vocab_size=DRAFTED - 1)
    monkeypatch.setattr(checkpoints.Checkpoint, "tensors", None)
    with pytest.raises(ValueError, match="of other shapes: d2t"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("variant", ["plain", "qwen3", "norm_output", "fc_norm", "several layers", "whole vocabulary"])
def test_what_is_saved_is_loaded_by_speculators_and_by_us(target, tmp_path, monkeypatch, variant):
    import speculators

    folder = saved(speculators_model(**VARIANTS[variant]), tmp_path / "theirs")
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.generation_config.tree_size = 17
    drafter.save_pretrained(tmp_path / "ours")
    document = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert document["norm_before_residual"] is drafter.config.norm_before_residual
    again = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert again.generation_config.tree_size == 17 and again.config == drafter.config
    # It would fetch weights of the target, which has no name here.
    monkeypatch.setattr(speculators.Eagle3DraftModel, "load_verifier_weights", lambda self: None)
    config = speculators.Eagle3SpeculatorConfig.from_pretrained(tmp_path / "ours")
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.Eagle3DraftModel.from_pretrained(tmp_path / "ours", config=config).eval()
    parity = compare("saved", again, target, of_speculators(model), "Eagle3DraftModel", monkeypatch)
    assert parity.difference < 1e-4 and parity.accepted > 0, parity
