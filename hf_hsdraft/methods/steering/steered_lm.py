"""A small language model that its target's hidden states steer while it drafts ("Steering Pretrained Drafters", SD^2).

The target's hidden states at the last verified position make a vector, which enters every feed-forward block of the
drafter: down(act(gate x) * (up x + delta)), with one delta per layer (section 3). A new steering changes nothing, since
its last product is zero.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.checks import Limit, is_integer, printable
from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...drafters.base.protocol import Accepted, Call, weights_of
from ...drafters.base.registry import Evidence, Fit, TargetInfo
from ...drafters.base.travelling_config import default_tap_layers
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.tree_reading import TargetOutput
from ...training.files import write_complete
from ..distillation.layer_subset import layers_of, sharing_weights
from ..estimate.reads import Read
from ..language_model.lm_drafter import CausalLMDrafter, CausalLMSession
from ..language_model.lm_files import describe, fit, why_no_causal_lm, why_not_by_config
from ..language_model.lm_texts import LMTexts, ability_of, shared_tokens
from ..published.checkpoint import AnyCheckpoint
from ..published.formats import Format, register_format

STEERING = "steering.safetensors"  # beside the language model, as in index.json
_SIZES = "sizes"  # name of the metadata of that file
_NO_STEERING = (
    "this SteeredLMDrafter has no steering yet: give it one by drafter.steer_by(steering), train one by `hsdraft train "
    "--family steered-lm`, or use its language model as CausalLMDrafter(model)"
)
_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SteeringSizes:
    """Sizes of a steering, and what it reads."""

    taps: tuple[int, ...]  # the target's hidden states to read, ascending (0: the embeddings, i: after layer i)
    target_hidden_size: int  # D, their width
    inner_sizes: tuple[int, ...]  # width of each drafter layer's feed-forward block

    @classmethod
    def of(cls, model: Any, target: Any, taps: Sequence[int] | None = None) -> SteeringSizes:
        """Returns the sizes for a drafter's language model and its target.

        `taps` defaults to one low, one middle and one high hidden state. Raises a ValueError if the drafter has no
        gated feed-forward blocks, or the target no such hidden states.
        """
        config, layers = text_config(target), decoder_layers(text_config(target))
        wanted = default_tap_layers(layers) if taps is None else list(taps)
        if not wanted or wanted != sorted(set(wanted)) or not (wanted[0] >= 0 and wanted[-1] <= layers):
            raise ValueError(f"taps {wanted} are invalid: expected ascending numbers from 0 to {layers}, each once")
        inner = tuple(up.out_features for up in up_projections(model))
        return cls(tuple(wanted), config.hidden_size, inner)


def up_projections(model: Any) -> list[nn.Linear]:
    """Returns the product of each layer that a delta is added to; a ValueError if a layer has none, or several."""
    found = []
    for number, layer in enumerate(layers_of(model)[1]):
        blocks = [part for part in layer.modules() if all(hasattr(part, name) for name in _GATED)]
        if len(blocks) != 1 or not isinstance(blocks[0].up_proj, nn.Linear):
            raise ValueError(
                f"{type(model).__name__} cannot be steered: layer {number} has {len(blocks)} gated feed-forward blocks "
                f"({', '.join(_GATED)}), expected one, as models like Llama have"
            )
        found.append(blocks[0].up_proj)
    return found


class Steering(nn.Module):
    """Maps hidden states `[D]` of the target to what is added in all layers of the drafter, `[F]` side by side."""

    def __init__(self, sizes: SteeringSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, count = sizes.target_hidden_size, len(sizes.taps)
        self.fuse = nn.Linear(count * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, sum(sizes.inner_sizes), bias=False)
        with torch.no_grad():
            self.fuse.weight.copy_(torch.eye(width, device=self.fuse.weight.device).repeat(1, count))
            nn.init.zeros_(self.up.weight)
        self._key = object()

    def vectors(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns vectors `[..., D]` of taps `[..., taps * D]`. A zero vector stands for unknown taps."""
        return self.norm(self.fuse(taps.to(self.fuse.weight.device)))

    def deltas(self, vectors: torch.Tensor) -> torch.Tensor:
        """Returns what vectors `[..., D]` add in all layers, side by side, `[..., F]`; zeros for a zero vector."""
        return self.up(vectors)

    def attached(self, model: Any) -> Any:
        """Returns a language model that shares the weights and can be steered; unsteered, it computes the same.

        Raises a ValueError if its feed-forward blocks have other sizes than the steering.
        """
        steered = sharing_weights(model)
        products = up_projections(steered)
        found = tuple(up.out_features for up in products)
        if found != self.sizes.inner_sizes:
            raise ValueError(
                f"the steering is for feed-forward blocks of {list(self.sizes.inner_sizes)}, the language model has "
                f"{list(found)}: expected the model that it was trained with"
            )
        start = 0
        for up in products:
            up.register_forward_hook(functools.partial(_add, self._key, start))
            start += up.out_features
        return steered

    @contextmanager
    def applied(self, deltas: torch.Tensor) -> Iterator[None]:
        """Steers this thread's forwards in the context by deltas `[B, n, F]`; n may be 1 for all tokens."""
        token = _current.set((self._key, deltas))
        try:
            yield
        finally:
            _current.reset(token)


# The key of a steering, which hooks need not hold, and the deltas.
_current: ContextVar[tuple[object, torch.Tensor] | None] = ContextVar("deltas of the running forward", default=None)


def _add(key: object, start: int, up: nn.Linear, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Forward hook: adds the layer's part of the running forward's deltas."""
    current = _current.get()
    if current is None or current[0] is not key:
        return None
    return output + current[1][..., start : start + up.out_features].to(output)


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
        Option(
            "steering",
            True,
            Limit(lambda value: isinstance(value, bool), "True or False"),
            "Whether drafts are steered.",
        ),
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
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, **kwargs: Any) -> SteeredLMDrafter:
        steering = load_steering(checkpoint)
        drafter = super().of_checkpoint(checkpoint, **kwargs)
        assert isinstance(drafter, SteeredLMDrafter)
        drafter.steer_by(steering.to(drafter.device, drafter.dtype))
        return drafter

    def save_files(self, folder: Path, **kwargs: Any) -> None:
        """As in `CausalLMDrafter`, with the steering in a small file; a ValueError if there is none."""
        if self.steering is None:
            raise ValueError(_NO_STEERING)
        super().save_files(folder, **kwargs)
        tensors = {name: tensor.contiguous() for name, tensor in self.steering.state_dict().items()}
        sizes = {_SIZES: json.dumps(vars(self.steering.sizes))}
        write_complete(folder / STEERING, lambda partial: save_file(tensors, partial, metadata=sizes))

    def check(self, target: Any) -> None:
        if self.steering is None:
            raise DraftingRefused(_NO_STEERING)
        super().check(target)
        config, sizes = text_config(target), self.steering.sizes
        width, layers = config.hidden_size, decoder_layers(config)
        if width != sizes.target_hidden_size:
            has, reads = f"hidden_size={width}", f"hidden_size={sizes.target_hidden_size}"
        elif sizes.taps[-1] > layers:
            has, reads = f"num_hidden_layers={layers}", f"hidden states {list(sizes.taps)}"
        else:
            return
        raise DraftingRefused(
            f"the target has {has}, this drafter's steering reads {reads}: it was trained for another target. Use the "
            "language model alone, by CausalLMDrafter.from_pretrained, or train a steering for this target."
        )

    def reads(self, depth: int, width: int) -> Iterator[Read]:
        yield from super().reads(depth, width)
        if self.steering is not None:
            yield Read("steering", weights_of(self.steering), 1, 1)

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


def has_steering(checkpoint: AnyCheckpoint) -> bool:
    return (checkpoint.also(STEERING) / STEERING).is_file()


def load_steering(checkpoint: AnyCheckpoint) -> Steering:
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


def _fit(checkpoint: AnyCheckpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
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
