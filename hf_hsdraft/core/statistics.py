"""What drafted calls did, and why that was fast or slow."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from .tuning import TUNING

_SMALL = 0.3  # part of a round beyond a plain forward, below which acceptance is the limit
_FEW = 1.5  # tokens of a round, below which it is the limit in any case


@dataclass(repr=False)
class DraftStatistics:
    """What one call did; kept when `return_dict_in_generate=True`, and for an [`Attachment`].

    Attributes:
        new_tokens: tokens emitted, over all rows.
        target_forwards: forwards of the target; reading the prompts is one, however it is chunked. Forwards that only
            find out what a target can do are not counted.
        row_forwards: the same, each counted for every row that was still growing; in a batch of one, equal.
        accepted_lengths: drafted tokens emitted in each round after the prompts' forward, for each row.
        drafted_nodes: nodes verified in each round, without the root, for each row.
        round_rows: row of each entry of `accepted_lengths` and `drafted_nodes`.
        drafter, target: class of the drafter; class and name of the target.
        draft_kind: `"tree"` or `"chain"`, what was drafted.
        reason: why chains were drafted, if they were not asked for.
        exact: whether the text has the target's distribution; False only for a lossy verification rule.
        relaxed_tokens: tokens that a lossy rule accepted in place of the target's own; 0 under exact rules.
        packed_weights: whether rounds used packed copies of the target's weights at some point.
        compiled_layers: whether rounds ran the target's decoder layers as compiled programs at some point.
        reused_share: share of the layers' work in verifying trees that self-speculation had done while drafting; 0 for
            other drafters.
        processor_share: part of the processor time that the process's threads wanted in the call which they got, 0 to
            1; other processes and a container's quota take the rest. `None` on a GPU, and where it is unknown.
        prefill_seconds, draft_seconds, verify_seconds, commit_seconds, total_seconds: wall-clock time. The rest of the
            total is Python between the parts, and finding out what a target can do. Without
            `return_dict_in_generate=True` only the parts of a round are known, where the pace times them.
        plain_seconds: time of a forward over one token of each row, as the pace measured it; `None` if it did not.
        compiling: whether layers were still being compiled in the background when the call ended.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    row_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_nodes: list[int] = field(default_factory=list)
    round_rows: list[int] = field(default_factory=list)
    drafter: str = ""
    target: str = ""
    draft_kind: str = "tree"
    reason: str = ""
    exact: bool = True
    relaxed_tokens: int = 0
    packed_weights: bool = False
    compiled_layers: bool = False
    reused_share: float = 0.0
    processor_share: float | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0
    plain_seconds: float | None = None
    compiling: bool = False

    @property
    def rounds(self) -> int:
        """Rounds of drafting, each counted for every row; the prompts' forward is not counted."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward and row, the bonus token included; plain decoding has exactly 1."""
        return self.new_tokens / max(self.row_forwards, 1)

    @property
    def accepted_by_row(self) -> list[list[int]]:
        """`accepted_lengths` of each row, round by round; a row that drafted nothing has none."""
        found: list[list[int]] = [[] for _ in range(max(self.round_rows, default=-1) + 1)]
        for row, length in zip(self.round_rows, self.accepted_lengths, strict=True):
            found[row].append(length)
        return found

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the rounds that accepted at least 1, 2, ... drafted tokens; their sum and 1 are emitted a round."""
        return [count / self.rounds for count in reached_depths(self.accepted_lengths)]

    @property
    def _totals(self) -> AttachmentStatistics:
        totals = AttachmentStatistics()
        totals.add(self, self.total_seconds)
        return totals

    def __str__(self) -> str:
        """One line; `repr` has more, and `explain` says what it means."""
        return str(self._totals)

    def explain(self) -> str:
        """Says in words why the call was fast or slow, by the costs that were measured."""
        return self._totals.explain()

    def _repr_html_(self) -> str:
        """In notebooks: a table, with a bar for each depth, and `explain`."""
        return self._totals._repr_html_()

    def __repr__(self) -> str:
        """A few lines for people; the fields hold the figures."""
        kind = f"{self.draft_kind}s" + (f": {self.reason}" if self.reason else "")
        used = {"packed weights": self.packed_weights, "compiled layers": self.compiled_layers}
        return "\n".join(
            [
                told_tau(self),
                told_depths(self.acceptance_by_depth, self.rounds),
                f"drafter: {self.drafter or 'unknown'}, {kind}; target: {self.target or 'unknown'}",
                self._told_seconds(),
                ", ".join([told_text(self.exact, self.relaxed_tokens), *(name for name, was in used.items() if was)]),
            ]
        )

    def _told_seconds(self) -> str:
        held_up = ""
        if self.processor_share is not None and self.processor_share < TUNING.least_share:
            held_up = f"; its threads got {self.processor_share:.0%} of the processor time that they wanted"
        parts = {part: getattr(self, f"{part}_seconds") for part in ("prefill", "draft", "verify", "commit")}
        if not any(parts.values()):
            return f"seconds: {self.total_seconds:.2f}{held_up}"
        parts["other"] = max(self.total_seconds - sum(parts.values()), 0.0)
        summed = " + ".join(f"{each:.2f} {part}" for part, each in parts.items())
        return f"seconds: {self.total_seconds:.2f} = {summed}{held_up}"

    # Whisper's `generate` splits each field of an output by row, and moves the parts to the CPU.
    __iter__ = None

    def __getitem__(self, row: int) -> DraftStatistics:
        """The statistics of the whole call, as its rows are decoded together."""
        return self

    def cpu(self) -> DraftStatistics:
        return self


@dataclass(repr=False)
class AttachmentStatistics:
    """What the calls of a model did since a drafter was attached, or since `Attachment.reset`.

    Attributes:
        calls: drafted calls that ended without an error.
        new_tokens: tokens that they emitted, over all rows.
        target_forwards: their forwards of the target, the prompts' included.
        row_forwards: the same, each counted for every row that was still growing.
        accepted_tokens: emitted tokens that were drafted.
        drafted_nodes: drafted tokens that the target verified.
        rounds: rounds of drafting, each counted for every row.
        accepted_by_depth: for d = 1, 2, ..., the number of these rounds that accepted at least d drafted tokens.
        seconds: total wall-clock time of decoding.
        exact: whether all of their texts have the target's distribution; see [`DraftStatistics`].
        relaxed_tokens: tokens that a lossy rule accepted in place of the target's own.
        stepped_aside: number of calls decoded without drafts, by reason.
        drafting_rounds: rounds with a draft; in others one would have cost more than it saves.
        draft_seconds, verify_seconds, commit_seconds: parts of `seconds`, of all rounds, as far as they were timed.
        plain_seconds, compiling, processor_share, reason: as in [`DraftStatistics`], of the last call.
    """

    calls: int = 0
    new_tokens: int = 0
    target_forwards: int = 0
    row_forwards: int = 0
    accepted_tokens: int = 0
    drafted_nodes: int = 0
    rounds: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: float = 0.0
    exact: bool = True
    relaxed_tokens: int = 0
    stepped_aside: dict[str, int] = field(default_factory=dict)
    drafting_rounds: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    plain_seconds: float | None = None
    compiling: bool = False
    processor_share: float | None = None
    reason: str = ""

    @property
    def tau(self) -> float:
        """Tokens emitted by drafted calls per target forward and row; plain decoding has exactly 1."""
        return self.new_tokens / max(self.row_forwards, 1)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """As in [`DraftStatistics`], over all drafted calls."""
        return [count / self.rounds for count in self.accepted_by_depth]

    def add(self, done: DraftStatistics, seconds: float) -> None:
        """Adds a drafted call and its wall-clock `seconds`."""
        self.calls += 1
        self.new_tokens += done.new_tokens
        self.target_forwards += done.target_forwards
        self.row_forwards += done.row_forwards
        self.accepted_tokens += sum(done.accepted_lengths)
        self.drafted_nodes += sum(done.drafted_nodes)
        self.rounds += done.rounds
        counts = self.accepted_by_depth, reached_depths(done.accepted_lengths)
        self.accepted_by_depth = [sum(pair) for pair in itertools.zip_longest(*counts, fillvalue=0)]
        self.seconds += seconds
        self.exact = self.exact and done.exact
        self.relaxed_tokens += done.relaxed_tokens
        self.drafting_rounds += sum(map(bool, done.drafted_nodes))
        self.draft_seconds += done.draft_seconds
        self.verify_seconds += done.verify_seconds
        self.commit_seconds += done.commit_seconds
        self.plain_seconds = done.plain_seconds or self.plain_seconds
        self.compiling, self.processor_share, self.reason = done.compiling, done.processor_share, done.reason

    def __str__(self) -> str:
        """One line; `repr` has more, and `explain` says what it means."""
        accepted = " ".join(f"{share:.0%}" for share in self.acceptance_by_depth) or "nothing"
        forwards = f"{self.new_tokens} tokens in {self.target_forwards} forwards"
        return f"tau {self.tau:.2f}, {forwards}, {self.seconds:.2f} s, accepted by depth: {accepted}"

    def _repr_html_(self) -> str:
        """In notebooks: a table, with a bar for each depth, and `explain`."""
        rows = {
            "tau": f"{self.tau:.2f}",
            "tokens": f"{self.new_tokens} in {self.target_forwards} target forwards, {self.seconds:.2f} s",
            "drafts": f"{self.drafted_nodes} tokens in {self.drafting_rounds} of {self.rounds} rounds",
        }
        for depth, share in enumerate(self.acceptance_by_depth, 1):
            bar = f"display:inline-block;height:.8em;width:{10 * share:.1f}em;background:#35a46c"
            rows[f"accepted, depth {depth}"] = f'<span style="{bar}"></span> {share:.0%}'
        cells = "".join(f"<tr><th>{title}</th><td>{value}</td></tr>" for title, value in rows.items())
        return f"<table>{cells}</table><p>{html.escape(self.explain())}</p>"

    def explain(self) -> str:
        """Says in words why decoding was fast or slow, by the costs that were measured."""
        if not self.rounds:
            aside = "; ".join(self.stepped_aside)
            return f"No drafts: {aside or self.reason or 'no text got further than its first token'}."
        if not self.drafting_rounds:
            return f"No drafts: {self.reason or 'by the measured costs, drafts would not have paid'}."
        sentences = [f"A round emitted {self._emitted:.2f} tokens."]
        if (parts := self._parts) is not None:
            verifying, drafting, rest = parts
            sentences[0] = (
                f"A round emitted {self._emitted:.2f} tokens in the time of {sum(parts):.2f} forwards over one token: "
                f"{verifying:.2f} to verify {self.drafted_nodes / self.rounds:.1f} drafted tokens, {drafting:.2f} to "
                f"draft them, {rest:.2f} for the rest."
            )
        sentences.append(self._limit(*(parts or (1.0, 0.0, 0.0))))
        if self.drafting_rounds < self.rounds:
            sentences.append(f"{self.drafting_rounds} of {self.rounds} rounds drafted; the others would not have paid.")
        if self.reason:
            sentences.append(f"Drafts were chains, not trees: {self.reason}.")
        if self.compiling:
            sentences.append("Layers were still being compiled in the background: later calls are faster.")
        if self.processor_share is not None and self.processor_share < TUNING.least_share:
            sentences.append(f"Its threads got only {self.processor_share:.0%} of the processor time that they wanted.")
        return " ".join(sentences)

    @property
    def _emitted(self) -> float:
        """Tokens that a round emits for a row."""
        return 1.0 + sum(self.acceptance_by_depth)

    @property
    def _parts(self) -> tuple[float, float, float] | None:
        """Verifying, drafting and the rest of a round, each in plain forwards; `None` where that was not measured."""
        plain = (self.plain_seconds or 0.0) * (self.target_forwards - self.calls)
        return (self.verify_seconds / plain, self.draft_seconds / plain, self.commit_seconds / plain) if plain else None

    def _limit(self, verifying: float, drafting: float, rest: float) -> str:
        extra = verifying + drafting + rest - 1.0
        if self._emitted < _FEW or extra < _SMALL * (1.0 + extra):
            first = next(iter(self.acceptance_by_depth), 0.0)
            return (
                f"Acceptance limits it: {first:.0%} of the rounds accepted a drafted token. A drafter trained on texts "
                "like these gets more."
            )
        if verifying - 1.0 >= drafting:
            return "Verification limits it: on this device, in this dtype, forwards over several tokens cost more."
        return "Drafting limits it: a smaller drafter, or a smaller `num_assistant_tokens`, costs less."

    def __repr__(self) -> str:
        """A few lines for people; the fields hold the figures."""
        lines = [f"drafted calls: {self.calls}, in {self.seconds:.2f} s"]
        if self.calls:
            lines += [
                told_tau(self),
                told_depths(self.acceptance_by_depth, self.rounds),
                told_text(self.exact, self.relaxed_tokens),
            ]
        lines += [f"calls without drafts: {count}, because {reason}" for reason, count in self.stepped_aside.items()]
        return "\n".join(lines)


def reached_depths(lengths: Sequence[int]) -> list[int]:
    """Returns for d = 1, 2, ... the number of rounds that accepted at least d drafted tokens, given those of each."""
    return [sum(length >= depth for length in lengths) for depth in range(1, max(lengths, default=0) + 1)]


def told_tau(found: DraftStatistics | AttachmentStatistics) -> str:
    """Tau with its definition and the numbers that it is made of, out of statistics of one call or of several."""
    counted = f"{found.target_forwards} forwards"
    if found.row_forwards != found.target_forwards:
        counted = f"{found.row_forwards} forwards counted by row, {counted} in all"
    per = "tokens emitted per target forward and row, bonus token included"
    return f"tau {found.tau:.2f} ({per}): {found.new_tokens} tokens, {counted}"


def told_depths(shares: Sequence[float], rounds: int) -> str:
    shown = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(shares, 1)) or "nothing"
    return f"accepted by depth, share of {rounds} rounds: {shown}"


def told_text(exact: bool, relaxed: int) -> str:
    return "text: the target's own" if exact else f"text: lossy verification, {relaxed} tokens relaxed"


def pooled_tau(statistics: Sequence[DraftStatistics]) -> float:
    """Returns tau over several calls: all emitted tokens per row forward."""
    forwards = sum(call.row_forwards for call in statistics)
    return sum(call.new_tokens for call in statistics) / max(forwards, 1)
