"""EAGLE-3 drafters of random weights by the reference implementations, and what those compute for a drafted path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import make_target
from safetensors.torch import load_file, save_file

from hf_hsdraft.drafters.eagle import eagle_expansion, eagle_session
from hf_hsdraft.drafters.eagle.eagle_session import EagleSession

WIDTH, TOKENS, DRAFTED, LAYERS = 32, 40, 26, 8

# Of taps `[t, n * D]` of x_0 .. x_{t-1}, the tokens x_1 .. x_t, and those of a drafted path: logits `[V']` after it.
Reference = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


def make_eagle_target(**fields):
    """A target with enough layers for the hidden states that EAGLE-3 reads, and few tokens: many drafts are right."""
    known = {"vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
    return make_target(**{**known, **fields})


def speculators_model(kind: str = "eagle3", layer: str = "llama", seed: int = 3, **fields) -> Any:
    """A drafter of the package speculators with random weights.

    Args:
        kind: `"eagle3"` or `"peagle"`.
        layer: type of the layers, `"llama"` or `"qwen3"`.
        fields: of the drafter's configuration; `layer_fields` are those of its layers.
    """
    import speculators
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    sizes = {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    sizes |= fields.pop("layer_fields", {})
    config = (LlamaConfig if layer == "llama" else Qwen3Config)(**sizes)
    config._attn_implementation = "eager"
    config_class, model_class = {
        "eagle3": (speculators.Eagle3SpeculatorConfig, speculators.Eagle3DraftModel),
        "peagle": (speculators.PEagleSpeculatorConfig, speculators.PEagleDraftModel),
    }[kind]
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposals = speculators.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    known = {"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    torch.manual_seed(seed)
    model = model_class(
        config_class(transformer_layer_config=config, speculators_config=proposals, **{**known, **fields})
    )
    fill(model)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Random weights large enough to matter, norms that are no ones, and a map to tokens beyond the first."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() > 1:
            parameter.normal_(std=1.0 if "embed" in name or "mask" in name else 0.2)
        else:
            parameter.normal_(std=0.3)
    if getattr(model, "d2t", None) is not None:
        size = len(model.d2t)
        ids = torch.randperm(len(model.t2d))[:size].sort().values
        model.d2t.copy_(ids - torch.arange(size))
        model.t2d.zero_()
        model.t2d[ids] = True


def saved(model: Any, folder: Path, renamed: Callable[[str], str] | None = None, **config: Any) -> Path:
    """Saves a drafter of speculators; with another configuration and names, as another project would."""
    model.save_pretrained(folder)
    if renamed is not None:
        state = {renamed(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_speculators(model: Any) -> Reference:
    """What speculators' own forward makes of a path: at the last accepted pair, one step of its unrolling a token."""

    def reference(taps: torch.Tensor, tokens: list[int], path: list[int]) -> torch.Tensor:
        found: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output))
        # Pairs after the last accepted one are not seen; their tokens are those that the steps read.
        padded = torch.cat([taps, torch.full((len(path), taps.shape[1]), 7.0)])
        ids = torch.tensor([[*tokens, *path]])
        try:
            with torch.no_grad():
                model(padded[None], ids, torch.zeros_like(ids), ttt_steps=len(path) + 1)
        finally:
            hook.remove()
        return found[-1][0, len(taps) - 1]

    return reference


def of_peagle(model: Any, monkeypatch: Any) -> Reference:
    """What P-EAGLE's training forward makes of one chain of mask rows after the last accepted pair."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    loss = resolve_loss_config('{"ce": 1.0}', "eager")

    def reference(taps: torch.Tensor, tokens: list[int], path: list[int]) -> torch.Tensor:
        length, more = len(taps), len(path)
        anchors = torch.cat([torch.arange(length), torch.full((more,), length - 1)])
        depths = torch.cat([torch.zeros(length, dtype=torch.int64), torch.arange(1, more + 1)])
        monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
        found: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output))
        padded = torch.cat([taps, torch.full((more, taps.shape[1]), 7.0)])
        ids = torch.tensor([[*tokens, *path]])
        final = torch.zeros(1, length + more, WIDTH)
        try:
            with torch.no_grad():
                model(
                    padded[None], ids, torch.zeros_like(ids), verifier_last_hidden_states=final, loss_config=loss,
                    num_depths=more + 1,
                )  # fmt: skip
        finally:
            hook.remove()
        return found[0][0, -1]

    return reference


@dataclass(frozen=True)
class Parity:
    """How near our draft logits come to those of a reference.

    Attributes:
        format: name of the format.
        reference: class of the reference implementation.
        difference: largest difference of a logit.
        rounds: number of rounds of real decoding that were compared.
        accepted: number of drafted tokens that were accepted in them.
    """

    format: str
    reference: str
    difference: float
    rounds: int
    accepted: int


@dataclass
class _Round:
    text: list[int]
    nodes: list[tuple[list[int], torch.Tensor]]  # path and logits of every row that drafted


class _Watched:
    """Records the rounds of a single text."""

    def __init__(self, prompt: list[int]) -> None:
        self.text, self.rounds, self.accepted = list(prompt), [], 0

    def observe(self, news: Any) -> None:
        self.text.extend(news.tokens)
        self.accepted += news.num_drafted

    def note(self, level: int, tokens: Any, states: Any, logits: Any, numbers: Any) -> None:
        if level == 1:
            self.rounds.append(_Round(list(self.text), []))
            self._paths: dict[int, list[int]] = {0: []}
            self.rounds[-1].nodes.append(([], logits[0, 0]))
            return
        for place, token in enumerate(tokens[0].tolist()):
            path = [*self._paths[int(states[0, place, 0])], token]
            self._paths[int(numbers[0, place, 0])] = path
            self.rounds[-1].nodes.append((path, logits[0, place]))


def compare(
    name: str, drafter: Any, target: Any, reference: Reference, of: str, monkeypatch: Any, new_tokens: int = 14, **call
) -> Parity:
    """Drafts in a real `generate()`, and compares the logits of every node with the reference's on the same text."""
    prompt = torch.randint(2, TOKENS, (1, 9), generator=torch.Generator().manual_seed(5))
    watched = _Watched(prompt[0].tolist())
    expansion = eagle_expansion.EagleExpansion
    monkeypatch.setattr(expansion, "logits", _noting(expansion.logits, watched))
    monkeypatch.setattr(eagle_session, "parallel_logits", _noting_parallel(eagle_session.parallel_logits, watched))
    observe = EagleSession.observe

    def observing(session, news):
        watched.observe(news[0])
        return observe(session, news)

    monkeypatch.setattr(EagleSession, "observe", observing)
    options = drafter.generation_config
    options.tree_sizing, options.ngram_length, options.num_assistant_tokens = "fixed", 0, 3
    options.tree_size, options.beam_width = 24, 3
    plain = target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **call)
    text = target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, assistant_model=drafter, **call)
    assert text.tolist() == plain.tolist()
    taps = drafter.taps_of(target)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    taps_of_text = torch.cat([states[tap][0] for tap in taps], dim=-1)
    difference = 0.0
    for each in watched.rounds:
        known = each.text
        for path, logits in each.nodes:
            expected = reference(taps_of_text[: len(known) - 1], known[1:], path)
            difference = max(difference, float((logits - expected).abs().max()))
    return Parity(name, of, difference, len(watched.rounds), watched.accepted)


def _noting(original: Any, watched: _Watched) -> Any:
    def logits(self, level, tokens, states):
        found, numbers = original(self, level, tokens, states)
        watched.note(level, tokens, states, found, numbers)
        return found, numbers

    return logits


def _noting_parallel(original: Any, watched: _Watched) -> Any:
    def logits(*args):
        found = original(*args)
        nodes = [([0] * depth, row) for depth, row in enumerate(found[0])]  # these rows know no path
        watched.rounds.append(_Round(list(watched.text), nodes))
        return found

    return logits


def of_economize(state: dict[str, torch.Tensor], embedding: torch.Tensor, theta: float = 10000.0) -> Reference:
    """The same by economize's layer, on the tensors of the authors' files."""
    from economize.modules import RotaryTable
    from economize.techniques.eagle3.layer import Eagle3Layer

    layer = Eagle3Layer(WIDTH, 48, 4, 2, 8, 1e-6)
    own = {name.removeprefix("midlayer."): each for name, each in state.items() if name.startswith("midlayer.")}
    layer.load_state_dict(own)
    table = RotaryTable(8, theta)

    def row(source, token, position):
        rotary = tuple(part[None] if part.dim() == 2 else part for part in table(torch.tensor([position])))
        return layer.project(source[None, None], embedding[token][None, None], rotary)

    def reference(taps: torch.Tensor, tokens: list[int], path: list[int]) -> torch.Tensor:
        keys, values = [], []
        with torch.no_grad():
            sources = list(taps @ state["fc.weight"].T)
            for position, token in enumerate([*tokens, *path]):
                residual, query, key, value = row(sources[position], token, position)
                keys.append(key)
                values.append(value)
                if position < len(tokens) - 1:  # of these nothing but keys and values is needed
                    continue
                seen = torch.ones(1, 1, 1, len(keys), dtype=torch.bool)
                mixed = layer.attend(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), seen)
                y = layer.finish(residual, mixed)[0, 0]
                sources.append(y)
        normed = torch.nn.functional.rms_norm(y, (WIDTH,), state["norm.weight"], 1e-6)
        return state["lm_head.weight"] @ normed

    return reference
