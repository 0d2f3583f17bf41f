"""EAGLE-3 drafters of Gemma 4's layers, as DeepSpec writes them: by transformers' modules, and by DeepSpec's class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import DynamicCache, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextMLP,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from oracles.eagle_by_hand import LAYERS, TOKENS
from oracles.format_parity import HIDDEN, Case, Reference, randomise, write

TAPS, SIZE, HEADS, KEYS, CAP = (2, 4, 6), 16, 4, 2, 30.0
_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0}


def _config(layers: int) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=TOKENS, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, head_dim=SIZE, layer_types=["full_attention"] * layers,
        rope_parameters={"full_attention": _ROPE}, hidden_size_per_layer_input=0, per_layer_config={},
    )  # fmt: skip


class Layer(nn.Module):
    """A layer that reads one row at a time, and keeps keys and values of the rows before in `kept`."""

    def __init__(self, config: Gemma4TextConfig, shared: bool) -> None:
        super().__init__()
        widths = {"q_proj": HEADS, "k_proj": KEYS} | ({} if shared else {"v_proj": KEYS})
        self.self_attn = nn.ModuleDict({
            **{name: nn.Linear(2 * HIDDEN, heads * SIZE, bias=False) for name, heads in widths.items()},
            "o_proj": nn.Linear(HEADS * SIZE, HIDDEN, bias=False),
            "q_norm": Gemma4RMSNorm(SIZE, config.rms_norm_eps), "k_norm": Gemma4RMSNorm(SIZE, config.rms_norm_eps),
        })  # fmt: skip
        self.value_norm = Gemma4RMSNorm(SIZE, config.rms_norm_eps, with_scale=False)
        self.mlp = Gemma4TextMLP(config, 0)
        for name in (
            "hidden_norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):  # fmt: skip
            setattr(self, name, Gemma4RMSNorm(HIDDEN, config.rms_norm_eps))
        self.register_buffer("layer_scalar", torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor, embed: torch.Tensor, rope: Any, kept: list[Any]) -> torch.Tensor:
        """Returns the state `[D]` after this layer."""
        module: Any = self  # norms were set by name
        part = module.self_attn
        inputs = torch.cat([module.input_layernorm(embed), module.hidden_norm(x)])

        def heads(name: str) -> torch.Tensor:
            return part[name](inputs).unflatten(-1, (1, -1, SIZE))

        queries = apply_rotary_pos_emb(part["q_norm"](heads("q_proj")), *rope)
        keys = apply_rotary_pos_emb(part["k_norm"](heads("k_proj")), *rope)
        kept.append((keys, self.value_norm(heads("v_proj" if "v_proj" in part else "k_proj"))))
        keys, values = (torch.cat(each).repeat_interleave(HEADS // KEYS, 1) for each in zip(*kept, strict=True))
        shares = torch.einsum("qhd,khd->hqk", queries, keys).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, values).flatten()
        x = x + module.post_attention_layernorm(part["o_proj"](mixed))
        x = x + module.post_feedforward_layernorm(module.mlp(module.pre_feedforward_layernorm(x)))
        return x * module.layer_scalar


def of_gemma(target: Any, layers: int = 1, shared: bool = False, by_class: bool = False) -> Reference:
    """Returns such a drafter; `shared` makes values by the product for keys, `by_class` computes by DeepSpec's."""
    config = _config(layers)
    model: Any = nn.ModuleDict({
        "embed_tokens": nn.Embedding(TOKENS, HIDDEN), "fc": nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False),
        "layers": nn.ModuleList(Layer(config, shared) for _ in range(layers)),
        "norm": Gemma4RMSNorm(HIDDEN, config.rms_norm_eps), "lm_head": nn.Linear(HIDDEN, TOKENS, bias=False),
    })  # fmt: skip
    randomise(model, 0.2)
    rotary = Gemma4TextRotaryEmbedding(config)

    def logits(taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        states, found, kept = list(model["fc"](taps)), [], [[] for _ in range(layers)]
        for position, token in enumerate([*tokens, *path]):
            x, embed = states[position], model["embed_tokens"].weight[token] * HIDDEN**0.5
            rope = [each[0] for each in rotary(x, torch.tensor([[position]]), "full_attention")]
            for layer, each in zip(model["layers"], kept, strict=True):
                x = layer(x, embed, rope, each)
            if position >= len(tokens) - 1:
                states.append(x)
                found.append(torch.tanh(model["lm_head"](model["norm"](x)) / CAP) * CAP)
        return torch.stack(found)

    fields = {
        "architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text", "vocab_size": TOKENS,
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS, "num_global_key_value_heads": KEYS, "head_dim": 8, "global_head_dim": SIZE,
        "attention_k_eq_v": shared, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 99.0}},
        "layer_types": ["full_attention"] * layers, "sliding_window": 512, "final_logit_softcapping": CAP,
        "enable_moe_block": False, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "tie_word_embeddings": False, "target_layer_ids": [tap - 1 for tap in TAPS], "num_target_layers": LAYERS,
        "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": layers, "target_model_type": "gemma4",
        "attention_bias": False,
    }  # fmt: skip
    save = partial(write, config=fields, tensors=model.state_dict())
    if by_class:
        return Reference("Gemma4Eagle3Model of DeepSpec", save, _by_class(config, fields, model), TAPS)
    return Reference("modules of Gemma 4", save, logits, TAPS)


def _by_class(config: Gemma4TextConfig, fields: dict[str, Any], model: nn.Module) -> Any:
    """Returns drafts by DeepSpec's class, as its evaluator calls it: the prompt at once, then a token at a time."""
    from deepspec.modeling.eagle3.gemma4 import modeling

    for name in ("num_global_key_value_heads", "global_head_dim", "target_layer_ids", "ttt_length", "step_loss_decay"):
        setattr(config, name, fields[name])
    config.attention_k_eq_v, config._attn_implementation = fields["attention_k_eq_v"], "sdpa"
    config.final_logit_softcapping = CAP
    # transformers' class takes the type of layers when it is called only, since 5.24
    with mock.patch.object(
        modeling, "Gemma4TextRotaryEmbedding", lambda config, **_: Gemma4TextRotaryEmbedding(config)
    ):
        theirs = modeling.Gemma4Eagle3Model(config).eval()
    missing, unknown = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not unknown and all("v_norm" in name or "inv_freq" in name for name in missing)

    def logits(taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        cache, at = DynamicCache(), torch.arange(len(tokens))[None]
        ids = torch.tensor([list(tokens)])
        found = [theirs(taps[None], ids, position_ids=at, past_key_values=cache, use_cache=True)[:, -1:]]
        for place, token in enumerate(path, len(tokens)):
            at, ids = torch.tensor([[place]]), torch.tensor([[token]])
            found.append(theirs(found[-1], ids, position_ids=at, past_key_values=cache, use_cache=True))
        return torch.cat([theirs.compute_logits(each)[0] for each in found])

    return logits


CASES = (
    Case("DeepSpec, EAGLE-3 of Gemma 4's layers", of_gemma),
    Case("DeepSpec, EAGLE-3 of Gemma 4's layers, two, shared values", partial(of_gemma, layers=2, shared=True)),
    Case("DeepSpec, EAGLE-3 of Gemma 4's layers, by its class", partial(of_gemma, by_class=True)),
)
