"""What drafted calls did, and why that was fast or slow."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from .processors import LEAST_SHARE

_SMALL = 0.3  # part of a round beyond a plain forward, below which acceptance is the limit
_FEW = 1.5  # tokens of a round, below which it is the limit in any case
_ADDED = (
    "calls", "new_tokens", "target_forwards", "row_forwards", "relaxed_tokens", "prefill_seconds", "draft_seconds",
    "verify_seconds", "commit_seconds", "total_seconds",
)  # fmt: skip


@dataclass(repr=False)
class DraftStatistics:
    """What a drafted call did, or by `+` several: kept when `return_dict_in_generate=True`, and by an [`Attachment`].

    A sum keeps no list of its rounds. What is neither counted nor a switch is that of the last call.

    Attributes:
        calls: drafted calls that ended without an error; 1 unless this is a sum.
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
        stepped_aside: number of an attachment's calls decoded without drafts, by reason.
        added_rounds: number of rounds in the calls that were added up, by accepted length and nodes.
    """

    calls: int = 1
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
    stepped_aside: dict[str, int] = field(default_factory=dict)
    added_rounds: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def sum(cls, calls: Iterable[DraftStatistics] = ()) -> DraftStatistics:
        """Adds up calls; the sum of none has 0 `calls`."""
        return sum(calls, cls(calls=0))

    def __add__(self, other: DraftStatistics) -> DraftStatistics:
        added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        added |= {name: getattr(self, name) or getattr(other, name) for name in ("packed_weights", "compiled_layers")}
        aside = dict(Counter(self.stepped_aside) + Counter(other.stepped_aside))
        plain, exact = other.plain_seconds or self.plain_seconds, self.exact and other.exact
        lists: Any = {"accepted_lengths": [], "drafted_nodes": [], "round_rows": []}
        rounds = dict(self._rounds + other._rounds)
        return replace(
            other, **added, **lists, exact=exact, plain_seconds=plain, stepped_aside=aside, added_rounds=rounds
        )

    @property
    def _rounds(self) -> Counter[tuple[int, int]]:
        """Number of rounds by accepted length and nodes."""
        pairs = zip_longest(self.accepted_lengths, self.drafted_nodes, fillvalue=0)
        return Counter(self.added_rounds) + Counter(pairs)

    @property
    def rounds(self) -> int:
        """Rounds of drafting, each counted for every row; the prompts' forward is not counted."""
        return self._rounds.total()

    @property
    def drafting_rounds(self) -> int:
        """Rounds with a draft; in others one would have cost more than it saves."""
        return sum(count for (_, nodes), count in self._rounds.items() if nodes)

    @property
    def drafted_tokens(self) -> int:
        """Drafted tokens that the target verified."""
        return sum(nodes * count for (_, nodes), count in self._rounds.items())

    @property
    def accepted_tokens(self) -> int:
        """Emitted tokens that were drafted."""
        return sum(length * count for (length, _), count in self._rounds.items())

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
    def accepted_by_depth(self) -> list[int]:
        """For d = 1, 2, ..., the number of rounds that accepted at least d drafted tokens."""
        lengths = Counter[int]()
        for (length, _), count in self._rounds.items():
            lengths.update(dict.fromkeys(range(1, length + 1), count))
        return [lengths[depth] for depth in sorted(lengths)]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """The same as shares of all rounds; their sum and 1 are emitted a round."""
        return [count / self.rounds for count in self.accepted_by_depth]

    def totals(self) -> dict[str, Any]:
        """All that is counted and timed, for JSON."""
        names = [*_ADDED, "accepted_tokens", "rounds", "accepted_by_depth", "exact", "stepped_aside", "drafting_rounds"]
        names += ["plain_seconds", "compiling", "processor_share", "reason"]
        named = {"drafted_nodes": self.drafted_tokens, "seconds": self.total_seconds}
        return named | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """One line; `repr` has more, and `explain` says what it means."""
        accepted = " ".join(f"{share:.0%}" for share in self.acceptance_by_depth) or "nothing"
        forwards = f"{self.new_tokens} tokens in {self.target_forwards} forwards"
        return f"tau {self.tau:.2f}, {forwards}, {self.total_seconds:.2f} s, accepted by depth: {accepted}"

    def _repr_html_(self) -> str:
        """In notebooks: a table, with a bar for each depth, and `explain`."""
        rows = {
            "tau": f"{self.tau:.2f}",
            "tokens": f"{self.new_tokens} in {self.target_forwards} target forwards, {self.total_seconds:.2f} s",
            "drafts": f"{self.drafted_tokens} tokens in {self.drafting_rounds} of {self.rounds} rounds",
        }
        for depth, share in enumerate(self.acceptance_by_depth, 1):
            bar = f"display:inline-block;height:.8em;width:{10 * share:.1f}em;background:#35a46c"
            rows[f"accepted, depth {depth}"] = f'<span style="{bar}"></span> {share:.0%}'
        cell = '<td style="text-align:left">'  # notebooks align to the right, from where bars would grow
        cells = "".join(f"<tr><th>{title}</th>{cell}{value}</td></tr>" for title, value in rows.items())
        return f"<table>{cells}</table><p>{html.escape(self.explain())}</p>"

    def explain(self) -> str:
        """Says in words why decoding was fast or slow, by the costs that were measured."""
        if not self.rounds:
            aside = "; ".join(self.stepped_aside)
            return f"No drafts: {aside or self.reason or 'no text got further than its first token'}."
        if not self.drafting_rounds and self.plain_seconds is None:
            return f"No drafts: {self.reason or 'none was found, or it would not have paid'}."
        chains = [f"Its drafts are chains, not trees: {self.reason}."] if self.reason else []
        if not self.drafting_rounds:
            return " ".join(["No drafts: by the measured costs they would not have paid.", *chains])
        sentences = [f"A round emitted {self._emitted:.2f} tokens."]
        if (parts := self._parts) is not None:
            verifying, drafting, rest = parts
            sentences[0] = (
                f"A round emitted {self._emitted:.2f} tokens in the time of {sum(parts):.2f} forwards over one token: "
                f"{verifying:.2f} to verify {self.drafted_tokens / self.rounds:.1f} drafted tokens, {drafting:.2f} to "
                f"draft them, {rest:.2f} for the rest."
            )
        sentences.append(self._limit(*(parts or (1.0, 0.0, 0.0))))
        if self.drafting_rounds < self.rounds:
            others = "; in the others no draft would have paid" * (self.plain_seconds is not None)
            sentences.append(f"{self.drafting_rounds} of {self.rounds} rounds drafted{others}.")
        sentences += chains
        if self.compiling:
            sentences.append("Layers were still being compiled in the background: later calls are faster.")
        if self.processor_share is not None and self.processor_share < LEAST_SHARE:
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
            first = next(iter(self.accepted_by_depth), 0) / self.drafting_rounds
            return (
                f"Acceptance limits it: {first:.0%} of the rounds with a draft accepted a drafted token. A drafter "
                "trained on texts like these may get more."
            )
        if verifying - 1.0 >= drafting:
            return "Verification limits it: on this device, in this dtype, forwards over several tokens cost more."
        return "Drafting limits it: a smaller drafter, or a smaller `num_assistant_tokens`, costs less."

    def __repr__(self) -> str:
        """A few lines for people; the fields hold the figures."""
        lines = [] if self.calls == 1 else [f"drafted calls: {self.calls}, in {self.total_seconds:.2f} s"]
        if self.calls:
            counted = f"{self.target_forwards} forwards"
            if self.row_forwards != self.target_forwards:
                counted = f"{self.row_forwards} forwards counted by row, {counted} in all"
            per = "tokens emitted per target forward and row, bonus token included"
            shares = enumerate(self.acceptance_by_depth, 1)
            accepted = "  ".join(f"{depth}: {share:.0%}" for depth, share in shares) or "nothing"
            kind = f"{self.draft_kind}s" + (f": {self.reason}" if self.reason else "")
            text = "the target's own" if self.exact else f"lossy verification, {self.relaxed_tokens} tokens relaxed"
            used = ", packed weights" * self.packed_weights + ", compiled layers" * self.compiled_layers
            lines += [
                f"tau {self.tau:.2f} ({per}): {self.new_tokens} tokens, {counted}",
                f"accepted by depth, share of {self.rounds} rounds: {accepted}",
                f"drafter: {self.drafter or 'unknown'}, {kind}; target: {self.target or 'unknown'}",
                self._told_seconds(),
                f"text: {text}{used}",
            ]
        aside = self.stepped_aside.items()
        return "\n".join([*lines, *(f"calls without drafts: {count}, because {reason}" for reason, count in aside)])

    def _told_seconds(self) -> str:
        held_up = ""
        if self.processor_share is not None and self.processor_share < LEAST_SHARE:
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
