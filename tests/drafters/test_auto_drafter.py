"""Drafters of any family are loaded by what their config.json says."""

import json

import pytest
from conftest import make_drafter, make_target
from transformers import AutoModel, PreTrainedConfig

from hf_hsdraft import AutoDrafter, CausalLMDrafter, HSDraftConfig, HSDrafter, register_drafter
from hf_hsdraft.drafters.base.registry import FAMILIES


def test_the_family_of_a_folder_is_loaded(tmp_path):
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, tree_size=9)
    assert type(drafter) is HSDrafter is type(AutoModel.from_pretrained(tmp_path))
    assert drafter.generation_config.tree_size == 9


def test_a_language_model_is_a_drafter_too(tmp_path):
    make_target().save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, tree_size=9)
    assert type(drafter) is CausalLMDrafter and drafter.generation_config.tree_size == 9


def test_what_is_no_drafter_is_told(tmp_path):
    make_target().base_model.save_pretrained(tmp_path)  # without its output layer
    with pytest.raises(ValueError, match=r"is no drafter of a known format .*model_type=llama") as error:
        AutoDrafter.from_pretrained(tmp_path)
    assert "embed_tokens.weight" in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["hsdraft"]}))
    with pytest.raises(ValueError, match="no drafter of a known format"):
        AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="no such drafter folder"):
        AutoDrafter.from_pretrained("/no/such/folder")
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoDrafter()


def test_a_name_belongs_to_one_family(monkeypatch):
    class Config(PreTrainedConfig):
        model_type = "hsdraft"

    before = dict(FAMILIES)
    register_drafter("hsdraft", HSDraftConfig, HSDrafter)  # again, which changes nothing
    with pytest.raises(ValueError, match="model_type='hsdraft' is taken by HSDrafter"):
        register_drafter("hsdraft", Config, HSDrafter)
    with pytest.raises(ValueError, match="expected 'other'"):
        register_drafter("other", Config, HSDrafter)
    assert before == FAMILIES
