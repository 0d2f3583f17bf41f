"""Train economize's EAGLE-3 drafter for some minutes, to compare with ours on the same conversations.

pip install --no-deps economize
OMP_NUM_THREADS=1 python examples/economize_eagle3.py chats.jsonl --out eagle3 --minutes 40
python benchmarks/peers.py --prompts prompts.jsonl --variants default,economize-eagle3=eagle3 --drafter my-drafter

Drafter, roll-out, teacher and optimiser are economize's own, by `economize.train.fit`. Its extension points add three
things for a fair comparison: batches of similar lengths, a learning rate that follows the remaining time, and the same
loss computed on the counted positions only, with one pass of the teacher's head instead of one per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config, Eagle3TTT
from economize.train import SCHEDULES, ObjectiveOutput, collate, fit, register_objective, tokenize_chats
from economize.train.objectives.weights import target_weights

from hf_hsdraft import load_target

START = time.monotonic()


class TimeUp(Exception):
    """The minutes are over."""


class _HeadKL(torch.autograd.Function):
    """``sum_ij weight[i, j] * KL(teacher[j] || softmax(x[i, j] @ W.T))`` over draft steps ``i`` and target tokens ``j``
    and, without gradients, every row's KL and whether its top token is the teacher's. The gradients are formed in the
    forward, in chunks that stay in cache, so no ``[rows, vocabulary]`` tensor of the drafter is kept."""

    CHUNK = 128

    @staticmethod
    def forward(ctx, x, weight_matrix, weight, p, plogp, top, dtype):
        steps, rows, _ = x.shape
        w, xs = weight_matrix.to(dtype), x.to(dtype)
        wt = w.t()
        kl, hit = torch.empty(steps, rows), torch.empty(steps, rows)
        need = any(ctx.needs_input_grad[:2])
        dx = torch.empty(x.shape) if need else None
        dw = torch.zeros(weight_matrix.shape) if need else None
        group = max(1, 2048 // (steps * _HeadKL.CHUNK)) * _HeadKL.CHUNK  # rows whose gradients are multiplied at once
        g = torch.empty(steps * min(group, rows), w.shape[0], dtype=dtype) if need else None
        for b0 in range(0, rows, group):
            b1 = min(b0 + group, rows)
            width = b1 - b0
            for c0 in range(b0, b1, _HeadKL.CHUNK):
                c1 = min(c0 + _HeadKL.CHUNK, b1)
                teacher = p[c0:c1]
                for i in range(steps):
                    logits = (xs[i, c0:c1] @ wt).float()
                    peak = logits.amax(-1, keepdim=True)
                    hit[i, c0:c1] = (logits.gather(1, top[c0:c1, None]) >= peak)[:, 0].float()
                    dot = (teacher * logits.sub_(peak)).sum(-1)
                    total = logits.exp_().sum(-1)
                    kl[i, c0:c1] = plogp[c0:c1] - dot + total.log()
                    if need:
                        at = i * width + c0 - b0
                        g[at : at + c1 - c0] = logits.div_(total[:, None]).sub_(teacher)
            if need:
                block = g[: steps * width]
                scale = weight[:, b0:b1, None]
                dx[:, b0:b1] = (block @ w).view(steps, width, -1) * scale
                dw += block.t() @ (xs[:, b0:b1] * scale.to(dtype)).reshape(steps * width, -1)
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(kl, hit)
        return (kl * weight).sum(), kl, hit

    @staticmethod
    def backward(ctx, grad, *_):
        dx, dw = ctx.saved_tensors
        return dx.mul_(grad), dw.mul_(grad), None, None, None, None, None


@register_objective("eagle3_ttt_fast")
@dataclass
class FastTTT(Eagle3TTT):
    def loss(self, model, batch, teacher):
        technique = self.trained(model)
        ids = batch.input_ids
        length = ids.shape[1]
        steps = min(self.steps or technique.config.train_steps, length - 2)
        weights = target_weights(batch, slice(2, None))
        if weights is None:
            weights = torch.ones_like(ids[:, 2:], dtype=torch.bool)
        row, target = weights.nonzero(as_tuple=True)
        target = target + 2
        vocab = technique.draft_ids
        whole = vocab.numel() == technique.vocab_size
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else technique.dtype
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            final = teacher.final[row, target - 1]
            p = torch.empty(len(row), vocab.numel())
            plogp = torch.empty(len(row))
            top = torch.empty(len(row), dtype=torch.long)
            used, kept = 0, []
            for c in range(0, len(row), _HeadKL.CHUNK):  # teacher distributions, restricted to the draft vocabulary
                logits = teacher.head(final[c : c + _HeadKL.CHUNK]).float()
                # the SpecForge rule: positions whose teacher argmax is outside the draft vocabulary do not count
                inside = technique.t2d[logits.argmax(-1)].nonzero()[:, 0]
                logits = logits[inside] if whole else logits[inside].index_select(-1, vocab)
                logp = logits.log_softmax(-1)
                end = used + len(inside)
                p[used:end] = logp.exp()
                plogp[used:end] = torch.linalg.vecdot(p[used:end], logp)
                top[used:end] = logp.argmax(-1)
                used = end
                kept.append(inside + c)
            keep = torch.cat(kept)
            row, target = row[keep], target[keep]
        outputs = technique.rollout(teacher.hidden, steps)
        norm = sum(self.step_decay**i for i in range(steps))
        states, counted, scales = [], [], []
        for i, out in enumerate(outputs, start=1):
            start = target - (i + 1)
            valid = (start >= 0).float()
            states.append(out[row, start.clamp_min(0)])
            counted.append(valid / valid.sum().clamp_min(1))
            scales.append(counted[-1] * (self.step_decay ** (i - 1) / norm))
        x = technique.norm(torch.stack(states).to(technique.dtype))
        loss, kl, hit = _HeadKL.apply(
            x, technique.lm_head.weight, torch.stack(scales), p[:used], plogp[:used], top[:used], dtype
        )
        metrics = {}
        for i, share in enumerate(counted):
            metrics[f"kl{i + 1}"], metrics[f"acc{i + 1}"] = (kl[i] * share).sum(), (hit[i] * share).sum()
        return ObjectiveOutput(loss, metrics)


class BucketSource:
    """Shuffled batches of similar lengths with at most ``tokens`` padded tokens; raises TimeUp at the deadline."""

    def __init__(self, examples, tokens, deadline, pad, seed=0):
        self.examples, self.tokens, self.deadline, self.pad = examples, tokens, deadline, pad
        self.rng = random.Random(seed)
        self.queue, self.epoch, self.served = [], 0, 0

    def _fill(self):
        self.epoch += 1
        order = list(range(len(self.examples)))
        self.rng.shuffle(order)
        for start in range(0, len(order), 256):
            chunk = sorted(order[start : start + 256], key=lambda i: len(self.examples[i].input_ids))
            batch = []
            for i in chunk:
                if batch and len(self.examples[i].input_ids) * (len(batch) + 1) > self.tokens:
                    self.queue.append(batch)
                    batch = []
                batch.append(i)
            self.queue.append(batch)
        self.rng.shuffle(self.queue)

    def next_batch(self):
        if time.monotonic() >= self.deadline:
            raise TimeUp
        if not self.queue:
            self._fill()
        rows = [self.examples[i] for i in self.queue.pop()]
        self.served += 1
        return collate(rows, self.pad)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def draft_vocabulary(examples, size, vocab_size):
    """The ``size`` most frequent tokens: assistant tokens count 1, prompt tokens 0.3 (copying tasks); ties and unseen
    tokens by id, i.e. by BPE merge rank."""
    score = torch.zeros(vocab_size, dtype=torch.float64)
    for e in examples:
        weight = torch.full((len(e.input_ids),), 0.3, dtype=torch.float64)
        weight[1:][e.loss_mask[:-1].bool()] = 1.0
        score.index_add_(0, e.input_ids, weight)
    return torch.sort(-score, stable=True).indices[:size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="JSONL files with `messages`")
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target, tokenizer = load_target(options.target, torch.bfloat16)
    lines = [line for path in options.data for line in Path(path).read_text(encoding="utf-8").split("\n")]
    chats = [json.loads(line)["messages"] for line in lines if line.strip()]
    examples = tokenize_chats(tokenizer, chats, 1280, assistant_only=True)
    torch.manual_seed(options.seed)
    model = economize.apply(target, Eagle3Config(draft_vocab=options.draft_vocab_size, train_steps=7))
    rows = target.get_output_embeddings().weight.shape[0]
    model.techniques["eagle3"].set_draft_vocab(draft_vocabulary(examples, options.draft_vocab_size, rows))
    begin, deadline = time.monotonic(), START + 60 * options.minutes

    @SCHEDULES.register("wallclock_cosine")
    def wallclock_cosine(progress: float, floor: float) -> float:
        share = min(1.0, (time.monotonic() - begin) / max(deadline - begin, 1e-9))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    source = BucketSource(examples, 1024, deadline, tokenizer.pad_token_id or 0, options.seed)
    with contextlib.suppress(TimeUp):
        fit(
            model, source, FastTTT(), steps=10**9, lr=options.learning_rate, warmup_steps=50, min_lr_ratio=0.02,
            schedule="wallclock_cosine", autocast="bfloat16", log_every=20, seed=options.seed,
            callbacks=[lambda record: print(json.dumps(record), flush=True)],
        )  # fmt: skip
    economize.save(model, Path(options.out))
    print(f"{source.served} steps, {source.epoch} epochs, saved in {options.out}")


if __name__ == "__main__":
    main()
