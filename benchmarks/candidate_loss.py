"""The loss on candidates beside the loss on the whole draft vocabulary: gradients, values, and time of a training step.

    python benchmarks/candidate_loss.py --prompts chats.jsonl --drafter folder [--candidates 16,32 --drawn 512,1024]

`--prompts` takes finished chats (`messages`). Taps are computed beforehand, as with `--cache-taps`. Each row of the
table is one way to choose columns, with the same packs, chains and weights.

- columns: compared per prediction, on average.
- cosine: between the gradients of a step and those with the whole vocabulary; median over steps and draws. `up` is the
  token bias alone, which has a row for each column.
- mean's: cosine of the mean gradient over the draws of a step: below 1 by the remaining variance, and by the bias.
- loss: mean difference from that of the whole vocabulary, in nats, and its standard deviation over the draws.
- ms: forward, loss and backward of a step; its other parts are above the table. Needs an idle machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from runner import counts, dtype_of, keep, loaded_target, options, print_table

_COLUMNS = ("candidates", "drawn", "columns", "cosine", "up", "mean's", "loss", "deviation", "ms", "tokens/s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(
        __doc__, target=None, drafter=..., prompts=..., dtype="bfloat16", repeats=5, limit=16, seed=0, json=None
    )
    parser.add_argument("--candidates", type=counts, default=[16, 32, 64], help="default: 16,32,64")
    parser.add_argument("--drawn", type=counts, default=[256, 1024], help="default: 256,1024")
    parser.add_argument("--objective", default="ce_tv", help="default: ce_tv")
    parser.add_argument("--d-pace", action="store_true", help="weights of depths by D-PACE")
    given = parser.parse_args(arguments)
    import torch

    torch.manual_seed(given.seed)
    steps = _Steps(given)
    whole = [steps.gradient(number, None) for number in range(len(steps.packs))]
    tokens = sum(len(pack.input_ids) for pack in steps.packs)
    print(f"{len(steps.packs)} steps of {tokens / len(steps.packs):.0f} tokens")
    for name, milliseconds in steps.other_parts().items():
        print(f"{name}: {milliseconds:.0f} ms a step")
    rows = [_row(steps, whole, None)]
    for count in given.candidates:
        rows += [_row(steps, whole, steps.candidates(count, drawn)) for drawn in given.drawn]
    print_table(_COLUMNS, rows)
    keep(given.json, {"columns": _COLUMNS, "rows": rows})
    return 0


class _Steps:
    """Packs of two conversations each, a drafter, and what its loss needs."""

    def __init__(self, given: Any) -> None:
        import torch

        from hf_hsdraft import AutoDrafter
        from hf_hsdraft.training.data.conversations import read_answered, tokenize_conversation
        from hf_hsdraft.training.data.features import read_features
        from hf_hsdraft.training.data.vocabulary import answer_counts
        from hf_hsdraft.training.families.trainable import as_trained, family_of
        from hf_hsdraft.training.loss.candidates import likely_columns
        from hf_hsdraft.training.loss.loss import Pack

        self.given = given
        target, tokenizer = loaded_target(given)
        self.drafter = as_trained(AutoDrafter.from_pretrained(given.drafter[0], dtype=torch.float32))
        self.family = family_of(self.drafter)
        weights = self.drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
        rows = target.get_output_embeddings().weight.detach()
        self.head = rows[weights.vocab_ids].to(dtype_of(given))
        self.weights = weights
        tokenized = [tokenize_conversation(tokenizer, chat, 1024) for chat in read_answered(given.prompts)]
        self.counts = answer_counts(tokenized, target.config.vocab_size)[weights.vocab_ids]
        taps = self.family.taps(self.drafter, target)
        features = read_features(target, taps, tokenized[: given.limit])
        known = [likely_columns(each.final, self.head, max(given.candidates)) for each in features]
        features = [replace(each, likely=likely) for each, likely in zip(features, known, strict=True)]
        self.packs = [
            Pack.of(features[at : at + 2], pad_to_multiple_of=128).to(torch.device("cpu"), dtype_of(given))
            for at in range(0, len(features), 2)
        ]

    def candidates(self, count: int, drawn: int) -> Any:
        from hf_hsdraft.training.loss.candidates import Candidates

        return Candidates.of(count, drawn, self.counts)

    def loss(self, candidates: Any) -> Any:
        from hf_hsdraft.training.loss.loss import ChainLoss
        from hf_hsdraft.training.loss.objectives import OBJECTIVES

        depths = [1.0 if self.given.d_pace else 0.8**depth for depth in range(self.drafter.num_draft_steps)]
        objective = OBJECTIVES[self.given.objective]
        return ChainLoss(self.weights, self.head, objective, depths, d_pace=self.given.d_pace, candidates=candidates)

    def run(self, number: int, loss: Any) -> float:
        """Computes the gradients of a step; returns its loss."""
        import torch

        from hf_hsdraft.training.loss.loss import sample_chains, true_labels, unroll

        pack = self.packs[number]
        chains = sample_chains(pack, 160, 0.5, [2 * number, 2 * number + 1], pad_to_multiple_of=32)
        labels = true_labels(pack, chains, self.drafter.num_draft_steps)
        labels = replace(labels, measured=False)
        self.drafter.loss_function = loss
        for parameter in self.drafter.parameters():
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.given.dtype == "bfloat16"):
            predictions = self.family.predictions(self.drafter, self.weights)
            parts = unroll(self.drafter, predictions, pack, chains, labels.tokens, labels).loss
        total = parts.loss if hasattr(parts, "loss") else parts
        total.backward()
        return float(total.detach())

    def gradient(self, number: int, candidates: Any) -> tuple[float, Any, Any]:
        """Returns the loss of a step, its whole gradient, and that of the token bias."""
        import torch

        value = self.run(number, self.loss(candidates))
        named = {name: part.grad for name, part in self.drafter.named_parameters() if part.grad is not None}
        whole = torch.cat([grad.flatten() for grad in named.values()])
        up = [grad.flatten() for name, grad in named.items() if name.endswith("injector.up.weight")]
        return value, whole, torch.cat(up) if up else whole

    def other_parts(self) -> dict[str, float]:
        """Milliseconds of the parts of a step that do not depend on the columns."""
        import torch

        def trunk(drafter: Any, hidden_states: Sequence[Any], labels: Any) -> Any:
            return sum(state.float().square().mean() for state in hidden_states)

        optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=0.0, fused=True)
        numbers = range(len(self.packs))
        found = {"trunk, forward and backward": _median(lambda number: self.run(number, trunk), numbers)}

        def learn(_: int) -> None:
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            optimizer.step()

        self.run(0, self.loss(None))
        return {**found, "optimizer": _median(learn, numbers)}


def _median(function: Callable[[int], Any], numbers: Sequence[int]) -> float:
    function(numbers[0])
    times = []
    for number in numbers:
        begin = time.perf_counter()
        function(number)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _row(steps: _Steps, whole: Sequence[tuple[float, Any, Any]], candidates: Any) -> list[Any]:
    import torch

    cosine, of_up, of_means, losses, deviations = [], [], [], [], []
    for number, (value, gradient, up) in enumerate(whole):
        found = list(_draws(steps, number, candidates))
        cosine += [float(torch.cosine_similarity(each[1], gradient, dim=0)) for each in found]
        of_up += [float(torch.cosine_similarity(each[2], up, dim=0)) for each in found]
        mean = torch.stack([each[1] for each in found]).mean(dim=0)
        of_means.append(float(torch.cosine_similarity(mean, gradient, dim=0)))
        losses.append(statistics.mean(each[0] for each in found) - value)
        deviations.append(statistics.pstdev(each[0] for each in found))
    loss = steps.loss(candidates)
    milliseconds = _median(lambda number: steps.run(number, loss), range(len(steps.packs)))
    tokens = statistics.mean(len(pack.input_ids) for pack in steps.packs)
    columns = len(steps.counts) if candidates is None else _columns(steps, candidates)
    return [
        candidates.count if candidates else "whole",
        round(float(candidates.inclusion.sum())) if candidates else "",
        round(columns),
        *(f"{statistics.median(each):.4f}" for each in (cosine, of_up, of_means)),
        f"{statistics.mean(losses):+.4f}",
        f"{statistics.mean(deviations):.4f}",
        round(milliseconds),
        round(tokens / milliseconds * 1e3),
    ]


def _draws(steps: _Steps, number: int, candidates: Any) -> Iterator[tuple[float, Any, Any]]:
    for _ in range(1 if candidates is None else steps.given.repeats):
        yield steps.gradient(number, candidates)


def _columns(steps: _Steps, candidates: Any) -> float:
    """Number of columns for 128 positions of a text, about what share their columns in a step."""
    sizes = [
        len(candidates.columns(part[:, : candidates.count]).index)
        for pack in steps.packs
        for part in pack.likely.split(128)
    ]
    return statistics.mean(sizes)


if __name__ == "__main__":
    raise SystemExit(main())
