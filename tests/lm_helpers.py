"""What tests of language models that draft need: a target of many layers, drafters made of it, and their drafts."""

from __future__ import annotations

import torch
from conftest import VOCAB, make_target
from oracles.tiny import tiny_config, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_hsdraft import SteeredLMDrafter
from hf_hsdraft.methods.distillation.layer_subset import with_layers
from hf_hsdraft.methods.steering.steered_lm import Steering, SteeringSizes

GREEDY = {"do_sample": False, "max_new_tokens": 12}
FIXED = {"tree_sizing": "fixed", "ngram_length": 0}


def layered_target():
    """A target each of whose layers changes little, as those of trained models do."""
    made = make_target(seed=3, num_hidden_layers=6)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return made


def tiny(model_type: str, seed: int = 0, **fields):
    config = tiny_config(CONFIG_MAPPING[model_type], layer_lists="cut")
    for name, value in fields.items():
        setattr(config, name, value)
    return tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, seed)


def with_fixed(drafter, **options):
    for name, value in {**FIXED, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def padded(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row], ids[row, : 2 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def steered(target, seed: int = 0, size: float = 0.05, kept=(0, 2, 5)) -> SteeredLMDrafter:
    """A drafter of some of the target's layers whose steering changes what it says."""
    model = with_layers(target, kept)
    torch.manual_seed(seed)
    steering = Steering(SteeringSizes.of(model, target))
    torch.nn.init.normal_(steering.up.weight, std=size)
    torch.nn.init.normal_(steering.fuse.weight, std=0.1)
    return with_fixed(SteeredLMDrafter(model, steering=steering.eval()))


def drafted_call(target, drafter, inputs, **call):
    """The trees that a drafter proposes round by round, with their scores, and what the call returns."""
    noted, session = [], drafter.session

    def noting(call):
        made = session(call)
        draft = made.draft

        def noted_draft(asks):
            trees = draft(asks)
            noted.append([(tree.tokens, tree.parents, tree.scores) for tree in trees])
            return trees

        made.draft = noted_draft
        return made

    drafter.session = noting
    output = target.generate(**inputs, **{**GREEDY, **call}, assistant_model=drafter, return_dict_in_generate=True)
    del drafter.session
    return noted, output


def drafts_of(target, drafter, inputs):
    return drafted_call(target, drafter, inputs)[0]
