"""Parity of heads over the last hidden state with their authors' formulas, from random weights in each layout.

The formulas are those of Medusa (`medusa_model.py`), Hydra (`mlp_head.py`), fms-extras (`speculator.py`) and
ArcticInference (`arctic_speculator.py`), computed for one path at a time; vLLM's Medusa (`models/medusa.py`) has
further names and fields.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from oracles.format_parity import (
    HIDDEN,
    LAYERS,
    Case,
    NotingDrafter,
    Parity,
    Reference,
    Round,
    compared,
    randomise,
    taps_of,
    texts_of,
    tiny_target,
    write,
)

TOKENS, HEADS, INNER = 64, 4, 24
DRAFTED = tuple(range(1, TOKENS, 2))
Weights = dict[str, torch.Tensor]

_shared_target = cache(partial(tiny_target, vocab_size=TOKENS))


def parity(case: Case, every: int = 1) -> Parity:
    """Compares our drafts with the reference's, in a real call on a batch of padded prompts.

    The reference's `logits` is given the last hidden state `[H]`, and the tokens from the root on; it returns the
    logits `[n, V']` after each.
    """
    target = _shared_target(**case.target)
    reference = case.make(target)
    drafter = reference.loaded()
    assert tuple(drafter.taps_of(target)) == tuple(reference.taps), "other hidden states are read"
    noting = NotingDrafter(drafter, num_assistant_tokens=HEADS, tree_size=24, beam_width=3)
    texts, _ = texts_of(target, noting)
    read = [taps_of(target, text, reference.taps) for text in texts]

    def distance(each: Round, text: Sequence[int]) -> float:
        path = [*text[each.length - 1 :], *[11] * HEADS][: each.expansion.depth]
        taps = read[each.row][: each.length - 1]
        expected = reference.logits(taps if isinstance(reference, TextReference) else taps[-1], path).log_softmax(
            dim=-1
        )
        return float((each.log_probs(path) - expected).abs().max())

    with torch.no_grad():
        return compared(case.name, reference.name, noting.rounds, texts, distance, every)


@dataclass(frozen=True)
class TextReference(Reference):
    """Its `logits` is given the hidden states of the whole text, `[t, H]`."""


def random_weights(std: float = 0.3, **shapes: Sequence[int]) -> Weights:
    """Returns weights by name, with `__` for a dot."""
    generator = torch.Generator().manual_seed(5)
    made = {name.replace("__", "."): torch.randn(shape, generator=generator) * std for name, shape in shapes.items()}
    return {name: each + 1.0 if "ln" in name and name.endswith("weight") else each for name, each in made.items()}


def _pickled(folder: Path, config: dict[str, Any], tensors: Weights, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / name)


def medusa(target: Any, layout: str = "authors", layers: int = 1, drafted: Any = None, **fields: Any) -> Reference:
    """Medusa's heads, in its authors' layout or vLLM's."""
    shapes: dict[str, Sequence[int]] = {}
    tokens = TOKENS if drafted is None else len(drafted)
    for head in range(HEADS):
        shapes[f"{head}__{layers}__weight"] = (tokens, HIDDEN)
        for layer in range(layers):
            shapes |= {
                f"{head}__{layer}__linear__weight": (HIDDEN, HIDDEN),
                f"{head}__{layer}__linear__bias": (HIDDEN,),
            }
    weights = random_weights(**shapes)
    one, scale = fields.get("original_lm_head", False), fields.get("logit_scale", 1.0)
    if layout == "tgi":
        for head in range(HEADS):
            weights[f"{head}.{layers}.weight"] = target.lm_head.weight.detach()

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        made = []
        for head in range(len(path)):
            x = hidden
            for layer in range(layers):
                name = f"{head}.{layer}.linear"
                x = x + F.silu(weights[f"{name}.weight"] @ x + weights[f"{name}.bias"])
            made.append(scale * (weights[f"{0 if one else head}.{layers}.weight"] @ x))
        return torch.stack(made)

    def save(folder: Path) -> None:
        if layout == "tgi":
            (folder / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": layers}))
            own = {name: each for name, each in weights.items() if "linear" in name}
            return save_file(own, folder / "medusa_lm_head.safetensors")
        if layout == "authors":
            config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna"}
            return _pickled(folder, config, weights, "medusa_lm_head.pt")
        names = {}
        for head in range(HEADS):
            names |= {} if one and head else {f"lm_heads.{head}.weight": f"{head}.{layers}.weight"}
            for layer in range(layers):
                for part in ("weight", "bias"):
                    names[f"blocks.{head}.layers.{layer}.{part}"] = f"{head}.{layer}.linear.{part}"
        tensors = {f"medusa_heads.{ours}": weights[theirs] for ours, theirs in names.items()}
        tensors |= {} if drafted is None else {"token_map": torch.tensor(drafted)}
        config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": TOKENS, "num_heads": HEADS}
        further = {"num_hidden_layers": layers, "truncated_vocab_size": tokens, "medusa_fc_bias": True}
        return write(folder, {**config, **further, **fields}, tensors)

    return Reference("Medusa's formula", save, logits, (LAYERS,))


def hydra(target: Any, layers: int = 1, grounded: bool = True, offset: int = 0) -> Reference:
    shapes: dict[str, Sequence[int]] = {}
    for head in range(HEADS):
        shapes |= {f"hydra_lm_head__{head}__weight": (TOKENS, HIDDEN), f"hydra_lm_head__{head}__bias": (TOKENS,)}
        for layer in range(layers):
            name, parts = f"hydra_mlp__{head}__{layer}", head + 2 if grounded and not layer else 1
            shapes |= {f"{name}__linear__weight": (HIDDEN, HIDDEN * parts), f"{name}__linear__bias": (HIDDEN,)}
            rest = {"weight": (HIDDEN, HIDDEN * parts), "bias": (HIDDEN,)} if parts > 1 else {}
            shapes |= {f"{name}__res_connection__{part}": shape for part, shape in rest.items()}
    weights, table = random_weights(0.1, **shapes), target.get_input_embeddings().weight.detach()

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        made = []
        for head in range(len(path)):
            x = torch.cat([hidden, *(table[token] for token in path[: head + 1])]) if grounded else hidden
            for layer in range(layers):
                name = f"hydra_mlp.{head}.{layer}"
                rest = product(f"{name}.res_connection", x) if grounded and not layer else x
                x = rest + F.silu(product(f"{name}.linear", x))
            made.append(product(f"hydra_lm_head.{head}", x))
        return torch.stack(made)

    config = {"hydra_num_heads": HEADS, "hydra_num_layers": layers, "hydra_head_arch": "mlp"}
    config |= {"grounded_heads": grounded, "hidden_state_offset": offset, "base_model_name_or_path": "lmsys/vicuna"}
    stored = {**weights, "input_embed_fn.weight": table}
    save = partial(_pickled, config=config, tensors=stored, name="hydra_lm_head.pt")
    return Reference("Hydra's formula", save, logits, (LAYERS - offset,))


def hydra_prefix(target: Any, layers: int = 1, grounded: bool = True) -> Reference:
    """Hydra++: a decoder layer of the target's class reads the hidden states before Hydra's heads (`prefix_mlp_head`).

    The layer and its norm are transformers' Llama.
    """
    from transformers import LlamaModel

    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    prefix, heads = LlamaModel(config).eval(), hydra(target, layers, grounded)
    randomise(prefix, 0.2)

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        return heads.logits(prefix(inputs_embeds=hidden[None]).last_hidden_state[0, -1], path)

    def save(folder: Path) -> None:
        heads.save(folder)
        stored, tensors = torch.load(folder / "hydra_lm_head.pt"), {}
        for name in [name for name in stored if name.startswith(("hydra_mlp", "hydra_lm_head"))]:
            part, head, *rest = name.split(".")
            inner = [str(2 * int(rest[0]) + 1), *rest[1:]] if part == "hydra_mlp" else ["1", *rest]
            tensors[".".join([part, head, *inner])] = stored[name]
        tensors |= {f"prefix_embeding_layer.{name}": each for name, each in prefix.state_dict().items()}
        document = json.loads((folder / "config.json").read_text())
        _pickled(folder, {**document, "hydra_head_arch": "prefix-mlp"}, tensors, "hydra_lm_head.pt")

    return TextReference("Hydra's formula, and LlamaModel", save, logits, heads.taps)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6)


def _token_weight(inner: int) -> float:
    state = 0.5 ** (0.5 / HEADS)
    return math.sqrt((1 - state**2) * (inner / 2)) / state


def mlp(
    target: Any, tied: bool = False, scale: bool = False, prefix: str = "speculator.", inner: int = INNER
) -> Reference:
    """IBM's speculator. Tied weights are stored once, as another head's, or as a sequence of one part."""
    shapes: dict[str, Sequence[int]] = {"proj__0__weight": (inner, HIDDEN)}
    for head in range(HEADS):
        shapes |= {f"emb__{head}__weight": (TOKENS, inner), f"head__{head}__weight": (TOKENS, inner)}
        shapes |= {f"ln__{head}__weight": (inner,), f"ln__{head}__bias": (inner,)}
        shapes |= {f"proj__{head}__weight": (inner, inner)} if head else {}
    weights = random_weights(**shapes)
    of = (lambda name, head: min(head, 1) if name == "proj" else 0) if tied else lambda name, head: head
    weights = {name: each for name, each in weights.items() if of(*_parts(name)) == _parts(name)[1]}

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        state, made = _normed(hidden) / math.sqrt(2) if scale else hidden, []
        for head, token in enumerate(path):
            at = lambda name, head=head: f"{name}.{of(name, head)}"  # noqa: E731
            mixed = weights[f"{at('proj')}.weight"] @ state
            mixed = mixed + _token_weight(inner) * weights[f"{at('emb')}.weight"][token]
            state = F.gelu(_normed(mixed) * weights[f"{at('ln')}.weight"] + weights[f"{at('ln')}.bias"])
            made.append(weights[f"{at('head')}.weight"] @ state)
        return torch.stack(made)

    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN,
        "inner_dim": 0 if inner == HIDDEN else inner, "n_predict": HEADS, "n_candidates": 5, "vocab_size": TOKENS,
        "tie_weights": tied, "scale_input": scale, "top_k_tokens_per_head": [4, 3, 2, 2],
    }  # fmt: skip
    save = partial(write, config=config, tensors={prefix + name: each for name, each in weights.items()})
    return Reference("MLPSpeculator's formula", save, logits, (LAYERS,))


def _parts(name: str) -> tuple[str, int]:
    part, index, _ = name.split(".")
    return part, int(index)


def lstm(target: Any, inner: int = INNER) -> Reference:
    gates = ("forget", "input", "output", "cell")
    shapes: dict[str, Sequence[int]] = {"forget_emb__0__weight": (TOKENS, inner), "head__0__weight": (TOKENS, inner)}
    for gate in gates:
        shapes |= {f"{gate}_proj__0__weight": (inner, HIDDEN), f"{gate}_proj__1__weight": (inner, inner)}
    for norm in ("cell_ln", "state_ln"):
        shapes |= {f"{norm}__0__weight": (inner,), f"{norm}__0__bias": (inner,)}
    weights = random_weights(**shapes)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(_normed(x) * weights[f"{name}.0.weight"] + weights[f"{name}.0.bias"])

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        state, cell, made = _normed(hidden) / math.sqrt(2), torch.zeros(inner), []
        for head, token in enumerate(path):
            z = _token_weight(inner) * weights["forget_emb.0.weight"][token]
            forget, taken, out, new = (weights[f"{gate}_proj.{min(head, 1)}.weight"] @ state + z for gate in gates)
            cell = cell * torch.sigmoid(forget) + norm("cell_ln", new) * torch.sigmoid(taken)
            state = norm("state_ln", cell) * torch.sigmoid(out)
            made.append(weights["head.0.weight"] @ state)
        return torch.stack(made)

    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": HEADS,
        "input_hidden_dim": HIDDEN, "inner_dim": str(inner), "proj_dim": str(inner), "emb_dim": str(inner),
        "vocab_size": TOKENS, "method": "sum_lstm", "tie_lstm_embs": True, "tie_weights": True, "scale_input": True,
    }  # fmt: skip
    again = {f"{gate}_emb.0.weight": weights["forget_emb.0.weight"] for gate in ("input", "cell", "output")}
    save = partial(write, config=config, tensors={**weights, **again})
    return Reference("ArcticLSTMSpeculator's formula", save, logits, (LAYERS,))


def _case(name: str, make: Callable[..., Reference], **fields: Any) -> Case:
    return Case(name, partial(make, **fields))


CASES = (
    _case("Medusa, authors' layout", medusa),
    _case("Medusa, authors' layout, two blocks", medusa, layers=2),
    _case("Medusa, TGI's layout, output layer of the target", medusa, layout="tgi"),
    _case("Medusa, vLLM's layout", medusa, layout="vllm"),
    _case("Medusa, vLLM's layout, token map, scaled", medusa, layout="vllm", drafted=DRAFTED, logit_scale=0.5),
    _case("Medusa, vLLM's layout, one output layer", medusa, layout="vllm", original_lm_head=True),
    _case("Hydra", hydra),
    _case("Hydra, two blocks, an earlier layer", hydra, layers=2, offset=2),
    _case("Hydra, not grounded", hydra, grounded=False),
    _case("Hydra++", hydra_prefix),
    _case("Hydra++, two blocks", hydra_prefix, layers=2),
    _case("Hydra++, not grounded", hydra_prefix, grounded=False),
    _case("MLPSpeculator", mlp),
    _case("MLPSpeculator, tied, input normed", mlp, tied=True, scale=True),
    _case("MLPSpeculator, no prefix, width of the target", mlp, prefix="", inner=HIDDEN),
    _case("LSTM speculator", lstm),
)
