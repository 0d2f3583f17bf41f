"""A tiny neural n-gram model of a target's text, which refines drafts of independent depths.

It reads the last few tokens through the embedding borrowed from the target, and predicts the next one within the draft
vocabulary by low-rank logits. By default a node costs products of D by 96, 288 by 384, 192 by 64, and 64 by the
columns that are looked at.

It is saved in a subfolder of the drafter's, so that programs that read all weights of that folder ignore it. Sizes and
tensors are separate files, and the former hold the SHA-256 of the latter.

Letters in the shapes: D width of the target's embedding, r rank, V' draft vocabulary, S size of a state.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ...core.checks import is_integer
from ...core.tensors import RMSNorm
from ...drafters.base.target_weights import TargetWeights
from ...hub.drafter_files import check_weights, read_json, sha256, tensors

_EPS = 1e-6
CONFIG, WEIGHTS = "refiner/config.json", "refiner/model.safetensors"  # as in index.json
_of_drafters: weakref.WeakKeyDictionary[Any, tuple[Path, PathLM]] = weakref.WeakKeyDictionary()


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
        for name, value in vars(self).items():
            if not is_integer(value) or not 1 <= value <= 2**22:
                raise ValueError(f"{name}={value!r} is invalid in a refiner's sizes: expected an integer of 1 or more")

    @property
    def state_size(self) -> int:
        return self.length * self.width


class PathLM(nn.Module):
    """A neural n-gram model over the draft vocabulary.

    A *state* holds what is kept of the last tokens, newest first. Tokens before the beginning of a text are zeros.
    """

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

    def after(self, embeds: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Returns the states `[..., S]` after the last tokens of texts, as embeddings `[..., length, D]`, newest last.

        `known`, bool `[..., length]`, is False before the beginning of a text.
        """
        tokens = self.read(self.norm(embeds)) * known[..., None]
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
    folder, model = _of_drafters.get(drafter, (None, None))
    return model if folder == drafter.loaded_from else None


def refiner_of(drafter: Any, weights: TargetWeights) -> PathLM:
    """Returns the refiner beside a drafter's weights, on the drafter's device and in its dtype; read once per folder.

    An OSError if a file is missing, a ValueError if one is damaged, or for another width or draft vocabulary.
    """
    model = _known(drafter)
    if model is None:
        model = load_refiner(drafter.loaded_from, weights.vocab_ids)
        _of_drafters[drafter] = drafter.loaded_from, model
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
    """Writes a refiner beside a drafter's weights, replacing any earlier one.

    `vocab_ids`, int64 `[V']`, is the draft vocabulary; `recipe` says how the refiner was trained and measured.
    """
    place = Path(folder)
    (place / CONFIG).parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=place) as partial:
        config, weights = Path(partial) / "config.json", Path(partial) / "model.safetensors"
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
        save_file(state, weights, metadata={"format": "pt"})
        document = {
            **vars(model.sizes),
            "vocabulary": _digest(vocab_ids),
            "weights_digest": sha256(weights),
            "recipe": dict(recipe or {}),
        }
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(weights, place / WEIGHTS)
        os.replace(config, place / CONFIG)


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
