"""Trains the classifier of pivot-aware verification: which drafted tokens change whether an answer is right.

"Pivot-Aware Speculative Decoding" (arXiv:2511.00351). Questions are answered by exact drafting. At each mismatch the
answer could have continued with the drafted token instead of the target's. Both continuations are sampled many times.
The drafted token is a pivot if the answers after it are right clearly less often.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.checks import public_name
from ...core.draft_tree import DraftTree
from ...drafters.base.pretrained_drafter import PretrainedDrafter
from ...drafters.base.protocol import WrappedDrafter
from ...hub.model_card import write_card
from ...runtime.prompt_inputs import encode_prompt, end_tokens
from ...runtime.target_limits import text_config
from ...training.files import check_place
from ...verify.verdict import Nodes, Verdict
from .checked_tasks import Item
from .pivot import FILE, PivotClassifier, tap_of
from .relaxed import Mismatch, Relaxed, normalised_entropy, path_tokens

WORSE = 0.9  # a pivot's answers are right less often than this share of the others
_HELD_OUT, _STEPS, _LEARNING_RATE, _DECAY = 0.2, 300, 1e-3, 1e-2


@dataclass(frozen=True)
class Plan:
    """How a classifier is trained."""

    places: int = 2  # mismatches per question, at most
    roll_outs: int = 20  # answers after each token
    temperature: float = 0.7  # of these answers
    max_new_tokens: int = 64  # of these answers
    seed: int = 0  # of all random choices

    def folder_for(self, drafter: Any, out: Path | None) -> Path:
        """Returns the folder to save the classifier in, before any work; an OSError if it cannot be written.

        A ValueError if the drafter cannot keep a classifier, or has no local folder and `out` is None.
        """
        if not isinstance(drafter, PretrainedDrafter):
            raise ValueError(
                f"a {type(drafter).__name__} keeps no classifier beside its files: expected one of this package's "
                "own format: a hidden-state, SpecFormer or self-speculation drafter"
            )
        folder = out or drafter.loaded_from
        if folder is None or (out is None and folder.parent.name == "snapshots"):
            raise ValueError("the drafter is from the Hub: name a folder to save it in with its classifier, by --out")
        check_place(folder / FILE)
        return folder


@dataclass(frozen=True)
class Place:
    """A mismatch in an answer."""

    item: Item
    prompt: torch.Tensor  # `[1, length]`, token ids of the question
    before: tuple[int, ...]  # tokens of the answer before the mismatch
    own: int  # the target's token
    drafted: int  # the drafter's token
    state: torch.Tensor  # `[D]`, float32, hidden state of the target after reading the drafted token
    figures: tuple[float, float]  # normalised entropy before the token, and the token's probability


class _Noting(Relaxed):
    """Accepts only the target's choices; records each mismatch with the tokens of the answer before it."""

    exact = True

    def __init__(self, tap: int) -> None:
        self.taps = (tap,)
        self.noted: list[tuple[tuple[int, ...], Mismatch]] = []
        self._answer: list[int] = []

    def accepts(self, mismatch: Mismatch) -> bool:
        self.noted.append(((*self._answer, *path_tokens(mismatch.tree, mismatch.node)), mismatch))
        return False

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        verdict = super().judge(tree, nodes)
        self._answer += [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        return verdict


def collect(target: Any, tokenizer: Any, drafter: Any, item: Item, plan: Plan) -> list[Place]:
    """Answers a question greedily; returns a sample of its mismatches."""
    rule = _Noting(tap_of(text_config(target).num_hidden_layers))
    inputs = encode_prompt(tokenizer, item.prompt, target.device)
    noting = WrappedDrafter(drafter, rule)
    noting.generation_config.verification = "walk"
    target.generate(**inputs, do_sample=False, max_new_tokens=plan.max_new_tokens, assistant_model=noting)
    rng = random.Random(f"{plan.seed} {item.prompt}")
    chosen = rng.sample(rule.noted, min(plan.places, len(rule.noted)))
    found = []
    for before, mismatch in chosen:
        assert mismatch.taps is not None
        own, drafted = mismatch.own(mismatch.node), mismatch.tree.tokens[mismatch.best]
        figures = normalised_entropy(mismatch.probabilities), mismatch.probability
        state = mismatch.taps[mismatch.best].float().cpu()
        found.append(Place(item, inputs["input_ids"], before, own, drafted, state, figures))
    return found


def label(target: Any, tokenizer: Any, place: Place, plan: Plan) -> int:
    """Returns 1 for a pivot, else 0: answers sampled after the drafted token are right less often."""
    torch.manual_seed(plan.seed + len(place.before))
    own, drafted = (utility(target, tokenizer, place, token, plan) for token in (place.own, place.drafted))
    return int(drafted < WORSE * own)


def utility(target: Any, tokenizer: Any, place: Place, token: int, plan: Plan) -> float:
    """Returns the share of right answers among those sampled after a token at a place."""
    start = [*place.before, token]
    room = plan.max_new_tokens - len(start)
    rows = [start] * plan.roll_outs
    if token not in end_tokens(target) and room > 0:
        ids = torch.cat([place.prompt, place.prompt.new_tensor([start])], dim=1).repeat(plan.roll_outs, 1)
        drawn = {"do_sample": True, "temperature": plan.temperature, "top_k": 0, "top_p": 1.0}
        texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, **drawn)
        rows = texts[:, place.prompt.shape[1] :].tolist()
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    return sum(place.item.is_right(text) for text in texts) / len(texts)


def held_out(questions: Sequence[str], kinds: torch.Tensor) -> torch.Tensor:
    """Returns which mismatches are held out, bool `[n]`: all of some questions, about a fifth of each kind.

    Mismatches of a question are alike, so they stay together. `kinds`, `[n]`, is 1 for a pivot, else 0. Raises a
    ValueError if a kind is of too few questions to be on both sides.
    """
    names = list(dict.fromkeys(questions))
    of = torch.tensor([names.index(question) for question in questions])
    held = torch.zeros(len(kinds), dtype=torch.bool)
    for kind in (1, 0):
        wanted = max(int(_HELD_OUT * (kinds == kind).sum()), 1)
        for question in torch.randperm(len(names)).tolist():
            more = held | (of == question)
            helps = more[kinds == kind].sum() > held[kinds == kind].sum()
            if held[kinds == kind].sum() < wanted and helps and all((~more[kinds == each]).any() for each in (0, 1)):
                held = more
        if not held[kinds == kind].any():
            raise ValueError(
                f"the {len(kinds)} mismatches are of {len(names)} questions: expected at least two questions with "
                "pivots and two with others, so that some can be held out; give more questions"
            )
    return held


def fit(places: Sequence[Place], labels: Sequence[int], plan: Plan) -> tuple[PivotClassifier, dict[str, float]]:
    """Trains a classifier; returns it with figures on held-out questions. A ValueError if a kind has too few."""
    targets = torch.tensor(list(labels))
    pivots = int(targets.sum())
    if pivots < 2 or len(targets) - pivots < 2:
        raise ValueError(
            f"{pivots} of {len(targets)} mismatches are pivots: expected at least two of each kind; give more "
            "questions, or tasks that the target answers right more often"
        )
    torch.manual_seed(plan.seed)
    states, figures = torch.stack([place.state for place in places]), torch.tensor([p.figures for p in places])
    held = held_out([place.item.prompt for place in places], targets)
    classifier = PivotClassifier(states.shape[1], 0)
    classifier.train()
    rare = torch.tensor([1.0, float((~held & (targets == 0)).sum() / (~held & (targets == 1)).sum())])
    optimizer = torch.optim.AdamW(classifier.parameters(), _LEARNING_RATE, weight_decay=_DECAY)
    for _ in range(_STEPS):
        logits = classifier(states[~held], figures[~held])
        loss = torch.nn.functional.cross_entropy(logits, targets[~held], rare)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    classifier.eval().requires_grad_(False)
    found = classifier(states[held], figures[held]).argmax(dim=-1)
    told = {kind: round(float((found == value)[targets[held] == value].float().mean()), 3)
            for kind, value in (("pivots found", 1), ("others passed", 0))}  # fmt: skip
    classifier.questions = tuple(dict.fromkeys(place.item.digest for place in places))
    classifier.recipe = {
        "tasks": ", ".join(dict.fromkeys(place.item.task for place in places)),
        "mismatches": len(targets),
        "pivots among them": pivots,
        "roll-outs of each token": f"{plan.roll_outs}, at temperature {plan.temperature}",
        "held out": f"{int(held.sum())} mismatches, from other questions: "
        + ", ".join(f"{kind} {share}" for kind, share in told.items()),
    }
    return classifier, told


def save_beside(drafter: Any, classifier: PivotClassifier, folder: Path, target: Any) -> None:
    """Writes a classifier, of `target`, and the card into a drafter's folder; saves the drafter there if needed."""
    classifier.layers = text_config(target).num_hidden_layers
    classifier.tap = tap_of(classifier.layers)
    classifier.recipe = {"target": public_name(getattr(target, "name_or_path", "")), **classifier.recipe}
    if drafter.loaded_from is None or folder.resolve() != drafter.loaded_from.resolve():
        drafter.save_pretrained(folder)
    classifier.save(folder / FILE)
    write_card(folder, folder.resolve().name)
