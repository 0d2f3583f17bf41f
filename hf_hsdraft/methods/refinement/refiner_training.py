"""Training of a refiner, a tiny model of the target's answers; see `PathLM`.

It learns the next token of answers by cross-entropy. Tokens outside the draft vocabulary are skipped, as no draft can
hold them. The target does not run; only its embedding is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from ...core.tensors import Transform
from ...drafters.base.target_weights import TargetWeights
from ...training.data.conversations import TokenizedConversation
from .refinement import PathLM, PathLMSizes

_BATCH, _RATE, _DECAY = 256, 3e-3, 0.05  # predictions of a step, peak learning rate, weight decay
_WARM_UP = 0.05  # share of the steps
_UNSEEN = 0.1  # count of a token that no answer holds, in the initial frequencies


@dataclass(frozen=True)
class Examples:
    """Next tokens of answers."""

    before: torch.Tensor  # `[N, length]`, int64, the tokens before each, newest last; -1 before the text's beginning
    labels: torch.Tensor  # `[N]`, int64, columns of the draft vocabulary

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Any) -> Examples:
        return Examples(self.before[rows], self.labels[rows])


def examples_of(chats: Sequence[TokenizedConversation], vocab_ids: torch.Tensor, length: int) -> Examples:
    """Returns the answers' tokens in `vocab_ids` `[V']`, each with `length` tokens before it; a ValueError if none."""
    ranked, order = vocab_ids.cpu().sort()
    parts = []
    for chat in chats:
        padded = torch.cat([chat.input_ids.new_full((length,), -1), chat.input_ids])
        before = padded.unfold(0, length, 1)[:-1]
        places = torch.searchsorted(ranked, chat.input_ids).clamp(max=len(ranked) - 1)
        wanted = chat.answer_mask & (ranked[places] == chat.input_ids)
        parts.append((before[wanted], order[places[wanted]]))
    if not sum(len(labels) for _, labels in parts):
        raise ValueError(
            "the chats hold no token of an answer that can be drafted: expected lines with `messages` in which the "
            "assistant speaks, in the target's own words"
        )
    return Examples(*(torch.cat(column) for column in zip(*parts, strict=True)))


def train_refiner(
    train: Examples,
    held_out: Examples,
    sizes: PathLMSizes,
    weights: TargetWeights,
    epochs: int = 1,
    seed: int = 0,
    report: Callable[[int, int, float], None] | None = None,
) -> tuple[PathLM, dict[str, float]]:
    """Trains a model by cross-entropy, with AdamW, warm-up and cosine decay to 0.

    The bias starts as the token frequencies. The first and last product start as the principal directions of the
    embedding and of the output rows, where the drafter borrows them. `report` is called with steps done, all steps, and
    the running mean of the loss in nats. Returns the model, float32, and figures: the perplexity before is that of
    token frequencies alone, the seconds are those of training.
    """
    generator = torch.Generator().manual_seed(seed)
    model = _begun(sizes, train, weights, seed)
    before = perplexity(model, held_out, weights.embed)
    begun = time.monotonic()
    steps = max(epochs * len(train) // _BATCH, 1)
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() > 1) == decays], "weight_decay": decays * _DECAY}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=_RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(_WARM_UP * steps), steps)
    order, late = torch.empty(0, dtype=torch.long), 0.0
    for step in range(steps):
        if len(order) < min(_BATCH, len(train)):
            order = torch.randperm(len(train), generator=generator)
        rows, order = order[:_BATCH], order[_BATCH:]
        loss = _loss(model, train.part(rows), weights.embed)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        late = loss.item() if step == 0 else 0.98 * late + 0.02 * loss.item()
        if report is not None and (step % 50 == 49 or step == steps - 1):
            report(step + 1, steps, late)
    figures = {
        "examples": len(train), "held_out": len(held_out), "perplexity_before": before, "steps": steps,
        "seconds": time.monotonic() - begun, "perplexity_after": perplexity(model, held_out, weights.embed),
    }  # fmt: skip
    return model.eval(), figures


@torch.no_grad()
def perplexity(model: PathLM, examples: Examples, embed: Transform) -> float:
    """Returns e to the mean cross-entropy of the next tokens in nats."""
    total = 0.0
    for start in range(0, len(examples), _BATCH):
        part = examples.part(slice(start, start + _BATCH))
        total += float(_loss(model, part, embed)) * len(part)
    return math.exp(total / max(len(examples), 1))


def _loss(model: PathLM, part: Examples, embed: Transform) -> torch.Tensor:
    logits = model(model.after(part.before, embed))
    return F.cross_entropy(logits, part.labels.to(logits.device))


@torch.no_grad()
def _begun(sizes: PathLMSizes, train: Examples, weights: TargetWeights, seed: int) -> PathLM:
    """Returns an untrained model that predicts token frequencies, whatever the context."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PathLM(sizes)
    counts = torch.bincount(train.labels, minlength=sizes.draft_vocab_size).float() + _UNSEEN
    model.up.bias.copy_((counts / counts.sum()).log())
    _principal(model.read.weight, model.norm(weights.embed(weights.vocab_ids).cpu().float()))
    if weights.head is not None:
        rows = weights.head.cpu().float()
        _principal(model.up.weight.T, rows - rows.mean(0), project=True)
    model.down.weight.zero_()
    return model.to(weights.vocab_ids.device)


def _principal(weight: torch.Tensor, rows: torch.Tensor, project: bool = False) -> None:
    """Fills the first rows of `weight` `[k, n]`, in place, with the directions in which `rows` `[V', D]` vary most.

    With `project`, n is V' and the coordinates of the rows along these directions are used, scaled to a mean square of
    1 / k; otherwise n is D.
    """
    _, _, directions = torch.linalg.svd(rows.T @ rows)
    count = min(len(weight), len(directions))
    found = directions[:count]
    if project:
        found = found @ rows.T
        found = found / found.pow(2).mean().sqrt().clamp(min=1e-12) / math.sqrt(len(weight))
    weight[:count] = found
