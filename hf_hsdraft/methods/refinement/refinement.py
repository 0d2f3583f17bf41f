"""Refinement of drafts whose depths know little of one another, and trees of the p best paths ("Exploring and Improving
Drafts in Blockwise Parallel Decoding", local rescoring by a neural language model, and p-best drafts).

Such a drafter predicts each depth independently, so a path may be incoherent. A tiny neural n-gram model of the
target's text reads the path. With q the drafter's distribution for a child and p the model's, the child is drafted from

    q'(v) ~ q(v)^(1 - share) p(v)^share,    or in logits    (1 - share) * drafter + share * model.

Only drafts change. The verifier knows q', like any other distribution that nodes are drawn from.

The model is saved in a subfolder of the drafter's, so that programs that read all weights of that folder ignore it.
Sizes and tensors are separate files, and the former hold the SHA-256 of the latter.

Letters in the shapes: as in `TokenBias`; S is the size of the model's states, D the width of the target's embedding.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ...core.checks import Limit, demand, integer, is_number
from ...core.draft_tree import (
    TREE_BUILDERS,
    Builder,
    DraftTree,
    Expansion,
    FoundNodes,
    TreeLimits,
    from_nodes,
    searched,
)
from ...core.kept import kept_with
from ...core.tensors import RMSNorm, Transform, on_device
from ...drafters.base.draft_options import METHOD_OPTIONS, DraftOptions, MethodOption
from ...drafters.base.protocol import Accepted, Call, Session
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import ParallelExpansion, TokenBias
from ...engine.drafting import Drafting
from ...hub.drafter_files import check_weights, read_json, sha256, tensors
from ...training.files import write_complete

NAME = "refinement"
_EPS = 1e-6
CONFIG, WEIGHTS = "refiner/config.json", "refiner/model.safetensors"  # as in index.json
# The target's hidden states already tell the drafters the text and the root before the first depth. Leftover states,
# which `reuse="resample"` draws from again, are older than the root; their first depth is not refined either.
_FIRST_LEVEL = 2


@dataclass(frozen=True)
class PathLMSizes:
    """Sizes of the model."""

    embedding_size: int  # D
    draft_vocab_size: int  # V'
    length: int = 3  # tokens that it looks back
    width: int = 96  # of what is kept of each of these tokens
    inner_size: int = 192  # of the layer that combines them
    rank: int = 64  # r

    def __post_init__(self) -> None:
        limit = integer(2**22)
        for name, value in vars(self).items():
            demand(limit.valid(value), name, value, f"a refiner needs {limit.wanted}")

    @property
    def state_size(self) -> int:
        return self.length * self.width


class PathLM(nn.Module):
    """A neural n-gram model over the draft vocabulary. A *state* holds the last tokens, newest first, or zeros."""

    def __init__(self, sizes: PathLMSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm = RMSNorm(sizes.embedding_size, _EPS)
        self.read = nn.Linear(sizes.embedding_size, sizes.width, bias=False)
        self.mix = nn.Linear(sizes.state_size, 2 * sizes.inner_size)
        self.down = nn.Linear(sizes.inner_size, sizes.rank, bias=False)
        self.up = nn.Linear(sizes.rank, sizes.draft_vocab_size)

    def advance(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the states `[..., S]` after one more token, from its embedding `[..., D]` and the states before."""
        token = self.read(self.norm(embeds))
        return torch.cat([token, states[..., : -self.sizes.width]], dim=-1)

    def after(self, before: torch.Tensor, embed: Transform) -> torch.Tensor:
        """Returns the states `[..., S]` after the last tokens of texts `[..., length]`, int64, newest last.

        -1 stands before the beginning of a text. `embed` maps token ids to embeddings.
        """
        embeds = embed(before.clamp(min=0)).to(self.read.weight)
        tokens = self.read(self.norm(embeds)) * (before >= 0)[..., None].to(embeds.device)
        return tokens.flip(-2).flatten(-2)

    def code(self, states: torch.Tensor) -> torch.Tensor:
        """Returns what the last product multiplies, `[..., r]`, after states `[..., S]`."""
        gate, value = self.mix(states).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits `[..., V']` of the next token after states `[..., S]`."""
        return self.up(self.code(states))


def has_refiner(drafter: Any) -> bool:
    """Whether a drafter has a refiner beside its weights. Reads no files."""
    folder = getattr(drafter, "loaded_from", None)
    return folder is not None and (_known(drafter) is not None or (folder / CONFIG).is_file())


def _known(drafter: Any) -> PathLM | None:
    return _loaded(drafter).get(drafter.loaded_from)


def _loaded(drafter: Any) -> dict[Path, PathLM]:
    """Refiners of a drafter, by its folder."""
    return kept_with(drafter, "refiners", dict)


def refiner_of(drafter: Any, weights: TargetWeights) -> PathLM:
    """Returns the refiner beside a drafter's weights, read once; an OSError if missing, a ValueError if it is wrong."""
    model = _known(drafter)
    if model is None:
        model = load_refiner(drafter.loaded_from, weights.vocab_ids)
        _loaded(drafter)[drafter.loaded_from] = model
    width, drafted = weights.embed(weights.vocab_ids[:1]).shape[-1], len(weights.vocab_ids)
    if (model.sizes.embedding_size, model.sizes.draft_vocab_size) != (width, drafted):
        raise ValueError(
            f"the refiner in {drafter.loaded_from} is for embeddings of {model.sizes.embedding_size} and "
            f"{model.sizes.draft_vocab_size} drafted tokens, this target and drafter have {width} and {drafted}: train "
            "one for them by `hsdraft make refiner`"
        )
    return model.to(drafter.device, drafter.dtype)


def save_refiner(
    model: PathLM, folder: str | os.PathLike[str], vocab_ids: torch.Tensor, recipe: Mapping[str, Any] | None = None
) -> None:
    """Writes a refiner of a draft vocabulary, int64 `[V']`, and its `recipe` beside a drafter's weights."""
    config, weights = Path(folder) / CONFIG, Path(folder) / WEIGHTS
    config.parent.mkdir(exist_ok=True)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    write_complete(weights, lambda partial: save_file(state, partial, metadata={"format": "pt"}))
    document = {**vars(model.sizes), "vocabulary": _digest(vocab_ids), "weights_digest": sha256(weights)}
    text = json.dumps({**document, "recipe": dict(recipe or {})}, indent=2) + "\n"
    write_complete(config, lambda partial: partial.write_text(text, encoding="utf-8"))


def load_refiner(folder: Path, vocab_ids: torch.Tensor) -> PathLM:
    """Reads the refiner of a drafter with `vocab_ids`, int64 `[V']`, in its folder; errors as in `refiner_of`."""
    document = read_json(folder / CONFIG)
    try:
        sizes = PathLMSizes(**{each.name: document.get(each.name, 0) for each in fields(PathLMSizes)})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}; train the refiner again") from error
    if document.get("vocabulary") != _digest(vocab_ids):
        raise ValueError(
            f"the refiner in {folder} is for another draft vocabulary than this drafter's: train one for it by "
            "`hsdraft make refiner`"
        )
    with torch.device("meta"):
        model = PathLM(sizes)
    place, digest = (folder / WEIGHTS).parent, document.get("weights_digest")  # older files have none
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_weights(place, shapes, None if digest is None else {Path(WEIGHTS).name: digest}, "`hsdraft make refiner`")
    model.load_state_dict(tensors(place), assign=True)
    return model.requires_grad_(False).eval()


def _digest(vocab_ids: torch.Tensor) -> str:
    return hashlib.sha256(json.dumps(vocab_ids.tolist()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Refinement:
    """A `TokenBias` of one draft: the refinement behind the drafter's own, before whose states its own stand."""

    model: PathLM
    share: float  # weight of the model in the logits, in [0, 1)
    embed: Transform
    since: torch.Tensor  # `[B, 1, S]`, the model's states before the roots
    own: TokenBias | None = None  # the drafter's

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        size = self.since.shape[-1]
        before = self.since if states is None else states[..., :size].to(self.since.dtype)
        found = self.model.advance(self.embed(tokens), before)
        if self.own is None:
            return found
        of_drafter = self.own.advance(level, tokens, None if states is None else states[..., size:])
        return torch.cat([found, of_drafter], dim=-1)

    def among(self, columns: torch.Tensor | None) -> Any:
        own, up = None if self.own is None else self.own.among(columns), self.model.up
        if columns is None:
            return own, up
        rows, bias = up.weight[columns].mT, up.bias[columns][:, None]
        return None if self.own is not None and own is None else (own, lambda code: code @ rows + bias)

    def told(self, level: int, logits: torch.Tensor, states: torch.Tensor, last: Any) -> torch.Tensor:
        (own, up), size = last, self.since.shape[-1]
        if self.own is not None:
            logits = self.own.told(level, logits, states[..., size:], own)
        if level < _FIRST_LEVEL:
            return logits
        return (1.0 - self.share) * logits + self.share * up(self.model.code(states[..., :size]))

    def search(self, *args: Any) -> None:
        """The kernel's operators know no refinement."""


class Refiner(Session):
    """Refines the drafts of a call; remembers the last tokens of the texts."""

    def __init__(self, model: PathLM, share: float, weights: TargetWeights) -> None:
        self.model, self._share, self._weights = model, share, weights
        self._last: dict[int, list[int]] = {}

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            last = [*self._last.get(each.row, ()), *each.earlier, *each.tokens]
            self._last[each.row] = last[-self.model.sizes.length - 1 :]

    def keep(self, rows: Sequence[int]) -> None:
        self._last = {row: last for row, last in self._last.items() if row in rows}

    def refined(self, rows: Sequence[int], own: TokenBias | None = None) -> Refinement:
        """Returns the refinement of the next drafts of these rows, behind the drafter's own bias."""
        length, embed = self.model.sizes.length, self._weights.embed
        padded = [[*[-1] * length, *self._last.get(row, ())][:-1][-length:] for row in rows]  # without the root
        since = self.model.after(on_device(padded, self._weights.vocab_ids.device), embed)
        return Refinement(self.model, self._share, embed, since[:, None], own)

    def revised(self, rows: Sequence[int], expansion: Any) -> ParallelExpansion:
        return replace(expansion, bias=self.refined(rows, expansion.bias))


def why_not_refined(drafter: Any) -> str:
    """Returns why a drafter takes no refiner, as its `why_not_refined` says; empty if it takes one."""
    return getattr(drafter, "why_not_refined", "its depths are not drafted at once")


def _fits(drafter: Any, options: DraftOptions) -> None:
    share = options.own[NAME]
    if why := why_not_refined(drafter):
        raise ValueError(f"{NAME}={share!r} is invalid for this drafter: {why}; set it to 0")
    if not has_refiner(drafter):
        raise ValueError(
            f"{NAME}={share!r} is invalid: this drafter has no refiner beside its weights; train one by "
            f"`hsdraft make refiner` and load the drafter again, or set {NAME} to 0"
        )


def _begin(call: Call, drafting: Drafting) -> None:
    session: Any = drafting.session
    refiner = Refiner(refiner_of(session.drafter, session.weights), call.options.own[NAME], session.weights)
    session.revise = refiner.revised
    drafting.sessions.append(refiner)


def p_best_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Merges the most probable full-depth paths into a tree, best first, until it is full. See `TreeBuilder`.

    A path's probability is the product of its nodes' probabilities, refinements included. The paths come from a beam
    search that keeps `beam_width` paths per depth; they are the best overall if that many hold every path but the last
    token. A path that does not fit contributes its first nodes. `beam_trees` instead takes the best nodes, whether or
    not a path continues from them.
    """
    found, trees = FoundNodes.of(*searched(expansion, root_tokens, vocab_ids, limits)), []
    least = math.log(limits.threshold) if limits.threshold > 0 else -math.inf
    for row, depth in enumerate(limits.max_depths):
        parents, scores = [-1, *found.parents[row][1:]], found.scores[row]
        tree = from_nodes(list(zip(found.tokens[row], parents, found.depths, scores, strict=True)))
        deepest, kept = min(depth, found.depths[-1]), {0: 0}  # places of the nodes that are taken
        ends = [node for node, at in enumerate(found.depths) if at == deepest and scores[node] > -math.inf]
        for end in sorted(ends, key=lambda node: -scores[node]):
            for node in tree.path(end):
                if node not in kept and (len(kept) > limits.tree_size or scores[node] < least):
                    break
                kept.setdefault(node, len(kept))
        nodes = [(tree.tokens[n], kept.get(tree.parents[n], -1), tree.depths[n], tree.scores[n]) for n in kept]
        trees.append(from_nodes(nodes))
    return trees


_SHARE = Limit(lambda value: is_number(value) and 0.0 <= value < 1.0, f"a number from 0 (no {NAME}) to below 1")
METHOD_OPTIONS[NAME] = MethodOption(NAME, 0, _SHARE, "Share of the refiner in the logits.", fits=_fits, begin=_begin)
TREE_BUILDERS["p_best"] = Builder(p_best_trees, whole=True)
