"""Checks whether training sees what decoding sees, at every depth and on the same text.

A shift by one raises no exception: training accuracy is nearly perfect, and hardly any draft is accepted. So logits of
the training forward are compared with those of a real `generate()` call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.draft_tree import Expansion
from ...cpu.products import in_full_precision
from ...drafters.base.protocol import WrappedDrafter
from ...engine.loop import Observer, Round
from ..data.conversations import TokenizedConversation
from ..data.features import read_features
from ..families.trainable import family_of
from ..loss.chains import ChainLabels, Chains, Pack, true_labels, unroll

LabelsOf = Callable[[Pack, Chains, int], ChainLabels]

TOLERANCE = {torch.float32: 0.005, torch.bfloat16: 0.1, torch.float16: 0.05}


PROMPTS = (
    "A farmer has 12 cows and buys 7 more. How many cows does the farmer have now? Explain each step.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a lake and a river?",
)


class ParityError(RuntimeError):
    """Training and decoding do not compute the same."""


@dataclass(frozen=True)
class DepthParity:
    """Parity at one depth, over all rounds of some calls."""

    depth: int  # 1 .. K.
    predictions: int  # number of predictions compared
    drafter: float  # mean total variation between the drafter's distributions in training and in decoding, 0 to 1
    target: float  # the same for the target's distributions
    accuracy: float  # how often the drafter's first choice by training's logits is the next token of the text
    agreement: float  # the same by decoding's logits: the acceptance of a chain that reaches this depth


@dataclass(frozen=True)
class ParityReport:
    """Parity at all depths; `tolerance` is the greatest mean total variation allowed."""

    depths: list[DepthParity]
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether anything was compared and no depth is above the tolerance."""
        return bool(self.depths) and all(max(d.drafter, d.target) <= self.tolerance for d in self.depths)

    def lines(self) -> list[str]:
        """Returns the lines of a table to print."""
        rows = [
            f"{d.depth:5}  {d.predictions:11}  {d.drafter:10.4f}  {d.target:9.4f}  {d.accuracy:17.3f}  "
            f"{d.agreement:17.3f}"
            for d in self.depths
        ]
        return [
            "depth  predictions  drafter TV  target TV  right in training  right in decoding",
            *rows,
            f"TV: mean total variation between the distributions of training and decoding; allowed: {self.tolerance}. "
            "right: the drafter's first choice is the token the target went on with, true previous tokens injected.",
        ]

    def explain(self) -> str:
        """Says what is wrong at which depths; empty if nothing is wrong."""
        if not self.depths:
            return "nothing was drafted: the texts are too short to compare anything"
        wrong = [depth for depth in self.depths if max(depth.drafter, depth.target) > self.tolerance]
        if not wrong:
            return ""
        sides = [name for name in ("drafter", "target") if any(getattr(d, name) > self.tolerance for d in wrong)]
        return (
            f"training and decoding disagree at depth {', '.join(str(depth.depth) for depth in wrong)} about the "
            f"distribution of the {' and of the '.join(sides)} (total variation above {self.tolerance}): what is "
            "trained is not what decoding uses; look for labels, positions or parents that are off by one"
        )


def parity(
    drafter: Any,
    target: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 64,
    tolerance: float = 0.0,
    labels_of: LabelsOf = true_labels,
    max_time: float | None = None,
) -> ParityReport:
    """Decodes prompts greedily, computes the same drafts as training does, and compares both.

    Args:
        drafter: a drafter of a family that can be trained.
        prompts: token ids `[1, length]` of each prompt.
        max_new_tokens: greatest number of tokens decoded after each prompt.
        tolerance: greatest mean total variation allowed at each depth; 0 for the default of the target's dtype.
        labels_of: labels the chains of a pack.
        max_time: greatest number of seconds for decoding all prompts; `None` for no limit.
    """
    steps = drafter.num_draft_steps
    rows: list[list[tuple[float, float, bool, bool]]] = [[] for _ in range(steps)]
    begin = time.monotonic()
    for prompt in prompts:
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if max_time is not None:
            limits["max_time"] = max(max_time - (time.monotonic() - begin), 0.0)
        for depth, comparison in _compare_text(drafter, target, prompt, limits, labels_of):
            rows[depth].append(comparison)
    depths = []
    for depth, found in enumerate(rows, 1):
        if found:
            drafter_tv, target_tv, accuracy, agreement = (sum(part) / len(found) for part in zip(*found, strict=True))
            depths.append(DepthParity(depth, len(found), drafter_tv, target_tv, accuracy, agreement))
    return ParityReport(depths, tolerance or TOLERANCE[target.dtype])


@torch.no_grad()
def _compare_text(
    drafter: Any, target: Any, prompt: torch.Tensor, limits: dict[str, Any], labels_of: LabelsOf
) -> Iterator[tuple[int, tuple[float, float, bool, bool]]]:
    """Yields for each prediction of a text the index of its depth, and the comparison.

    That is the total variations of drafter and target, and whether the first choice is right in training and in
    decoding.
    """
    observed, length = _ObservedDrafter(drafter, prompt.shape[1]), prompt.shape[1]
    with in_full_precision():  # as training computes
        output = target.generate(
            prompt.to(target.device),
            attention_mask=torch.ones_like(prompt).to(target.device),
            assistant_model=observed,
            do_sample=False,
            **limits,
            streamer=observed.recorder,
            output_logits=True,
            return_dict_in_generate=True,
            synced_gpus=False,  # all processes of a sharded target decode the same texts, so none has to wait
        )
    text, drafts = output.sequences[0], observed.drafts
    starts = sorted(start for start in drafts if start + 2 < len(text))
    if not starts:
        return
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    pack, chains = _as_trained(drafter, target, text, starts)
    labels = labels_of(pack, chains, drafter.num_draft_steps)
    predictions = family_of(drafter).predictions(drafter, weights)
    hidden_states = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
    states = predictions.states(labels.tokens, hidden_states)
    head = target.get_output_embeddings().weight
    ids = weights.vocab_ids
    for depth, hidden in enumerate(hidden_states):
        trained = predictions.logits(hidden, states[depth]).float()
        teacher = (labels.teacher[labels.rows[:, depth]].to(head.dtype) @ head[ids.to(head.device)].T).float()
        for row, start in enumerate(starts):
            goal = start + 2 + depth
            if goal >= len(text) or depth >= drafts[start].depth:
                continue
            decoded = _replayed(drafts[start], text[start + 1 : goal].tolist(), drafter.device)
            said = trained[row].log_softmax(-1)
            if bool(decoded.isnan().all()) and bool(said.isnan().all()):
                continue  # frames without room for a further token
            seen = output.logits[goal - length][0]  # the target's, as it decoded
            seen = seen[ids.to(seen.device)].float()
            truth = int(text[goal])
            yield (
                depth,
                (
                    _total_variation(said, decoded),
                    _total_variation(teacher[row].log_softmax(-1), seen.log_softmax(-1)),
                    int(ids[trained[row].argmax()]) == truth,
                    int(ids[decoded.argmax()]) == truth,
                ),
            )


def _as_trained(drafter: Any, target: Any, text: torch.Tensor, starts: Sequence[int]) -> tuple[Pack, Chains]:
    """Returns the text as a training step would read it, as the second document of a pack, and its chains."""
    chat = TokenizedConversation(text.cpu(), torch.ones(len(text), dtype=torch.bool))
    short = TokenizedConversation(chat.input_ids[:3], chat.answer_mask[:3])
    taps = family_of(drafter).taps(drafter, target)
    read = read_features(target, taps, [short, chat], drafter.device, drafter.dtype)
    pack = Pack.of(read, pad_to_multiple_of=8).to(drafter.device, drafter.dtype)
    places = torch.tensor(starts, device=drafter.device) + len(short.input_ids)
    return pack, Chains(places, len(starts), torch.ones(len(starts), dtype=torch.bool, device=drafter.device))


def _total_variation(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.exp().cpu() - right.exp().cpu()).abs().sum()) / 2


def _replayed(expansion: Expansion, tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the log-probabilities `[V']` that a draft of decoding gives after tokens that begin with the root."""
    states = None
    for level, token in enumerate(tokens, 1):
        log_probs, states = expansion(level, torch.tensor([[token]], device=device), states)
    return log_probs[0, 0].log_softmax(-1)  # frames may leave probability to no token


class ExpansionRecorder(Observer):
    """Records what trees grow from, in a call with one text. It is passed as the streamer.

    `length` is the number of tokens of the prompt. `drafts` holds expansions, by the position i of the last pair (h_i,
    x_{i+1}) that they know.
    """

    def __init__(self, length: int) -> None:
        self.drafts: dict[int, Expansion] = {}
        self._start = length - 1

    def on_expansion(self, rows: Sequence[int], expansion: Expansion) -> None:
        self.drafts[self._start] = expansion

    def ended(self, done: Round) -> None:
        self._start = int(done.news[-1].positions[-1])

    def put(self, tokens: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


class _ObservedDrafter(WrappedDrafter):
    """A drafter for one call, whose `recorder` is passed as the streamer; its drafts depend on no earlier rounds."""

    def __init__(self, drafter: Any, length: int) -> None:
        super().__init__(drafter)
        for name, value in {"reuse": "none", "refinement": 0.0}.items():
            if hasattr(self.generation_config, name):
                setattr(self.generation_config, name, value)
        self.recorder = ExpansionRecorder(length)
        self.drafts = self.recorder.drafts
