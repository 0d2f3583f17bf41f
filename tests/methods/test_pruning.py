"""Some of a target's layers as an ordinary model: `hsdraft make prune`."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import make_target
from lm_helpers import layered_target, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CausalLMDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.distillation.layer_subset import evenly, layers_of
from hf_hsdraft.methods.souping.pruning import prune
from hf_hsdraft.training.families.trainable import TRAINABLE


@pytest.fixture(scope="module")
def target():
    return layered_target()


def by_bypass(model, kept, ids) -> torch.Tensor:
    """Logits of a model some of whose layers pass their inputs on."""
    handles = []
    for number, layer in enumerate(layers_of(model)[1]):
        if number not in kept:

            def passed_on(module, args, kwargs, output):
                hidden = args[0] if args else kwargs["hidden_states"]
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            handles.append(layer.register_forward_hook(passed_on, with_kwargs=True))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "mixtral", "gpt_oss", "qwen3"])
def test_a_pruned_model_is_the_target_without_its_other_layers(kind, tmp_path):
    model = tiny(kind)
    ids = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    for kept in ([0, 3], [1, 2, 3]):
        before = copy.deepcopy(model.config).to_dict()
        prune(model, None, kept, tmp_path / str(len(kept)))
        small = AutoModelForCausalLM.from_pretrained(tmp_path / str(len(kept)), dtype=torch.float32).eval()
        assert len(layers_of(small)[1]) == len(kept) == small.config.num_hidden_layers
        with torch.no_grad():
            logits = small(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, by_bypass(model, kept, ids), atol=1e-4, rtol=1e-4)
        cached = small.generate(ids, max_new_tokens=4, do_sample=False)  # its layers have slots of their own
        assert cached.tolist() == small.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False).tolist()
        assert model.config.to_dict() == before and len(layers_of(model)[1]) == 4


def test_layers_are_spread_evenly():
    assert evenly(30, 6) == [0, 6, 12, 17, 23, 29] and evenly(5, 5) == [0, 1, 2, 3, 4] and evenly(7, 1) == [0]
    with pytest.raises(ValueError, match="num_layers=8 is invalid: expected 1 to 7"):
        evenly(7, 8)
    with pytest.raises(ValueError, match="num_hidden_layers=40 is invalid"):
        TRAINABLE["lm"].config_for(make_target(), {"num_hidden_layers": 40})


@pytest.mark.parametrize("kept", [[], [0, 0], [2, 1], [0, 6], [-1, 2]])
def test_layers_that_are_not_there_are_refused_before_anything_is_written(target, tmp_path, kept):
    with pytest.raises(ValueError, match="expected ascending numbers from 0 to 5"):
        prune(target, None, kept, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_saved_with_some_layers_is_refused(tmp_path):
    model = tiny("mixtral")
    model.config.num_local_experts = 2  # so the files are not what the model is
    with pytest.raises(ValueError, match="MixtralForCausalLM cannot be pruned"):
        prune(model, None, [0, 3], tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_the_command_prunes(target, tokenizer, tmp_path):
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    out = tmp_path / "small"
    arguments = ["make", "prune", str(tmp_path / "target"), "--num-layers", "3", "--out", str(out)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0 and "3 of 6 layers (0, 2, 5)" in found.output, found.output
    recipe = json.loads((out / "pruning_recipe.json").read_text())
    assert recipe["kept_layers"] == [0, 2, 5] and recipe["target"] == "target" and recipe["target_layers"] == 6
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()
    drafter = AutoDrafter.from_pretrained(out)
    assert type(drafter) is CausalLMDrafter
    assert isinstance(CliRunner().invoke(app, arguments).exception, FileExistsError)
