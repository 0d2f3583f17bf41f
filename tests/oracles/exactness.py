"""Tests whether sampled text is distributed as the target's own. One round is compared with the exact distribution.

The target is a table here: its probabilities after every text of up to three tokens of a small vocabulary, put through
transformers' own logits processors. A round (a builder and a verifier, as decoding uses them) emits some tokens. If
these are fewer than three, the others are drawn from the table. A chi-square test compares the counts of the texts with
their exact probabilities.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_hsdraft.core.draft_tree import TREE_BUILDERS, DraftTree, Expansion, TreeLimits
from hf_hsdraft.verify.registry import VERIFIERS
from hf_hsdraft.verify.verdict import Nodes, Verifier, draw_token

LENGTH = 3  # number of tokens compared
VOCABULARY = 6
DRAFTED = 5  # size of the draft vocabulary: the last token is never in a tree
_ROOT = 0

PROCESSORS: dict[str, Callable[[], list[object]]] = {
    "none": list,
    "top_k": lambda: [TopKLogitsWarper(3)],
    "top_p": lambda: [TopPLogitsWarper(0.8)],
    "min_p": lambda: [MinPLogitsWarper(0.15)],
    "typical": lambda: [TypicalLogitsWarper(0.8)],
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.5)],
}
_SIZES = {"gumbel": (9, 3), "stochastic_beam": (8, 4)}  # tree size and beam width of builders that differ from others


@dataclass(frozen=True)
class Outcome:
    """How the texts of one setting were distributed."""

    setting: tuple[str, str, str, float]  # verifier, builder, processor and temperature
    samples: int  # texts drawn
    p_value: float  # of the chi-square test that the texts follow the target
    accepted: float  # mean number of drafted tokens accepted in a round


class Table:
    """A target of `VOCABULARY` tokens and its drafter.

    Attributes:
        scores: processed scores `[1, VOCABULARY]` after each text.
        probabilities: probabilities `[VOCABULARY]`, float64, after each text.
        drafts: `[LENGTH + 1, VOCABULARY, DRAFTED]`, the drafter's log-probabilities by depth and parent.
    """

    def __init__(self, processor: str, temperature: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
        process = LogitsProcessorList([*PROCESSORS[processor](), *warpers])
        self.scores: dict[tuple[int, ...], torch.Tensor] = {}
        for length in range(LENGTH + 1):
            for text in itertools.product(range(VOCABULARY), repeat=length):
                raw = torch.randn(1, VOCABULARY, generator=generator) * 1.5
                self.scores[text] = process(torch.tensor([[_ROOT, *text]]), raw)
        self.probabilities = {text: scores[0].softmax(-1).double() for text, scores in self.scores.items()}
        noise = torch.randn(LENGTH + 1, VOCABULARY, DRAFTED, generator=generator)
        self.drafts = (noise / temperature).log_softmax(-1)

    def exact(self) -> torch.Tensor:
        """Returns `[V, V, V]`, the probability of each text of three tokens."""
        joint = torch.ones((), dtype=torch.float64)
        for length in range(LENGTH):
            texts = itertools.product(range(VOCABULARY), repeat=length)
            rows = torch.stack([self.probabilities[text] for text in texts])
            joint = joint.reshape(-1, 1) * rows
        return joint.reshape((VOCABULARY,) * LENGTH)

    def expand(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Expansion.__call__`."""
        return self.drafts[level - 1][tokens], torch.zeros(*tokens.shape, 1)


@dataclass(frozen=True)
class FullExpansion(Expansion):
    """An `Expansion` made of a function; column i of its log-probabilities is that of token i."""

    expand: Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    depth: int

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expand(level, tokens, states)


def cascaded(table: Table) -> DraftTree:
    """Returns the chain of two tokens that the table's drafter holds, in the place of a cascade's middle model.

    The level below drafts without looking at it, as n-grams do: always the next higher token.
    """
    from hf_hsdraft.methods.cascade.cascade_session import HeldChain

    held, depth = HeldChain(1.0, DRAFTED), 2
    while len(held.tokens) < depth:
        tokens = [*held.tokens[-1:], *([] if held.tokens else [_ROOT])]
        tokens += [(tokens[0] + each) % DRAFTED for each in range(1, depth - len(held.tokens))]
        places = range(len(tokens))
        draft = DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(places), (0.0,) * len(tokens))
        logits = torch.stack([table.drafts[len(held.tokens) + place][tokens[place]] for place in places])
        held.add(draft, logits)
    return held.tree(_ROOT)


# What drafts by draws without a builder of trees: returns the draft of a round.
DRAWN_DRAFTS: dict[str, Callable[[Table], DraftTree]] = {"cascade": cascaded}


def grow(builder: str, table: Table, count: int) -> list[DraftTree]:
    """Returns trees of one builder, or drafts of a method, for `count` rounds."""
    if builder in DRAWN_DRAFTS:
        return [DRAWN_DRAFTS[builder](table) for _ in range(count)]
    limits = TreeLimits(*_SIZES.get(builder, (8, 3)), threshold=0.0, max_depths=[2] * count)
    roots, ids = torch.full((count,), _ROOT), torch.arange(DRAFTED)
    return TREE_BUILDERS[builder].grow(FullExpansion(table.expand, depth=2), roots, ids, limits)


def check(
    verifier: str | Verifier, builder: str, processor: str, temperature: float, samples: int, seed: int = 0
) -> Outcome:
    """Draws texts by rounds of one setting and tests them; names are those of the tables, and of `VERIFIERS`."""
    torch.manual_seed(seed)
    rule = VERIFIERS[verifier] if isinstance(verifier, str) else verifier
    name = verifier if isinstance(verifier, str) else "other"
    table = Table(processor, temperature)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for start in range(0, samples, 2000):
        for tree in grow(builder, table, min(2000, samples - start)):

            def scores_at(node: int, tokens: list[int]) -> torch.Tensor:
                return table.scores[tuple(tokens)]

            verdict = rule.judge(tree, Nodes(torch.empty(0), scores_at, lambda path, tokens: False, draw_token))
            text = (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
            accepted += len(verdict.path)
            while len(text) < LENGTH:
                text = (*text, int(torch.multinomial(table.probabilities[text], 1)))
            counts[text[:LENGTH]] += 1
    return Outcome(
        (name, builder, processor, temperature), samples, chi_square(counts, table.exact()), accepted / samples
    )


def chi_square(counts: Counter[tuple[int, ...]], exact: torch.Tensor) -> float:
    """Returns the probability of counts that are at least as far from `exact` as these are.

    Cells that are expected less than 5 times are put together. A text of probability 0 gives 0.
    """
    total = sum(counts.values())
    observed = torch.zeros_like(exact)
    for text, count in counts.items():
        observed[text] = count
    if bool((observed[exact == 0] > 0).any()):
        return 0.0
    expected = exact * total
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare])]
    if float(expected[rare].sum()) > 0:
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    seen, wanted = (torch.cat(part) for part in zip(*cells, strict=True))
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(max(len(wanted) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def settings(
    processors: Sequence[str] = tuple(PROCESSORS), temperatures: Sequence[float] = (0.5, 1.0, 1.5)
) -> Iterator[tuple[str, str, str, float]]:
    """Yields all settings of exact rules. Those for drawn nodes are left out where none are drawn."""
    for (verifier, rule), builder in itertools.product(VERIFIERS.items(), (*TREE_BUILDERS, *DRAWN_DRAFTS)):
        draws = builder in DRAWN_DRAFTS or TREE_BUILDERS[builder].draws
        if rule.exact and (draws or not rule.drawn_nodes):
            yield from ((verifier, builder, p, t) for p in processors for t in temperatures)
