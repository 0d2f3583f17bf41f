"""What is kept about layers holds only until something changes that they compute with."""

import copy
import gc
import weakref

import pytest
import torch
from conftest import make_target
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_hsdraft.cpu.known_layers import KnownLayers
from hf_hsdraft.cpu.layer_form import description_of


def known_of(target):
    return KnownLayers.of(list(target.model.layers), target)


def described(target):
    return {layer: description_of(layer, {}) for layer in target.model.layers}


def louder(self, x):
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LouderMLP(LlamaMLP):
    forward = louder


def other_data(layer):
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.double()


def other_strides(layer):
    weight = layer.self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


CHANGES = {
    "attribute": lambda layer, patch: setattr(layer.self_attn, "scaling", 0.6),
    "new attribute": lambda layer, patch: setattr(layer.mlp, "loudness", 2.0),
    "content of an attribute": lambda layer, patch: layer.mlp.scales.append(2.0),
    "configuration": lambda layer, patch: setattr(layer.self_attn.config, "mlp_bias", True),
    "attention": lambda layer, patch: setattr(layer.self_attn.config, "_attn_implementation", "eager"),
    "code": lambda layer, patch: patch.setattr(LlamaMLP, "forward", louder),
    "function": lambda layer, patch: patch.setattr(modeling_llama, "rotate_half", lambda x: x),
    "class": lambda layer, patch: setattr(layer.mlp, "__class__", LouderMLP),
    "part": lambda layer, patch: setattr(layer.mlp, "act_fn", nn.Identity()),
    "new part": lambda layer, patch: layer.mlp.add_module("more", nn.Identity()),
    "weight": lambda layer, patch: setattr(layer.mlp.up_proj, "weight", nn.Parameter(torch.zeros(3, 4))),
    "new weight": lambda layer, patch: layer.mlp.register_parameter("more", nn.Parameter(torch.zeros(3))),
    "dtype of a weight's data": lambda layer, patch: other_data(layer),
    "strides of a weight's data": lambda layer, patch: other_strides(layer),
    "buffer": lambda layer, patch: setattr(layer.mlp, "offset", torch.zeros(7)),
    "new buffer": lambda layer, patch: layer.mlp.register_buffer("more", torch.zeros(7)),
    "names of parts": lambda layer, patch: vars(layer.mlp).update(_modules=dict(reversed(layer.mlp._modules.items()))),
}


def make_known_target():
    target = make_target()
    mlp = target.model.layers[1].mlp
    mlp.scales = [1.0]
    mlp.register_buffer("offset", torch.zeros(5))
    return target


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_is_described(change, monkeypatch):
    target = make_known_target()
    first = known_of(target)
    assert known_of(target) is first and first.descriptions == described(target)
    CHANGES[change](target.model.layers[1], monkeypatch)
    again = known_of(target)
    assert described(target) != first.descriptions, "else there is nothing to notice"
    assert again.descriptions == described(target)
    assert known_of(target) is again


def test_what_is_compiled_later_is_noticed():
    target = make_target()
    assert known_of(target).largest > 0
    target.model.layers[1].mlp.compile(backend="eager")
    assert known_of(target).largest == 0


def test_a_replaced_forward_and_other_layers_are_noticed():
    target = make_target()
    first = known_of(target)
    target.model.layers[0], target.model.layers[1] = target.model.layers[1], target.model.layers[0]
    assert list(known_of(target).descriptions) == list(target.model.layers) != list(first.descriptions)
    target.model.layers[1].mlp.forward = lambda x: x
    assert list(known_of(target).descriptions) == [
        layer for layer in target.model.layers if layer is not target.model.layers[1]
    ]
    del target.model.layers[1].mlp.forward
    assert known_of(target).descriptions == described(target)


def test_numbers_in_weights_are_no_change_and_copies_are_known_apart():
    target = make_target()
    first = known_of(target)
    target.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert known_of(target) is first
    assert known_of(copy.deepcopy(target)) is not first


def test_targets_are_not_kept():
    target = make_target()
    known, weight = weakref.ref(known_of(target)), weakref.ref(target.model.layers[0].mlp.up_proj.weight)
    del target
    gc.collect()
    assert known() is None and weight() is None
