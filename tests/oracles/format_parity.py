"""What it takes to compare a published format's drafts with those of the implementation that it comes from."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_hsdraft.core.draft_tree import Expansion
from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from hf_hsdraft.drafters.base.protocol import Call, Session, WrappedDrafter

VOCABULARY, HIDDEN, LAYERS = 97, 32, 6
PROMPTS = ((5, 9, 11, 3, 40, 41, 42), (7, 8, 60, 61, 62, 7, 8, 60, 61, 20, 21))
NEW_TOKENS = 24
PADDING = 0
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Parity:
    """How far the drafts of a format are from those of its reference."""

    format: str  # its name, with what is special in this case
    reference: str  # class whose drafts are the right ones
    difference: float  # greatest distance of a log-probability or logit, in float32
    rounds: int  # drafts compared
    accepted: int  # rounds that accepted a draft
    rejected: int  # rounds that rejected some


@dataclass(frozen=True)
class Round:
    """A draft of a call."""

    row: int  # index of the text
    length: int  # of the text when it was drafted, in tokens, the anchor included
    place: int  # index of the text among those drafted for together
    rows: int  # number of these
    expansion: Expansion  # what their trees grew from

    def log_probs(self, path: Sequence[int]) -> torch.Tensor:
        """Returns log-probabilities `[n, V']` after the n first nodes of a path from the root, beside other nodes."""
        states, found = None, []
        for level, token in enumerate(path[: self.expansion.depth], 1):
            nodes = [token] if level == 1 else [token, (token + 1) % 5]
            if level == 2 and states is not None:
                states = states.expand(-1, 2, -1)
            log_probs, states = self.expansion(level, torch.tensor([nodes] * self.rows), states)
            found.append(log_probs[self.place, 0])
        return torch.stack(found)


@dataclass(frozen=True)
class Reference:
    """A drafter of random weights by the implementation that a format comes from."""

    name: str  # of its class
    save: Callable[[Path], Any]  # writes it into a folder
    logits: Callable[..., Any]  # what it drafts; the family's comparison says what it is given and what it returns
    taps: Sequence[int]  # hidden states of the target that it reads
    settle: Callable[[Any], Any] = lambda drafter: None  # tells a loaded drafter what its files do not
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments of its loading

    def loaded(self) -> Any:
        """Returns the drafter that its files are read as, in float32."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            drafter = AutoDrafter.from_pretrained(folder, dtype=torch.float32, **self.given)
        self.settle(drafter)
        return drafter


@dataclass(frozen=True)
class Case:
    """A format with what is special in this case."""

    name: str  # what is compared
    make: Callable[[Any], Reference]  # makes the reference for a target
    target: dict[str, Any] = field(default_factory=dict)  # fields of the target's configuration


class NotingDrafter(WrappedDrafter):
    """A drafter whose drafts are noted in `rounds`."""

    def __init__(self, drafter: Any, **options: Any) -> None:
        super().__init__(drafter)
        self.generation_config.update(**options)
        self.rounds: list[Round] = []

    def session(self, call: Call) -> Session:
        session: Any = super().session(call)

        def note(rows: Sequence[int], expansion: Expansion) -> None:
            for place, row in enumerate(rows):
                self.rounds.append(Round(row, int(session.anchors([row])) + 1, place, len(rows), expansion))

        session.on_expansion = note
        return session


def tiny_target(**overrides: Any) -> Any:
    """Returns a small random target in float32 whose text varies; `kind` is the class of its configuration."""
    torch.manual_seed(3)
    kind = overrides.pop("kind", LlamaConfig)
    sizes = {**SIZES, "intermediate_size": 64, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    special = {"max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": PADDING, "initializer_range": 0.3}
    return AutoModelForCausalLM.from_config(kind(**{**sizes, **special, **overrides})).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, std: float = 0.3, seed: int = 1) -> None:
    """Gives all parameters of a model values that matter: norms around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(values + 1.0 if "norm" in name and parameter.dim() == 1 else values)


_plain: dict[tuple[Any, int], torch.Tensor] = {}  # texts of plain decoding by target and number of new tokens


@torch.no_grad()
def texts_of(
    target: Any, drafter: Any, new_tokens: int = NEW_TOKENS, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[list[int]], Any]:
    """Decodes padded prompts in one batch with a drafter, as plain decoding does; returns texts and statistics."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    call = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
    output = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **call)
    if (target, new_tokens) not in _plain:
        _plain[target, new_tokens] = target.generate(ids, **call)
    assert torch.equal(output.sequences, _plain[target, new_tokens]), "the text is not that of plain decoding"
    texts = [row[longest - len(prompt) :] for row, prompt in zip(output.sequences.tolist(), prompts, strict=True)]
    return texts, output.statistics


@torch.no_grad()
def taps_of(target: Any, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Returns hidden states `[T, taps * D]` of a text at some layers, side by side, by one plain forward.

    The one after the last is the last layer's output before the final norm.
    """
    given: list[torch.Tensor] = []  # to the final norm
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    states = target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    hook.remove()
    states = (*states, given[0])
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_CLASSES = {
    "dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "Eagle3", "peagle": "PEagle",
    "xpress": "XPress",
}  # fmt: skip


def speculators_drafter(
    kind: str, layers: Any, ids: Sequence[int] | None, proposed: int, std: float = 0.3, **fields: Any
) -> Any:
    """Returns a drafter of the package speculators with random weights.

    `kind` is its type, such as `"eagle3"`, `layers` the configuration of its layers, `ids` the tokens that it can draft
    (`None` for all), `proposed` the number that it proposes, `fields` those of its configuration.
    """
    import speculators as package
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers._attn_implementation = "eager"
    proposals = package.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposed)],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = getattr(package, f"{_CLASSES[kind]}SpeculatorConfig")(
        transformer_layer_config=layers,
        speculators_config=proposals,
        draft_vocab_size=layers.vocab_size if ids is None else len(ids),
        **fields,
    )
    model = getattr(package, f"{_CLASSES[kind]}DraftModel")(config).eval()
    randomise(model, std)
    if ids is not None:
        kept = torch.zeros(layers.vocab_size, dtype=torch.bool)
        kept[list(ids)] = True
        model.load_vocab_mappings(kept, torch.tensor(ids) - torch.arange(len(ids)))
    return model


def loaded_by_speculators(folder: Path) -> Any:
    """Returns the drafter of a folder as the package speculators loads it, without weights of a target."""
    import speculators as package

    document = json.loads((folder / "config.json").read_text())
    name = _CLASSES[document["speculators_model_type"]]
    config = getattr(package, f"{name}SpeculatorConfig").from_pretrained(folder)
    assert document.keys() <= config.to_dict().keys() | {"num_draft_steps"}  # as they write
    config.transformer_layer_config._attn_implementation = "eager"
    model_class = getattr(package, f"{name}DraftModel")
    with mock.patch.object(model_class, "load_verifier_weights", lambda self: None, create=True):
        if "Eagle" in name:  # its classes tell nothing of their loading
            return model_class.from_pretrained(folder, config=config).eval()
        model, info = model_class.from_pretrained(folder, config=config, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes the files of a drafter."""
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")


def without(model: torch.nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model but for some."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in names}


def compared(
    name: str,
    reference: str,
    rounds: Sequence[Round],
    texts: Sequence[Sequence[int]],
    distance: Callable[[Round, Sequence[int]], float],
    every: int = 1,
) -> Parity:
    """Compares the rounds of a call with a reference, by the distance of a round's drafts from the reference's.

    Of the rounds before which nothing was accepted, one of `every` is compared.
    """
    lengths: dict[int, list[int]] = {}
    chosen = []
    for each in rounds:
        known = lengths.setdefault(each.row, [])
        if len(known) % every == 0 or each.length > known[-1] + 1:
            chosen.append(each)
        known.append(each.length)
    worst = max((distance(each, texts[each.row]) for each in chosen), default=math.inf)
    steps = [later - length for row in lengths.values() for length, later in itertools.pairwise([*row, row[-1] + 1])]
    accepted = sum(step > 1 for step in steps)
    return Parity(name, reference, worst, len(rounds), accepted, len(steps) - accepted)
