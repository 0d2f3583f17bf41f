"""An upper bound for verifiers of independently drawn drafts, beside trees of foreseen draws, in the same rounds.

    python benchmarks/verifier_bound.py --prompts dev.jsonl --limit 26

SpecTr-GBV, and any other exact rule that verifies K paths drawn independently from the drafter, accepts a prefix x of
depth l at most as often as the target writes it, P(x), and at most as often as some path begins with it,
1 - (1 - Q(x))^K. So the accepted length is at most the sum over l of

    E over x from P of min(1, (1 - (1 - Q(x))^K) / P(x)).

A text sampled from the target is such an x for each round that starts in it. The script decodes at temperature 1 over
the whole vocabulary with the drafter's trees of foreseen draws, and evaluates the bound in the same rounds with the
drafter's own probabilities. Rounds near the end of a text count the depths that the text still has, in both columns.
The same prompts are also decoded by rejection without replacement, over trees drawn from the drafter.

- accepted: accepted draft tokens per round, and the standard error of the mean; tau is 1 more.
- of ours: tau relative to the first row's.
- K x L: number of paths and their depth; all rows verify about as many nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner import keep, loaded_target, options, print_table, prompt_texts

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Drafted:
    """What is known of a round: accepted tokens, and log-probabilities of the text's next tokens, by depth."""

    accepted: int
    target: list[float]  # of the path up to each depth, by the target
    drafter: list[float]  # the same by the drafter

    def bound(self, paths: int, depth: int) -> float:
        """Returns an unbiased estimate of the most accepted tokens, for `paths` paths of this depth."""
        import math

        known = zip(self.target[:depth], self.drafter[:depth], strict=True)
        return sum(
            min(1.0, -math.expm1(paths * math.log1p(-min(math.exp(q), 1 - 1e-12))) / math.exp(p)) for p, q in known
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(
        __doc__,
        target=None,
        drafter=None,
        prompts=None,
        limit=26,
        max_new_tokens=64,
        dtype="float32",
        seed=1,
        json=None,
    )
    parser.add_argument("--nodes", type=int, default=24, help="nodes of a tree besides the root; default: 24")
    given = parser.parse_args(arguments)
    import torch

    from hf_hsdraft import AutoDrafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter

    target, tokenizer = loaded_target(given)
    drafter = AutoDrafter.from_pretrained((given.drafter or [default_drafter(given.target)])[0], dtype=target.dtype)
    for name, value in {"tree_sizing": "fixed", "tree_size": given.nodes, "ngram_length": 0}.items():
        setattr(drafter.generation_config, name, value)
    prompts = [encode_prompt(tokenizer, text, target.device) for text in prompt_texts(given)]
    rounds: list[Drafted] = []
    for inputs in prompts:
        torch.manual_seed(given.seed)
        rounds += decoded(target, drafter, inputs, given.max_new_tokens)
    accepted: dict[str, Sequence[float]] = {"ours: walk, trees of foreseen draws": [each.accepted for each in rounds]}
    for builder in ("gumbel", "stochastic_beam"):
        drafter.generation_config.tree_builder, drafter.generation_config.verification = builder, "rejection"
        accepted[f"rejection, {builder} trees"] = found = list[float]()
        for inputs in prompts:
            torch.manual_seed(given.seed)
            found += accepted_lengths(target, drafter, inputs, given.max_new_tokens)
    for length in range(drafter.num_draft_steps, 0, -1):
        paths = max(given.nodes // length, 1)
        accepted[f"bound for {paths} x {length}"] = [each.bound(paths, length) for each in rounds]
    accepted["bound for one path"] = [each.bound(1, drafter.num_draft_steps) for each in rounds]
    columns, rows = ("verification", "accepted", "of ours"), table(accepted)
    print(f"{len(rounds)} rounds, {given.nodes} nodes each, temperature 1, whole vocabulary")
    print_table(columns, rows)
    keep(given.json, {"columns": columns, "rows": rows, "rounds": len(rounds)})
    return 0


def decoded(target: Any, drafter: Any, inputs: Any, tokens: int) -> list[Drafted]:
    """Decodes a sampled text and returns its rounds."""
    import torch

    from hf_hsdraft.training.evaluate.parity import ExpansionRecorder

    class Recorder(ExpansionRecorder):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.accepted: dict[int, int] = {}

        def ended(self, done: Any) -> None:
            self.accepted[self._start] = done.accepted[0]
            super().ended(done)

    recorder = Recorder(inputs["input_ids"].shape[1])
    with torch.no_grad():
        output = target.generate(**inputs, **SAMPLED, max_new_tokens=tokens, assistant_model=drafter, streamer=recorder)
        own = target(output).logits[0].float().log_softmax(-1)
    text = output[0]
    column = {int(token): place for place, token in enumerate(drafter.draft_vocab_ids())}
    found = []
    for start, expansion in recorder.drafts.items():
        path = text[start + 2 : start + 2 + expansion.depth].tolist()
        if path:
            said = [float(own[start + 1 + depth, token]) for depth, token in enumerate(path)]
            guessed = drafter_log_probs(replace(expansion, race=None), int(text[start + 1]), path, column)
            found.append(Drafted(min(recorder.accepted[start], len(path)), summed(said), summed(guessed)))
    return found


def accepted_lengths(target: Any, drafter: Any, inputs: Any, tokens: int) -> list[int]:
    """Decodes a sampled text and returns the accepted draft tokens of each round that drafted."""
    told = {"return_dict_in_generate": True}
    known = target.generate(**inputs, **SAMPLED, **told, max_new_tokens=tokens, assistant_model=drafter).statistics
    rounds = zip(known.accepted_lengths, known.drafted_nodes, strict=True)
    return [accepted for accepted, nodes in rounds if nodes]


def drafter_log_probs(expansion: Any, root: int, path: Sequence[int], column: dict[int, int]) -> list[float]:
    """Returns the drafter's log-probability of each token of a path, without foresight."""
    import torch

    states, found = None, list[float]()
    for level, (parent, token) in enumerate(zip([root, *path], path, strict=False), 1):
        log_probs, states = expansion(level, torch.tensor([[parent]]), states)
        place = column.get(token)
        found.append(float("-inf") if place is None else float(log_probs[0, 0].float().log_softmax(-1)[place]))
    return found


def summed(values: Sequence[float]) -> list[float]:
    import itertools

    return list(itertools.accumulate(values))


def table(accepted: Mapping[str, Sequence[float]]) -> list[list[Any]]:
    ours = 1 + statistics.mean(next(iter(accepted.values())))

    def row(name: str, lengths: Sequence[float]) -> list[Any]:
        mean, error = statistics.mean(lengths), statistics.stdev(lengths) / len(lengths) ** 0.5
        return [name, f"{mean:.3f} ± {error:.3f}", f"{(1 + mean) / ours:.2f}"]

    return [row(name, lengths) for name, lengths in accepted.items()]


if __name__ == "__main__":
    raise SystemExit(main())
