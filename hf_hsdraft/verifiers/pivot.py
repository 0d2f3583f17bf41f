"""Pivot-aware acceptance: a trained classifier says which drafted tokens would change the outcome of a text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..common.checks import is_integer, is_number, printable
from ..common.options import Option
from .relaxed import Mismatch, Relaxed, normalised_entropy

FILE = "pivot_verifier.safetensors"
LEAST_PROBABILITY = 1e-4  # of a token by the target; a less probable one is never accepted
_FORMAT = "hsdraft-pivot-1"
_LARGEST = 64 * 2**20  # bytes of such a file; that of a target of width 8192 has two million
_STATES, _FIGURES, _INNER = 64, 8, 128  # widths of the paper


class PivotClassifier(nn.Module):
    """Tells pivots: drafted tokens after which a text comes to a worse end than after the target's own token.

    "Pivot-Aware Speculative Decoding" (arXiv:2511.00351). A hidden state of the target, which has read the drafted
    token, goes through a linear layer, and so do the entropy before it and its probability. Both together go through a
    layer with ReLU to two logits: no pivot, pivot.

    Args:
        width: size of the hidden state.
        tap: index of the hidden state, 0 for the embeddings.
        recipe: how the classifier was trained, as it is told.
    """

    def __init__(self, width: int, tap: int, recipe: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.width, self.tap, self.recipe = width, tap, recipe or {}
        self.states, self.figures = nn.Linear(width, _STATES), nn.Linear(2, _FIGURES)
        self.inner, self.outer = nn.Linear(_STATES + _FIGURES, _INNER), nn.Linear(_INNER, 2)

    def forward(self, states: torch.Tensor, figures: torch.Tensor) -> torch.Tensor:
        """Returns logits `[n, 2]` of no pivot and pivot.

        Args:
            states: `[n, width]`, hidden states at the drafted tokens.
            figures: `[n, 2]`, the target's normalised entropy before each token, and the token's probability.
        """
        joined = torch.cat([self.states(states.float()), self.figures(figures.float())], dim=-1)
        return self.outer(self.inner(joined).relu())

    def save(self, path: Path) -> None:
        """Writes weights and recipe into one file, which is complete when it appears."""
        partial = path.with_name(f".{path.name}.partial")
        head = {"format": _FORMAT, "tap": str(self.tap), "width": str(self.width), "recipe": json.dumps(self.recipe)}
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, partial, metadata=head)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> PivotClassifier:
        """Reads such a file.

        Raises:
            ValueError: it is damaged, or holds something else.
        """
        remedy = "expected a file that `hsdraft train-verifier` wrote"
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes: {remedy}")
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                if head.get("format") != _FORMAT:
                    raise ValueError(f"{path} has format {printable(head.get('format'))!r}: {remedy}")
                recipe = json.loads(head.get("recipe", "{}"))
                width, tap = int(head["width"]), int(head["tap"])
                if not (1 <= width <= 2**16 and 0 <= tap <= 2**12 and isinstance(recipe, dict)):
                    raise ValueError(f"{path} is for width {width} and hidden state {tap}: {remedy}")
                with torch.device("meta"):  # first values would be drawn, with numbers that the text's draws need
                    made = cls(width, tap, recipe)
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                made.load_state_dict(weights, assign=True)
        except (SafetensorError, KeyError, RuntimeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({printable(error)}): {remedy}") from error
        return made.eval().requires_grad_(False)


@functools.lru_cache(maxsize=4)
def _loaded(path: Path, changed: int) -> PivotClassifier:
    """The classifier of a file that was last changed at some time, read once."""
    return PivotClassifier.load(path)


class Pivot(Relaxed):
    """Lossy. The rule of "Pivot-Aware Speculative Decoding" (arXiv:2511.00351).

    A drafted token is accepted in place of the target's own if the classifier's probability that it is a pivot is below
    `pivot_threshold`, and the target's probability of the token is at least 0.0001. The classifier lies beside the
    drafter. `hsdraft train-verifier` trains it for a target and for tasks with a checker.

    `pivot_threshold=0` accepts nothing else: the rule is exact then.
    """

    file = FILE
    own_options = (
        Option(
            "pivot_threshold",
            0.5,
            lambda value: is_number(value) and 0 <= value <= 1,
            "a probability",
            "Lossy rule `pivot`: probability of a pivot from which on a drafted token is refused.",
        ),
    )
    pivot_threshold: float

    def __init__(self, classifier: PivotClassifier | None = None) -> None:
        self.classifier = classifier
        self.taps = () if classifier is None else (classifier.tap,)

    def learned(self, folder: Path | None) -> Pivot:
        path = None if folder is None else folder / FILE
        if path is None or not path.is_file():
            raise ValueError(
                f"verification='pivot' needs a trained classifier, {FILE} beside the drafter's weights, and there is "
                "none: train one by `hsdraft train-verifier`, then load the drafter again; or choose another rule"
            )
        made = Pivot(_loaded(path, path.stat().st_mtime_ns))
        vars(made).update({option.name: getattr(self, option.name) for option in self.own_options})
        return made

    def check(self, width: int, layers: int) -> None:
        found = self.classifier
        if found is not None and (found.width != width or found.tap > layers):
            raise ValueError(
                f"{FILE} was trained for hidden state {found.tap} of width {found.width}: the target has hidden states "
                f"0 to {layers} of width {width}; train a classifier for this target by `hsdraft train-verifier`"
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


def tap_of(layers: int) -> int:
    """Returns the hidden state that a new classifier reads: the eighth from the end, as in the paper.

    Args:
        layers: number of the target's layers; it has one hidden state more.
    """
    if not is_integer(layers) or layers < 1:
        raise ValueError(f"layers={layers!r} is invalid: expected an integer of 1 or more")
    return max(layers + 1 - 8, 1)
