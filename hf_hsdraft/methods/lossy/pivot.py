"""Pivot-aware acceptance: a trained classifier predicts which drafted tokens would change the outcome of a text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import logging

from ...core.checks import printable
from ...hub.model_card import table
from ...training.files import write_complete
from ...verify.registry import VERIFIERS
from ...verify.verdict import Verifier
from .relaxed import SHARE, Mismatch, Relaxed, normalised_entropy, option

logger = logging.get_logger(__name__)

FILE = "pivot_verifier.safetensors"
LEAST_PROBABILITY = 1e-4  # of a token by the target; a less probable one is never accepted
_FORMAT = "hsdraft-pivot-1"
_LARGEST = 64 * 2**20  # bytes of a file; one for a target of width 8192 has two million
_STATES, _FIGURES, _INNER = 64, 8, 128  # widths of the paper
_REMEDY = "expected a file that `hsdraft make verifier` wrote"


class PivotClassifier(nn.Module):
    """Detects pivots: drafted tokens after which a text ends worse than after the target's choice.

    "Pivot-Aware Speculative Decoding" (arXiv:2511.00351). A hidden state of the target after reading the drafted
    token goes through a linear layer, as do the entropy before it and its probability. Both together go through a
    ReLU layer to two logits: no pivot, pivot.

    `width` is the size of the hidden state, `tap` its index, 0 for the embeddings; `recipe` tells cards how the
    classifier was trained; `layers` is the number of the target's layers, 0 if unknown. `questions` holds digests of
    the training questions, which must not be used to measure it.
    """

    questions: tuple[str, ...] = ()

    def __init__(self, width: int, tap: int, recipe: dict[str, Any] | None = None, layers: int = 0) -> None:
        super().__init__()
        self.width, self.tap, self.recipe, self.layers = width, tap, recipe or {}, layers
        self.states, self.figures = nn.Linear(width, _STATES), nn.Linear(2, _FIGURES)
        self.inner, self.outer = nn.Linear(_STATES + _FIGURES, _INNER), nn.Linear(_INNER, 2)

    def forward(self, states: torch.Tensor, figures: torch.Tensor) -> torch.Tensor:
        """Returns logits `[n, 2]` of no pivot and pivot, from hidden states `[n, width]` at the drafted tokens.

        `figures` `[n, 2]` are the target's normalised entropy before each token, and the token's probability.
        """
        joined = torch.cat([self.states(states.float()), self.figures(figures.float())], dim=-1)
        return self.outer(self.inner(joined).relu())

    def save(self, path: Path) -> None:
        """Writes weights and recipe into one file, atomically."""
        numbers = {name: str(getattr(self, name)) for name in ("width", "tap", "layers")}
        lists = {"recipe": json.dumps(self.recipe), "questions": json.dumps(self.questions)}
        head = {"format": _FORMAT, **numbers, **lists}
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        write_complete(path, lambda partial: save_file(weights, partial, metadata=head))

    @classmethod
    def load(cls, path: Path) -> PivotClassifier:
        """Reads such a file. Raises a ValueError if it is damaged, or holds something else."""
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes: {_REMEDY}")
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls._of(head, weights)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged ({printable(error)}): {_REMEDY}") from error

    @classmethod
    def _of(cls, head: dict[str, str], weights: dict[str, torch.Tensor]) -> PivotClassifier:
        """Returns the classifier of a file. Raises a ValueError, KeyError or RuntimeError for anything else."""
        if head.get("format") != _FORMAT:
            raise ValueError(f"format {head.get('format')!r}")
        width, tap, layers = int(head["width"]), int(head["tap"]), int(head.get("layers", 0))  # older files have none
        recipe, questions = json.loads(head.get("recipe", "{}")), json.loads(head.get("questions", "[]"))
        if not (1 <= width <= 2**16 and 0 <= tap <= 2**12 and 0 <= layers <= 2**12 and isinstance(recipe, dict)):
            raise ValueError(f"width {width}, hidden state {tap}, {layers} layers")
        if not (isinstance(questions, list) and all(isinstance(each, str) for each in questions)):
            raise ValueError("questions that are no list of texts")
        with torch.device("meta"):  # initialisation would consume random numbers of the text's draws
            made = cls(width, tap, recipe, layers)
        for name, weight in weights.items():
            if weight.dtype != torch.float32:
                raise ValueError(f"{name} is {weight.dtype}, not torch.float32")
        made.load_state_dict(weights, assign=True)
        made.questions = tuple(questions)
        return made.eval().requires_grad_(False)


@functools.lru_cache(maxsize=4)
def _loaded(path: Path, changed: int) -> PivotClassifier:
    """Reads a file once per modification time."""
    return PivotClassifier.load(path)


class Pivot(Relaxed):
    """Lossy. The rule of "Pivot-Aware Speculative Decoding" (arXiv:2511.00351).

    A drafted token is accepted in place of the target's choice if the classifier's probability that it is a pivot
    is below `pivot_threshold`, and the target's probability of the token is at least 0.0001. The classifier is
    stored beside the drafter. `hsdraft make verifier` trains it for a target and for tasks with a checker.

    With `pivot_threshold=0` the rule is exact.
    """

    file = FILE
    own_options = (
        option("pivot_threshold", 0.5, SHARE, "probability of a pivot from which on a drafted token is refused."),
    )
    pivot_threshold: float

    def __init__(self, classifier: PivotClassifier | None = None) -> None:
        self.classifier = classifier
        self.taps = () if classifier is None else (classifier.tap,)

    @property
    def questions(self) -> tuple[str, ...]:
        return () if self.classifier is None else self.classifier.questions

    def learned(self, folder: Path | None) -> Verifier:
        path = None if folder is None else folder / FILE
        if path is None or not path.is_file():
            raise ValueError(
                f"verification='pivot' needs a trained classifier, {FILE} beside the drafter's weights, and there is "
                "none: train one by `hsdraft make verifier`, for a hidden-state, SpecFormer or self-speculation "
                "drafter in this package's own format, then load the drafter again; or choose another rule"
            )
        return Pivot(_loaded(path, path.stat().st_mtime_ns)).with_options(vars(self))

    def described(self, folder: Path) -> list[str]:
        try:
            recipe = PivotClassifier.load(folder / FILE).recipe
        except ValueError:
            recipe = {}
        text = (
            f"`{FILE}` is a classifier for `verification='pivot'`, which accepts drafted tokens that are not the "
            "model's own where the classifier holds that they do not matter. It was trained for the tasks below, with "
            "their checkers, and is to be trusted for these only. It is never used unless that option is set."
        )
        return [text, table(["", ""], recipe.items())] if recipe else [text]

    def check(self, width: int, layers: int, name: str = "") -> None:
        found = self.classifier
        if found is None:
            return
        if found.width != width or found.tap > layers or found.layers not in (0, layers):
            of = f" of a target of {found.layers} layers" if found.layers else ""
            raise ValueError(
                f"{FILE} was trained for hidden state {found.tap}{of} of width {found.width}: the target has hidden "
                f"states 0 to {layers} of width {width}; train a classifier for this target by `hsdraft make verifier`"
            )
        trained_for = found.recipe.get("target")
        if isinstance(trained_for, str) and _differ(trained_for, name):
            logger.warning_once(
                f"{FILE} was trained for {printable(trained_for)}, and the target is {printable(name)}: of another "
                "target it knows nothing. If they differ, train a classifier for this one by `hsdraft make verifier`"
            )

    def accepts(self, mismatch: Mismatch) -> bool:
        probability = mismatch.probability
        if probability < LEAST_PROBABILITY or self.pivot_threshold == 0:
            return False
        assert self.classifier is not None and mismatch.taps is not None
        state = mismatch.taps[mismatch.best][None].cpu()
        figures = torch.tensor([[normalised_entropy(mismatch.probabilities), probability]])
        with torch.inference_mode():
            pivot = self.classifier(state, figures).softmax(dim=-1)[0, 1]
        return float(pivot) < self.pivot_threshold


def _differ(one: str, other: str) -> bool:
    """Whether two names are of different targets. A local copy is identified by the last part of its name only."""
    if "/" in one and "/" in other:
        return one != other
    return bool(one and other) and one.rpartition("/")[2] != other.rpartition("/")[2]


def tap_of(layers: int) -> int:
    """Returns the hidden state that a new classifier reads: the eighth from the end, as in the paper."""
    return max(layers + 1 - 8, 1)


VERIFIERS["pivot"] = Pivot()
