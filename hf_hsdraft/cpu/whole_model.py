"""On CPUs with our kernel, the model around the layers runs without calling them, where one call computes them all.

Slicing the list of layers, calling each of them and recording hidden states by hooks take as long as several layers of
a small model. The first forward of a kind is compared with transformers' own, which calls the layers.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..core.cache_name import CACHE
from .layer_form import MASK
from .whole_layers import Ahead, Chain, are_close, is_code_of_transformers, is_transformers_own

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_IDS, _POSITIONS, _STATES = "input_ids", "position_ids", "output_hidden_states"
_OWN = (_IDS, MASK, "inputs_embeds", _STATES)  # keywords that its forward does not hand down to the layers as they are
_tried: dict[Any, bool] = {}  # whether a kind of forward computes what transformers' does


def nothing() -> None:
    pass


class WholeModel:
    """Stands in for the model that consists of an embedding, a chain of layers and a norm.

    Args:
        model: that model.
        chain: all its layers.
        form_of: as `layer_form.form_of`.
        ran: is called when it has run.
    """

    def __init__(self, model: Any, chain: Chain, form_of: Callable[..., Any], ran: Callable[[], None]) -> None:
        self._chain, self._form_of, self._ran = chain, form_of, ran
        self._create_mask = sys.modules[type(model).__module__].create_causal_mask
        self.place_layers: Callable[[], None] = nothing

    @staticmethod
    def may_be(model: Any, chains: Sequence[Chain]) -> bool:
        """Whether the forward of a model is known, and calls the layers of a single chain."""
        kind, config, parts = type(model), getattr(model, "config", None), dict(model.named_children())
        if (
            len(chains) != 1
            or config is None
            or parts.keys() != _PARTS
            or type(parts["embed_tokens"]) is not nn.Embedding
        ):
            return False
        known = [kind, type(parts["norm"]), type(parts["rotary_emb"])]
        create_mask = getattr(sys.modules.get(kind.__module__), "create_causal_mask", None)
        return (
            all(map(is_transformers_own, known))
            and is_code_of_transformers(create_mask)
            and getattr(config, "sliding_window", None) is None  # by this alone Mistral selects its mask
            and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
            and config.num_hidden_layers == len(chains[0].layers)
            and getattr(config, "tie_last_hidden_states", None) is not False
        )

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = NotImplemented if args or torch.is_grad_enabled() else self._run(model, kwargs)
        if output is NotImplemented:
            self.place_layers()
        return output

    def _run(self, model: Any, kwargs: dict[str, Any]) -> Any:
        ids, positions, cache, mask = map(kwargs.get, (_IDS, _POSITIONS, CACHE, MASK))
        if ids is None or ids.dim() != 2 or positions is None or cache is None or not self._is_usual(model, kwargs):
            return NotImplemented
        begins, wanted = ids.shape[1] > 1 and _is_empty(cache), kwargs.get(_STATES, model.config.output_hidden_states)
        sizes = len(ids) > 1, ids.shape[1] > 1, None if mask is None else mask.dim()
        key = (self._chain.description, type(model), model.dtype, *sizes, begins, bool(wanted))
        parts = self._chain.ready(ids.numel()) if _tried.get(key, True) else None
        if parts is None or self._chain.hooked:
            return NotImplemented
        x = model.embed_tokens(ids)
        owns = self._chain.rooms_for(x) if begins else self._chain.held_by(cache)
        if begins or (mask is not None and mask.dim() == 2):
            asked = {"config": model.config, "inputs_embeds": x, MASK: mask, CACHE: cache, _POSITIONS: positions}
            mask = self._create_mask(**asked)
        if owns is None or (begins and mask is not None):  # padding, whose states are any
            return NotImplemented
        given = {name: value for name, value in kwargs.items() if name not in _OWN}
        given |= {MASK: mask, "position_embeddings": model.rotary_emb(x, positions)}
        norm = self._chain.weight_of(model.norm, x.dtype)
        last = len(owns) - 1
        states = range(last + 2) if wanted is True else wanted or ()
        outputs = [place for place in range(last + 1) if place + 1 in states or place == last]
        ahead = self._chain.together(parts, x, given, owns, self._form_of, outputs, norm)
        if ahead is None:
            return NotImplemented
        output = _output(model, x, ahead, cache, states)
        if key not in _tried:
            return self._compared(key, model, kwargs, output)
        self._ran()
        if begins:
            for layer, (_, keys, values) in zip(self._chain.layers, ahead.states, strict=True):
                cache.update(keys, values, layer.self_attn.layer_idx)
        else:
            ahead.enter()
        return output

    def _is_usual(self, model: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the model calls the chain's layers, and nothing else sees or changes what it returns."""
        own, angles, config, mask = vars(model), vars(model.rotary_emb), model.config, kwargs.get(MASK)
        hooks = [each[kind] for each in (own, angles) for kind in ("_forward_pre_hooks", "_forward_hooks")]
        layers, uses = model.layers._modules, kwargs.get("use_cache")
        wanted = kwargs.get(_STATES, config.output_hidden_states)
        return (
            not any(hooks)  # models differ in whether they give angles keywords
            and own.get("forward") is None
            and kwargs.get("inputs_embeds") is None
            and not kwargs.get("output_attentions", config.output_attentions)
            and bool(config.use_cache if uses is None else uses)
            and config.return_dict is not False
            and not torch.is_autocast_enabled("cpu")
            and (mask is None or isinstance(mask, torch.Tensor))
            and len(layers) == len(self._chain.layers)
            and all(map(operator.is_, layers.values(), self._chain.layers))
            and (not wanted or wanted is True or all(0 <= each <= len(layers) for each in wanted))
        )

    def _compared(self, key: Any, model: Any, kwargs: dict[str, Any], found: Any) -> Any:
        """transformers' own output, after noting whether `found`, of which nothing has entered the cache, is close."""
        self.place_layers()
        expected = model._call_impl(**kwargs)
        nothing, (pairs, same) = torch.zeros(()), _paired(expected, found)
        _tried[key] = same and all(
            a is b is None or (a is not None and b is not None and are_close(a, b, nothing)) for a, b in pairs
        )
        return expected


def _is_empty(cache: Any) -> bool:
    """Whether a cache has read nothing, and will keep all that it reads as it is."""
    return (
        type(cache) is DynamicCache
        and not cache.get_seq_length()
        and not cache.offloading
        and all(type(layer) is DynamicLayer for layer in cache.layers)
        and cache.layer_class_to_replicate in (None, DynamicLayer)
    )


def _output(model: Any, x: torch.Tensor, ahead: Ahead, cache: Any, wanted: Sequence[int]) -> Any:
    """As the model's forward returns it, with the hidden states at the `wanted` places."""
    count = len(ahead.states)
    last = model.norm(ahead.outputs[count - 1]) if ahead.normed is None else ahead.normed
    each = enumerate((x, *map(ahead.outputs.get, range(count - 1)), last))
    states = tuple(state if place in wanted else None for place, state in each) if wanted else None
    found: Mapping[str, Any] = {"last_hidden_state": last, CACHE: cache, "hidden_states": states}
    return BaseModelOutputWithPast(**found)


def _paired(expected: Any, found: Any) -> tuple[Any, bool]:
    """The tensors of two outputs side by side, and whether both have equally many under the same names."""
    each = [[output.last_hidden_state, *(output.hidden_states or ())] for output in (expected, found)]
    return zip(*each, strict=False), expected.keys() == found.keys() and len(each[0]) == len(each[1])
