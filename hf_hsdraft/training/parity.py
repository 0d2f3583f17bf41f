"""Does training see what decoding sees? Both sides of every depth, compared on the same text.

A shift by one between training and inference is the field's most common silent bug: nearly perfect training accuracy
and hardly any acceptance. Here the logits of the training forward stand against those that drafting and verification
meet in an actual `generate()` call, the drafter's and the target's alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..acceleration.cpu.products import in_full_precision
from ..bench.wrapped_drafter import WrappedDrafter
from ..drafters.draft_options import DraftOptions
from ..drafters.hidden_state.candidate_generator import HSCandidateGenerator
from ..drafters.hidden_state.expansion import Expansion
from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from ..drafters.protocol import Ask, DraftCall
from ..trees.draft_tree import DraftTree
from ..verifiers.verdict import Nodes, Verdict, Verifier
from .conversations import TokenizedConversation
from .features import read_features
from .loss import ChainLabels, Chains, Pack, chain_states, draft_logits, true_labels, unroll

LabelsOf = Callable[[Pack, Chains, int], ChainLabels]

TOLERANCE = {torch.float32: 0.005, torch.bfloat16: 0.1, torch.float16: 0.05}


PROMPTS = (
    "A farmer has 12 cows and buys 7 more. How many cows does the farmer have now? Explain each step.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a lake and a river?",
)


class ParityError(RuntimeError):
    """What is trained is not what decoding uses."""


@dataclass(frozen=True)
class DepthParity:
    """One depth, over all rounds of some calls.

    Attributes:
        depth: 1 .. K.
        predictions: compared.
        drafter, target: mean total variation between the distributions of training and of decoding, 0 to 1.
        accuracy: how often the drafter's first choice is the token that the target went on with, by training's logits.
        agreement: the same by decoding's logits; a chain would be accepted this often where it got this far.
    """

    depth: int
    predictions: int
    drafter: float
    target: float
    accuracy: float
    agreement: float


@dataclass(frozen=True)
class ParityReport:
    """All depths, and the tolerance they are held to."""

    depths: list[DepthParity]
    tolerance: float

    @property
    def passed(self) -> bool:
        return bool(self.depths) and all(max(d.drafter, d.target) <= self.tolerance for d in self.depths)

    def lines(self) -> list[str]:
        """A table to print."""
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
        """What is wrong, by depth; empty if nothing is."""
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
    drafter: HSDrafter,
    target: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 64,
    tolerance: float = 0.0,
    labels_of: LabelsOf = true_labels,
) -> ParityReport:
    """Decodes prompts greedily, then computes the same drafts as training does, and compares.

    Args:
        prompts: token ids `[1, length]` each.
        max_new_tokens: decoded after each.
        tolerance: mean total variation allowed at each depth; 0 takes that of the target's dtype.
        labels_of: how training labels the chains of a pack to some depth.
    """
    steps = drafter.config.num_draft_steps
    rows: list[list[tuple[float, float, bool, bool]]] = [[] for _ in range(steps)]
    for prompt in prompts:
        for depth, comparison in _compare_text(drafter, target, prompt, max_new_tokens, labels_of):
            rows[depth].append(comparison)
    depths = []
    for depth, found in enumerate(rows, 1):
        if found:
            drafter_tv, target_tv, accuracy, agreement = (sum(part) / len(found) for part in zip(*found, strict=True))
            depths.append(DepthParity(depth, len(found), drafter_tv, target_tv, accuracy, agreement))
    return ParityReport(depths, tolerance or TOLERANCE[target.dtype])


@torch.no_grad()
def _compare_text(
    drafter: HSDrafter, target: Any, prompt: torch.Tensor, max_new_tokens: int, labels_of: LabelsOf
) -> Iterator[tuple[int, tuple[float, float, bool, bool]]]:
    """Per prediction its depth index, then TV of drafter and target, first choice right in training and decoding."""
    observed = _ObservedDrafter(drafter, prompt.shape[1])
    drafts, verified = observed.drafts, observed.verified
    with in_full_precision():  # what training computes, not what is close to it
        text = target.generate(
            prompt.to(target.device),
            attention_mask=torch.ones_like(prompt).to(target.device),
            assistant_model=observed,
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )[0]
    starts = sorted(start for start in drafts if start + 2 < len(text))
    if not starts:
        return
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    pack, chains = _as_trained(drafter, target, text, starts)
    steps = drafter.config.num_draft_steps
    labels = labels_of(pack, chains, steps)
    output = unroll(drafter, weights, pack, chains.starts, chains.num_rolled)
    states = chain_states(drafter, weights, output.hidden_states, labels)
    head = target.get_output_embeddings().weight
    ids = weights.vocab_ids
    for depth, hidden in enumerate(output.hidden_states):
        trained = draft_logits(drafter, weights, hidden, states[depth]).float()
        teacher = (labels.teacher[labels.rows[:, depth]].to(head.dtype) @ head[ids.to(head.device)].T).float()
        for row, start in enumerate(starts):
            goal = start + 2 + depth
            if goal >= len(text) or depth >= drafts[start].depth or goal - 1 not in verified:
                continue
            decoded = _replayed(drafts[start], text[start + 1 : goal].tolist())
            seen = verified[goal - 1][ids.to(verified[goal - 1].device)].float()
            truth = int(text[goal])
            yield (
                depth,
                (
                    _total_variation(trained[row].log_softmax(-1), decoded),
                    _total_variation(teacher[row].log_softmax(-1), seen.log_softmax(-1)),
                    int(ids[trained[row].argmax()]) == truth,
                    int(ids[decoded.argmax()]) == truth,
                ),
            )


def _as_trained(drafter: HSDrafter, target: Any, text: torch.Tensor, starts: Sequence[int]) -> tuple[Pack, Chains]:
    """The text as a training step would read it: as the second document of a pack."""
    chat = TokenizedConversation(text.cpu(), torch.ones(len(text), dtype=torch.bool))
    short = TokenizedConversation(chat.input_ids[:3], chat.answer_mask[:3])
    read = read_features(target, drafter.config.target_tap_layers, [short, chat], drafter.device, drafter.dtype)
    pack = Pack.of(read, pad_to_multiple_of=8).to(drafter.device, drafter.dtype)
    places = torch.tensor(starts, device=drafter.device) + len(short.input_ids)
    return pack, Chains(places, len(starts), torch.ones(len(starts), dtype=torch.bool, device=drafter.device))


def _total_variation(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.exp().cpu() - right.exp().cpu()).abs().sum()) / 2


def _replayed(expansion: Expansion, tokens: Sequence[int]) -> torch.Tensor:
    """What a draft of decoding would have said after these tokens, the root first: log-probabilities `[V']`."""
    states = None
    for level, token in enumerate(tokens, 1):
        log_probs, states = expansion(level, torch.tensor([[token]], device=expansion.logits.device), states)
    return log_probs[0, 0]


class _ObservedDrafter(WrappedDrafter):
    """A drafter for one call, which notes what decoding meets: every draft, and what the target makes of the text.

    Args:
        drafter: whose drafts these are, without reuse and n-grams.
        length: number of tokens of the prompt.

    Attributes:
        drafts: by the position that each starts from.
        verified: the target's logits `[V]` by position.
    """

    def __init__(self, drafter: HSDrafter, length: int) -> None:
        super().__init__(drafter)
        self.generation_config.reuse = "none"
        self.drafts: dict[int, Expansion] = {}
        self.verified: dict[int, torch.Tensor] = {}
        self._length = length

    def session(self, call: DraftCall) -> HSCandidateGenerator:
        return _NotingSession(self._drafter.session(call), self.drafts)

    def verifier(self, options: DraftOptions) -> Verifier:
        return _NotingVerifier(super().verifier(options), self.verified, self._length - 1)


class _NotingSession(HSCandidateGenerator):
    """Goes on in the place of a session that has not drafted yet, and notes every draft by its start."""

    def __init__(self, session: HSCandidateGenerator, drafts: dict[int, Expansion]) -> None:
        self.__dict__.update(session.__dict__)
        self._noted, self._start = drafts, 0

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        self._start = int(self._rows[0].pending[-1][2][-1])
        return super()._rolled(rows, depth)

    def _grown(
        self, asks: Sequence[Ask], expansion: Expansion, depths: Sequence[int], options: DraftOptions
    ) -> list[DraftTree]:
        self._noted[self._start] = expansion
        return super()._grown(asks, expansion, depths, options)


class _NotingVerifier:
    """Decides as another rule, and notes the target's logits at the root and at each accepted node.

    Args:
        position: of the first token that is judged, the prompt's last.
    """

    def __init__(self, rule: Verifier, verified: dict[int, torch.Tensor], position: int) -> None:
        self.exact, self.taps = rule.exact, rule.taps
        self.own_draws, self.drawn_nodes = rule.own_draws, rule.drawn_nodes
        self._rule, self._verified, self._position = rule, verified, position

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        verdict = self._rule.judge(tree, nodes)
        for node in (0, *verdict.path):
            self._verified[self._position] = nodes.logits[node]
            self._position += 1
        return verdict
