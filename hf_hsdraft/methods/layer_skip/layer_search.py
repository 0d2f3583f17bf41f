"""Searches which layers of a target to skip when it drafts for itself; nothing is trained.

Each list of layers is judged on texts that the target wrote, by its agreement a (share of tokens that the remaining
layers would choose too, given the text) and its cost c in forwards of the target. Chains of K drafted tokens emit
(1 - a^(K+1)) / (1 - a) tokens on average and take 1 + K c forwards; the best K counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...drafters.language_model.layer_subset import layers_of, with_layers
from ...training.loop.progress import Reporter
from .layer_skip import LayerSkipDrafter

_MOST_DRAFTED = 8  # longest chain considered


@dataclass(frozen=True)
class Judged:
    """The judgement of a list of skipped layers."""

    skipped: tuple[int, ...]
    agreement: float  # share of the target's tokens that the remaining layers choose too
    cost: float  # of a draft's forward, in forwards of the target, by weights read
    speed: float  # tokens of the best chain per time of a forward of the target; plain decoding has 1
    depth: int  # length of that chain

    def __str__(self) -> str:
        return (
            f"without {list(self.skipped)}: agreement {self.agreement:.3f}, cost {self.cost:.3f} forwards, "
            f"{self.speed:.3f} x plain with chains of {self.depth}"
        )


def speed_of_chains(agreement: float, cost: float, depth: int) -> float:
    """Returns tokens per time of a target's forward with chains of `depth` tokens; `cost` is that of drafting one."""
    return sum(agreement**number for number in range(depth + 1)) / (1.0 + depth * cost)


def check_target(target: Any) -> None:
    """Raises a ValueError for a target that cannot draft with layers skipped. Runs a few short forwards."""
    count = len(layers_of(target)[1])
    if count < 3:
        raise ValueError(f"the target has {count} layers: expected 3 or more, as its first and last ones stay")
    LayerSkipDrafter.for_target(target, [1]).check(target)


@torch.no_grad()
def written_texts(
    target: Any,
    prompts: Sequence[dict[str, torch.Tensor]],
    max_new_tokens: int,
    report: Callable[[str], None] = print,
) -> list[tuple[torch.Tensor, int]]:
    """Returns greedy texts `[1, length]` of the target, each with the length of its prompt."""
    texts = []
    with Reporter.of(report).stage("writing texts", "texts", len(prompts)) as stage:
        for done, inputs in enumerate(prompts, 1):
            text = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            texts.append((text, inputs["input_ids"].shape[1]))
            stage.advance(done)
    return texts


@torch.no_grad()
def judged(target: Any, skipped: Sequence[int], texts: Sequence[tuple[torch.Tensor, int]]) -> Judged:
    """Judges a list of layers to skip, on texts of `written_texts`. The target is not changed."""
    layers = layers_of(target)[1]
    kept = [number for number in range(len(layers)) if number not in skipped]
    part, right, total = with_layers(target, kept).eval(), 0, 0
    keeps_few = "logits_to_keep" in inspect.signature(part.forward).parameters
    for text, start in texts:
        count = text.shape[1] - start
        if not count:
            continue
        few = {"logits_to_keep": count} if keeps_few else {}  # logits of the prompt are not needed
        logits = part(input_ids=text[:, :-1], use_cache=False, **few).logits[0, -count:]
        right += int((logits.argmax(dim=-1) == text[0, start:].to(logits.device)).sum())
        total += count
    agreement = right / max(total, 1)
    head = target.get_output_embeddings().weight.numel()
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    cost = (sum(sizes[number] for number in kept) + head) / (sum(sizes) + head)
    best = max(range(1, _MOST_DRAFTED + 1), key=lambda depth: speed_of_chains(agreement, cost, depth))
    return Judged(tuple(sorted(skipped)), agreement, cost, speed_of_chains(agreement, cost, best), best)


def search(
    target: Any,
    texts: Sequence[tuple[torch.Tensor, int]],
    most: int | None = None,
    report: Callable[[str], None] = print,
) -> Judged:
    """Greedily skips one layer at a time, each time the one that leaves the fastest drafts; returns the best list.

    The search continues where drafts become slower, since further layers may pay together. The first and last layers
    stay. `most` limits the number of skipped layers; default: all but two. A ValueError as `check_target`, or without
    a text.
    """
    check_target(target)
    count = len(layers_of(target)[1])
    if not any(text.shape[1] > start for text, start in texts):
        raise ValueError("the target wrote nothing: expected prompts that it answers")
    most = count - 2 if most is None else min(most, count - 2)
    if most < 1:
        raise ValueError(f"most={most} is invalid: expected 1 or more layers to leave out")
    rounds: list[Judged] = []  # the best list of each length
    report, done = Reporter.of(report), 0
    with report.stage("judging lists of layers", "lists", sum(range(count - 1 - most, count - 1))) as stage:
        for _ in range(most):
            now, judgements = rounds[-1].skipped if rounds else (), []
            for number in (number for number in range(1, count - 1) if number not in now):
                judgements.append(judged(target, [*now, number], texts))
                stage.advance(done := done + 1)
            rounds.append(max(judgements, key=lambda each: each.speed))
            report(str(rounds[-1]))
    return max(rounds, key=lambda each: each.speed)


def as_drafter(target: Any, found: Judged, target_name: str = "") -> LayerSkipDrafter:
    """Returns the drafter of a list of layers. It drafts chains of the length judged best, without n-grams."""
    drafter = LayerSkipDrafter.for_target(target, found.skipped, target_name)
    options = drafter.generation_config
    options.num_assistant_tokens = options.tree_size = found.depth
    options.beam_width, options.ngram_length = 1, 0  # n-grams would take nodes from the chain
    return drafter
