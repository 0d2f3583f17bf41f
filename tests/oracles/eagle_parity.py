"""Parity of EAGLE-3 drafters with the implementations that their formats come from: speculators, and economize's layer.

Each case builds a small drafter of random weights by the reference's class, writes it as its format says, loads it, and
decodes with it. The logits of every node of every draft are then computed by the reference, on the same accepted text.
Where a project's own code is not installed, its files are those of speculators with other names and fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, Qwen3Config

from hf_hsdraft.methods.published.target_copies import before_norm
from oracles import eagle_by_hand, eagle_gemma
from oracles.eagle_by_hand import DRAFTED, LAYERS, OF_AUTHORS, TOKENS
from oracles.format_parity import (
    HIDDEN,
    OF_TARGET,
    SIZES,
    Case,
    NotingDrafter,
    Parity,
    Reference,
    Round,
    compared,
    randomise,
    speculators_drafter,
    taps_of,
    texts_of,
    tiny_target,
    without,
    write,
)

MASK = 5
TAPS = (1, 4, 6)


def eagle_target(**fields: Any) -> Any:
    """Returns a target with as many layers as EAGLE-3 wants, and so few tokens that many drafts are right."""
    return tiny_target(**{"num_hidden_layers": LAYERS, "vocab_size": TOKENS, **fields})


_shared_target = cache(eagle_target)


def parity(case: Case, every: int = 1) -> Parity:
    """Compares our drafts of a format with the reference's, in a real call on a batch of padded prompts.

    `every` is told to `compared`.
    """
    target = _shared_target(**case.target)
    reference = case.make(target)
    return parity_of(case.name, reference.loaded(), target, reference, every)


def parity_of(name: str, drafter: Any, target: Any, reference: Reference, every: int = 1) -> Parity:
    """Compares a drafter's drafts with a reference's, as `parity` does.

    The reference's `logits` returns those `[n + 1, V']` after the n + 1 first nodes of a path, the root being the
    first. It is given taps `[t, taps * D]` of x_0 .. x_{t-1}, the tokens x_1 .. x_t, of which the last is the root, and
    the n tokens of the path.

    Raises:
        AssertionError: the drafter reads other hidden states than the reference.
    """
    assert tuple(drafter.taps_of(target)) == tuple(reference.taps), "other hidden states are read"
    noting = NotingDrafter(drafter, num_assistant_tokens=4, tree_size=32, beam_width=3)
    texts, _ = texts_of(target, noting)
    read = [taps_of(target, text, reference.taps) for text in texts]
    mask = drafter.config.mask_token_id

    def distance(each: Round, text: Sequence[int]) -> float:
        taps, depth = read[each.row][: each.length - 1], each.expansion.depth
        path = ([*text[each.length :], *[11] * depth] if mask is None else [mask] * depth)[: depth - 1]
        expected = reference.logits(taps, text[1 : each.length], path).log_softmax(dim=-1)
        return float((each.log_probs([text[each.length - 1], *path]) - expected).abs().max())

    with torch.no_grad():
        return compared(name, reference.name, noting.rounds, texts, distance, every)


def speculators_model(
    kind: str = "eagle3",
    layer: dict[str, Any] | None = None,
    ids: Sequence[int] | None = DRAFTED,
    qwen: bool = False,
    taps: Sequence[int] = TAPS,
    **fields: Any,
) -> Any:
    """Returns a drafter of the package speculators; `layer` are fields of its layers' configuration."""
    sizes = {"vocab_size": TOKENS, "num_hidden_layers": 1, **SIZES, **(layer or {})}
    layers = (Qwen3Config if qwen else LlamaConfig)(**sizes)
    model = speculators_drafter(kind, layers, ids, 4, 0.2, eagle_aux_hidden_state_layer_ids=list(taps), **fields)
    if (width := fields.get("target_hidden_size", layers.hidden_size)) != layers.hidden_size:
        model.fc = torch.nn.Linear(len(taps) * width, layers.hidden_size, bias=False)  # its class knows one width
        randomise(model, 0.2)
    return model


def _heads(model: Any, run: Callable[[], Any]) -> list[torch.Tensor]:
    """What the output layer of a drafter returns while something runs, call by call."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: found.append(output[0]))
    try:
        run()
    finally:
        hook.remove()
    return found


def _padded(taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps `[1, t + n, ...]` and tokens `[1, t + n]` with a path behind: its taps are not seen from before."""
    more = torch.full((len(path), taps.shape[1]), 7.0)
    return torch.cat([taps, more])[None], torch.tensor([[*tokens, *path]])


def unrolled(model: Any, taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Returns the logits of a path by speculators' unrolling, at the last accepted pair; see `parity_of`."""
    states, ids = _padded(taps, tokens, path)
    steps = len(path) + 1  # each reads the token that is one further
    found = _heads(model, lambda: model(states, ids, torch.zeros_like(ids), ttt_steps=steps))
    return torch.stack([logits[len(taps) - 1] for logits in found])


def in_parallel(model: Any, taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Returns the logits of mask rows after the last accepted pair by P-EAGLE's forward of training."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    states, ids = _padded(taps, tokens, path)
    length, more = len(taps), len(path)
    anchors = torch.cat([torch.arange(length), torch.full((more,), length - 1)])
    depths = torch.cat([torch.zeros(length, dtype=torch.int64), torch.arange(1, more + 1)])
    final = torch.zeros(1, length + more, HIDDEN)
    arguments = {"num_depths": more + 1, "loss_config": resolve_loss_config('{"ce": 1.0}', "eager")}
    with mock.patch.object(core, "generate_cod_sample_indices", lambda **_: (anchors, depths)):  # else they are drawn
        run = partial(model, states, ids, torch.zeros_like(ids), verifier_last_hidden_states=final, **arguments)
        [logits] = _heads(model, run)
    return logits[length - 1 :]


def of_speculators(target: Any, kind: str = "eagle3", **fields: Any) -> Reference:
    """Returns a drafter as the package speculators saves it; the arguments are those of `speculators_model`."""
    model = speculators_model(kind, **fields)
    logits = partial(in_parallel if kind == "peagle" else unrolled, model)
    taps = before_norm(model.config.eagle_aux_hidden_state_layer_ids, LAYERS)
    return Reference(type(model).__name__, model.save_pretrained, logits, taps)


def authors_config(**fields: Any) -> dict[str, Any]:
    """Returns config.json as the authors of EAGLE-3 write it. Its number of layers is the target's."""
    known = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"}
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": TOKENS, "draft_vocab_size": len(DRAFTED), "rms_norm_eps": 1e-6}
    further = {"max_position_embeddings": 2048, "use_cache": True, "tie_word_embeddings": False}
    return {**known, **SIZES, **sizes, **further, **fields}


def renamed(
    target: Any,
    taps: Sequence[int],
    config: dict[str, Any],
    first_layer: str = "midlayer",
    own_embedding: bool = False,
    prefix: str = "",
    tied: bool = False,
    **fields: Any,
) -> Reference:
    """Returns a drafter of speculators in files of another project.

    Such files mean the hidden states `taps`, and `config` are fields that differ from those of the authors. They may
    hold an embedding (else the target's is borrowed), which may be the head too (`tied`). `prefix` is that of all names
    but the head's and the maps'; `fields` are those of `speculators_model`.
    """
    model = speculators_model(taps=taps, **fields)
    with torch.no_grad():
        if not own_embedding:
            model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        if tied:
            model.lm_head.weight.copy_(model.embed_tokens.weight)
    kept = ([] if tied else ["lm_head.weight"]) + (["embed_tokens.weight"] if own_embedding else [])
    state = without(model, [name for name in OF_TARGET if name not in kept])
    unprefixed = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
    tensors = {
        (name if name in unprefixed else prefix + name.replace("layers.0.", f"{first_layer}.")): tensor
        for name, tensor in state.items()
    }
    save = partial(write, config=authors_config(**config), tensors=tensors)
    logits = partial(in_parallel if fields.get("kind") == "peagle" else unrolled, model)
    normed = bool(fields.get("norm_output"))
    return Reference(f"{type(model).__name__}, renamed", save, logits, taps, partial(_settle, normed=normed))


def _settle(drafter: Any, normed: bool) -> None:
    """Tells a drafter which state is fed back, as a trial would on texts that it was trained for."""
    if "norm_output" in drafter.config.untold:
        drafter.config = replace(drafter.config, norm_output=normed, untold=())


def of_authors(target: Any, theta: float | None = None) -> Reference:
    """Returns a drafter as the authors publish it, pickled, and with it economize's layer of the same names."""
    from economize.modules import RotaryTable
    from economize.techniques.eagle3.layer import Eagle3Layer

    layer = Eagle3Layer(HIDDEN, 48, 4, 2, 8, 1e-6)
    rest = torch.nn.ModuleDict({
        "fc": torch.nn.Linear(3 * HIDDEN, HIDDEN, bias=False),
        "norm": torch.nn.RMSNorm(HIDDEN, 1e-6),
        "lm_head": torch.nn.Linear(HIDDEN, len(DRAFTED), bias=False),
    })  # fmt: skip
    randomise(layer, std=0.2)
    randomise(rest, std=0.2, seed=2)
    table, embedding = RotaryTable(8, theta or 10000.0), target.get_input_embeddings().weight.detach()
    kept = torch.zeros(TOKENS, dtype=torch.bool)
    kept[list(DRAFTED)] = True
    state = {
        **{f"midlayer.{name}": tensor for name, tensor in layer.state_dict().items()},
        **rest.state_dict(),
        "d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED)),
        "t2d": kept,
    }

    def logits(taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        sources, keys, values, found = list(rest["fc"](taps)), [], [], []
        for position, token in enumerate([*tokens, *path]):
            rotary = table(torch.tensor([[position]]))
            row = layer.project(sources[position][None, None], embedding[token][None, None], rotary)
            residual, query, key, value = row
            keys.append(key)
            values.append(value)
            if position >= len(tokens) - 1:  # of those before nothing but keys and values is needed
                seen = torch.ones(1, 1, 1, len(keys), dtype=torch.bool)
                mixed = layer.attend(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), seen)
                sources.append(layer.finish(residual, mixed)[0, 0])
                found.append(rest["lm_head"](rest["norm"](sources[-1])))
        return torch.stack(found)

    def save(folder: Path) -> None:
        write(folder, authors_config(**({} if theta is None else {"rope_theta": theta})), {})
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")

    return Reference("economize's Eagle3Layer", save, logits, OF_AUTHORS)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 50.0, **fields}, "max_position_embeddings": 256}


def _scaling(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}, "rope_theta": 50.0, "max_position_embeddings": 256}


_SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
_SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECFORGE = {"eagle_config": {_IDS: [1, 2, 5]}}
_SEVERAL_AXES = {"type": "mrope", "mrope_section": [1, 1, 2]}
_HUNYUAN = {
    "use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False, "tie_word_embeddings": True,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0},
}  # fmt: skip
_OF_OPTIMIZER = {  # ModelOpt
    "eagle_config": {_IDS: [], "use_aux_hidden_state": True, "use_last_layernorm": True, "parallel_draft_step": 1},
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 50.0},
}
_PARALLEL = {"kind": "peagle", "mask_token_id": MASK, "first_layer": "layers.0", "own_embedding": True}

CASES = eagle_by_hand.CASES + eagle_gemma.CASES + tuple(
    Case(name, partial(make, **fields))
    for name, make, fields in (
        ("speculators eagle3", of_speculators, {}),
        ("speculators eagle3, layers of Qwen3", of_speculators, {"qwen": True}),
        ("speculators eagle3, norm_before_residual", of_speculators, {"norm_before_residual": True}),
        ("speculators eagle3, norm_before_fc", of_speculators, {"norm_before_fc": True}),
        ("speculators eagle3, fc_norm", of_speculators, {"fc_norm": True}),
        ("speculators eagle3, norm_output", of_speculators, {"norm_output": True}),
        ("speculators eagle3, whole vocabulary", of_speculators, {"ids": None}),
        ("speculators eagle3, three layers", of_speculators, {"layer": {"num_hidden_layers": 3}}),
        ("speculators eagle3, biases", of_speculators, {"layer": {"attention_bias": True, "mlp_bias": True}}),
        ("speculators eagle3, five hidden states", of_speculators, {"taps": (0, 1, 3, 5, 7)}),
        ("speculators eagle3, last layer before the norm", of_speculators, {"taps": (1, 4, LAYERS)}),
        ("speculators eagle3, rope_theta", of_speculators, {"layer": _rope("default")}),
        ("speculators eagle3, YaRN", of_speculators, {"layer": _rope("yarn", **_SCALED)}),
        ("speculators eagle3, Llama 3's positions", of_speculators, {
            "layer": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SCALED)}),
        ("speculators peagle", of_speculators, {"kind": "peagle", "mask_token_id": MASK}),
        ("speculators peagle, two layers", of_speculators, {
            "kind": "peagle", "mask_token_id": MASK, "layer": {"num_hidden_layers": 2}}),
        ("speculators peagle, sliding", of_speculators, {
            "kind": "peagle", "mask_token_id": MASK, "layer": _SLIDING, "qwen": True}),
        ("speculators eagle3, narrower than the target", of_speculators, {
            "layer": {"hidden_size": 24, "intermediate_size": 40}, "target_hidden_size": HIDDEN,
            "embed_requires_grad": True}),
        ("speculators eagle3, positions of several axes", of_speculators, {
            "layer": _rope("default", mrope_section=[1, 1, 2], mrope_interleaved=True)}),
        *((f"speculators peagle, {name}", of_speculators, {"kind": "peagle", "mask_token_id": MASK, **fields})
          for name, fields in (
              ("own embedding", {"embed_requires_grad": True}),
              ("embedding of the target", {"embed_requires_grad": False}),
              ("four layers", {"layer": {"num_hidden_layers": 4}}),
              ("norm_before_residual, fc_norm", {"norm_before_residual": True, "fc_norm": True}),
              ("norm_before_fc", {"norm_before_fc": True}),
              ("norm_output", {"norm_output": True}),
              ("layers of Qwen3", {"qwen": True}),
              ("whole vocabulary", {"ids": None}),
          )),
        ("EAGLE-3 of its authors", of_authors, {}),
        ("EAGLE-3 of its authors, rope_theta", of_authors, {"theta": 50.0}),
        ("EAGLE-3 of its authors, own embedding", renamed, {"taps": OF_AUTHORS, "config": {}, "own_embedding": True}),
        ("EAGLE-3, hidden states as vLLM names them", renamed, {"taps": TAPS, "config": {_IDS: list(TAPS)}}),
        ("SpecForge", renamed, {"taps": (2, 3, 6), "config": {**_SPECFORGE, "norm_output": False}}),
        ("SpecForge, norm_output before September 2026", renamed, {
            "taps": (2, 3, 6), "config": {**_SPECFORGE, "norm_output": True}}),
        ("SpecForge, EAGLE-3.1", renamed, {
            "taps": (2, 3, 6), "norm_output": True, "fc_norm": True,
            "config": {**_SPECFORGE, "norm_output": True, "fc_norm": True}}),
        ("SpecForge, P-EAGLE", renamed, {
            **_PARALLEL, "taps": OF_AUTHORS, "layer": {"num_hidden_layers": 2},
            "config": {"architectures": ["PEagleDraftModel"], "mask_token_id": MASK, "num_hidden_layers": 2}}),
        ("vLLM, P-EAGLE's mask by another name", renamed, {
            **_PARALLEL, "taps": OF_AUTHORS, "config": {"ptd_token_id": MASK}}),
        ("NeMo AutoModel, EAGLE-3.1", renamed, {
            "taps": OF_AUTHORS, "first_layer": "layers.0", "prefix": "model.", "own_embedding": True,
            "norm_output": True, "fc_norm": True,
            "config": {"architectures": ["LlamaEagle3DraftModel"], "norm_output": True, "fc_norm": True}}),
        ("NeMo AutoModel, P-EAGLE", renamed, {
            **_PARALLEL, "taps": OF_AUTHORS, "prefix": "model.",
            "config": {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 4,
                       "mask_token_id": MASK}}),
        ("AngelSlim, Hunyuan", renamed, {"taps": OF_AUTHORS, "config": _HUNYUAN, "own_embedding": True}),
        ("AngelSlim, positions of several axes", renamed, {
            "taps": OF_AUTHORS, "config": {"rope_scaling": _SEVERAL_AXES, "rope_theta": 50.0},
            "layer": _rope("default")}),
        ("ModelOpt, no layers named", renamed, {
            "taps": OF_AUTHORS, "first_layer": "layers.0", "config": _OF_OPTIMIZER, "layer": _rope("default")}),
        ("AngelSlim, layers of Qwen3", renamed, {
            "taps": OF_AUTHORS, "qwen": True, "config": {
                "model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}}),
        ("gpt-oss, wide heads", renamed, {
            "taps": OF_AUTHORS, "layer": {"head_dim": 16}, "config": {"head_dim": 16}}),
        ("gpt-oss, norm_before_fc in eagle_config", renamed, {
            "taps": OF_AUTHORS, "norm_before_fc": True, "config": {"eagle_config": {"norm_before_fc": True}}}),
        ("vLLM, norm_before_fc", renamed, {
            "taps": OF_AUTHORS, "norm_before_fc": True, "config": {"norm_before_fc": True}}),
        ("vLLM, norm_before_residual", renamed, {
            "taps": OF_AUTHORS, "norm_before_residual": True, "config": {"norm_before_residual": True}}),
        ("vLLM, narrower than the target", renamed, {
            "taps": OF_AUTHORS, "own_embedding": True, "target_hidden_size": HIDDEN, "embed_requires_grad": True,
            "layer": {"hidden_size": 24, "intermediate_size": 40},
            "config": {"hidden_size": 24, "intermediate_size": 40, "target_hidden_size": HIDDEN}}),
        ("vLLM, last layer before the norm", renamed, {
            "taps": (1, 4, LAYERS + 1), "config": {_IDS: [1, 4, LAYERS]}}),
        ("Llama 3's positions", renamed, {
            "taps": OF_AUTHORS, "layer": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SCALED),
            "config": _scaling("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SCALED)}),
        ("YaRN with mscale (DeepSeek)", renamed, {
            "taps": OF_AUTHORS, "layer": _rope("yarn", mscale=1.0, mscale_all_dim=0.5, **_SCALED),
            "config": _scaling("yarn", mscale=1.0, mscale_all_dim=0.5, **_SCALED)}),
        ("YaRN, not truncated (gpt-oss)", renamed, {
            "taps": OF_AUTHORS, "layer": _rope("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **_SCALED),
            "config": _scaling("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **_SCALED)}),
        ("linear positions", renamed, {
            "taps": OF_AUTHORS, "layer": _rope("linear", factor=3.0), "config": _scaling("linear", factor=3.0)}),
        ("rope_parameters of transformers 5", renamed, {
            "taps": OF_AUTHORS, "layer": _rope("default"), "config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}}),
        ("SGLang, tied head", renamed, {
            "taps": OF_AUTHORS, "own_embedding": True, "ids": None, "tied": True,
            "config": {"tie_word_embeddings": True, "draft_vocab_size": None}}),
        ("SpecForge, fc_norm", renamed, {
            "taps": (2, 3, 6), "config": {**_SPECFORGE, "fc_norm": True}, "fc_norm": True}),
        ("SpecForge, hidden states by default", renamed, {
            "taps": OF_AUTHORS, "config": {"eagle_config": {"use_aux_hidden_state": True}, _IDS: None}}),
        ("DeepSpec", renamed, {
            "taps": (0, 2, 4, 6, 7), "first_layer": "layers.0", "qwen": True, "ids": None, "own_embedding": True,
            "config": {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [-1, 1, 3, 5, 6],
                       "draft_vocab_size": None}}),
    )
)  # fmt: skip

REFUSED = eagle_by_hand.REFUSED
