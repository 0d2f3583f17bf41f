"""A small language model that its target's hidden states steer while it drafts (SD^2)."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ...core.checks import is_integer, printable
from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...drafters.base.protocol import Accepted, Call, Read, weights_of
from ...drafters.base.registry import Format, register_format
from ...drafters.base.target_info import Evidence, Fit, TargetInfo
from ...drafters.language_model.lm_ability import ability_of, shared_tokens
from ...drafters.language_model.lm_drafter import CausalLMDrafter
from ...drafters.language_model.lm_files import describe, fit, why_no_causal_lm, why_not_by_config
from ...drafters.language_model.lm_session import CausalLMSession
from ...drafters.language_model.lm_texts import LMTexts
from ...hub.checkpoint import Checkpoint
from ...runtime.target_forwards import TargetOutput
from ...runtime.target_limits import decoder_layers, text_config
from ...training.files import write_complete
from .steering import Steering, SteeringSizes

STEERING = "steering.safetensors"  # beside the language model, as in index.json
_SIZES = "sizes"  # name of the metadata of that file
_NO_STEERING = (
    "this SteeredLMDrafter has no steering yet: give it one by drafter.steer_by(steering), train one by `hsdraft train "
    "--family steered-lm`, or use its language model as CausalLMDrafter(model)"
)


@dataclass(frozen=True)
class KnownVectors:
    """The latest steering vectors of a text: `[m, D]`, of consecutive positions up to `end`."""

    vectors: torch.Tensor
    end: int

    def then(self, further: torch.Tensor, end: int, kept: int) -> KnownVectors:
        """Returns the vectors extended by `[n, D]` up to position `end`, at most the last `kept`."""
        known = torch.cat([self.vectors, further]) if self.end + len(further) == end else further
        return KnownVectors(known[max(len(known) - kept, 0) :], end)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the vectors `[n, D]` at positions `[n]`: the last one beyond the end, zeros where none is known."""
        places = positions.clamp(max=self.end) - (self.end - len(self.vectors) + 1)
        padded = torch.cat([self.vectors.new_zeros(1, self.vectors.shape[1]), self.vectors])
        return padded[(places + 1).clamp(min=0).to(padded.device)]


class SteeredTexts(LMTexts):
    """Reads an accepted token with the vector of the position before it, so that the cache depends on the text alone.

    Drafted tokens share the vector of the last verified position, with which the round's root is read. The steering is
    not kept alive. `known`, the vectors of each row, is replaced by the session. `texts` are arguments of `LMTexts`.
    """

    def __init__(self, steering: Steering, known: Mapping[int, KnownVectors], *texts: Any) -> None:
        super().__init__(*texts)
        self.known = known
        self._steering_reference = weakref.ref(steering)
        self._of_round: torch.Tensor | None = None

    def keep(self, rows: Sequence[int]) -> None:
        self._of_round = None  # set again in the next round
        super().keep(rows)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: Any, wanted: int, taps: Sequence[int]
    ) -> TargetOutput:
        steering: Any = self._steering_reference()
        if self._drafted is None:
            before = zip(self.rows, positions - 1, strict=True)
            deltas = steering.deltas(torch.stack([self.known[row].at(each) for row, each in before]))
            self._of_round = deltas[:, -1:]
        else:
            assert self._of_round is not None
            deltas = self._of_round
        with steering.applied(deltas):
            return super()._forward(ids, positions, masks, wanted, taps)


class SteeredLMDrafter(CausalLMDrafter):
    """A small language model with steering ("Steering Pretrained Drafters", SD^2, section 3).

    With the option `steering` set to False it drafts as the plain `CausalLMDrafter` of the same `model`, which has
    gated feed-forward blocks and is not changed. A ValueError if `steering`, which `steer_by` may set later, is of
    other sizes.
    """

    own_options = (
        Option("steering", True, lambda value: isinstance(value, bool), "True or False", "Whether drafts are steered."),
    )
    steering: Any  # a Steering; None until there is one

    def __init__(self, model: Any, tokenizer: Any = None, steering: Steering | None = None) -> None:
        super().__init__(model, tokenizer)
        self.steering = None
        if steering is not None:
            self.steer_by(steering)

    def steer_by(self, steering: Steering) -> None:
        """Sets the steering; a ValueError if it is for a language model of other sizes."""
        self.model = steering.attached(self.model)
        self.steering = steering

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return () if self.steering is None else self.steering.sizes.taps

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> SteeredLMDrafter:
        steering = load_steering(checkpoint)
        drafter = super().of_checkpoint(checkpoint, **kwargs)
        assert isinstance(drafter, SteeredLMDrafter)
        drafter.steer_by(steering.to(drafter.device, drafter.dtype))
        return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """As `CausalLMDrafter.save_pretrained`, with the steering in a small file; a ValueError if there is none."""
        if self.steering is None:
            raise ValueError(_NO_STEERING)
        super().save_pretrained(save_directory, **kwargs)
        tensors = {name: tensor.contiguous() for name, tensor in self.steering.state_dict().items()}
        sizes = {_SIZES: json.dumps(vars(self.steering.sizes))}
        write_complete(Path(save_directory) / STEERING, lambda partial: save_file(tensors, partial, metadata=sizes))

    def check(self, target: Any) -> None:
        if self.steering is None:
            raise DraftingRefused(_NO_STEERING)
        super().check(target)
        config, sizes = text_config(target), self.steering.sizes
        width, layers = config.hidden_size, decoder_layers(config)
        if width == sizes.target_hidden_size and sizes.taps[-1] <= layers:
            return
        has, reads = f"num_hidden_layers={layers}", f"hidden states {list(sizes.taps)}"
        if width != sizes.target_hidden_size:
            has, reads = f"hidden_size={width}", f"hidden_size={sizes.target_hidden_size}"
        raise DraftingRefused(
            f"the target has {has}, this drafter's steering reads {reads}: it was trained for another target. Use the "
            "language model alone, by CausalLMDrafter.from_pretrained, or train a steering for this target."
        )

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        steering = () if self.steering is None else (Read("steering", weights_of(self.steering), 1, 1),)
        return *super().reads(depth, width), *steering

    def session(self, call: Call) -> CausalLMSession:
        if not call.options.own["steering"]:
            return super().session(call)
        kinds = ability_of(self.model).kinds
        return SteeredLMSession(self.steering, self.model, call, shared_tokens(self.model, call.target), kinds)


class SteeredLMSession(CausalLMSession):
    """A language model's session, steered by vectors made from the target's news."""

    def __init__(self, steering: Steering, model: Any, call: Call, vocab_size: int, kinds: Any) -> None:
        weight = steering.fuse.weight
        nothing = KnownVectors(weight.new_zeros(0, len(weight)).detach(), -1)
        self._steering, self._known = steering, dict.fromkeys(range(call.rows), nothing)
        super().__init__(model, call, vocab_size, kinds)
        self.kind = (*self.kind, "steered")

    def _begin(self, rows: Sequence[int]) -> SteeredTexts:
        return SteeredTexts(self._steering, self._known, self._model, rows, self._kinds, self._most_drafted)

    @torch.no_grad()
    def observe(self, news: Sequence[Accepted]) -> None:
        """The last hidden state of the news is that of the token before the root."""
        super().observe(news)
        read = {row: kept for texts in self._groups for row, kept in zip(texts.rows, texts.kept, strict=True)}
        dtype = self._steering.fuse.weight.dtype
        for each in news:
            length = len(self._texts[each.row].tokens)
            vectors = self._steering.vectors(each.taps[max(len(each.taps) - length + 1, 0) :].to(dtype))
            unread = length - read.get(each.row, length)
            self._known[each.row] = self._known[each.row].then(vectors, length - 2, unread)
        for texts in self._groups:
            assert isinstance(texts, SteeredTexts)
            texts.known = self._known  # resumed texts hold the vectors of an earlier call


def has_steering(checkpoint: Checkpoint) -> bool:
    return (checkpoint.also(STEERING) / STEERING).is_file()


def load_steering(checkpoint: Checkpoint) -> Steering:
    """Loads the steering beside a language model. Raises an OSError if there is none, a ValueError if it is damaged."""
    path = checkpoint.also(STEERING) / STEERING
    if not path.is_file():
        raise OSError(f"{printable(checkpoint.name)} has no {STEERING}: expected the folder of a steered drafter")
    try:
        with safe_open(path, framework="pt") as file:
            sizes = _sizes((file.metadata() or {}).get(_SIZES, ""))
        with torch.device("meta"):
            steering = Steering(sizes)
        steering.load_state_dict(load_file(path), assign=True)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({printable(error)}): expected what a steered drafter saved") from error
    return steering.eval()


def _fit(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """A steering was trained for one target, so a target that is not named is another one."""
    found = fit(checkpoint, target, named)
    return found if found is not None and found.evidence == Evidence.NAMED else None


def _sizes(text: str) -> SteeringSizes:
    fields = json.loads(text)
    given = fields if isinstance(fields, dict) else {}
    taps, inner, width = (given.get(name) for name in ("taps", "inner_sizes", "target_hidden_size"))
    if isinstance(taps, list) and isinstance(inner, list) and taps and inner and is_integer(width):
        numbers = [width, *taps, *inner]
        right = all(is_integer(number) and 0 <= number < 2**20 for number in numbers)
        if right and taps == sorted(set(taps)):
            return SteeringSizes(tuple(taps), numbers[0], tuple(inner))
    raise ValueError(f"sizes {printable(text)} are invalid")


register_format(
    Format(
        name="steered language model",
        rank=999,  # before plain language models, which nothing marks
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint) and has_steering(checkpoint),
        load=SteeredLMDrafter.of_checkpoint,
        describe=lambda checkpoint: {**describe(checkpoint), "reads": "the text, and the target's hidden states"},
        drafter=SteeredLMDrafter,
        possible=lambda config: not why_not_by_config(config),
        fit=_fit,
    )
)
