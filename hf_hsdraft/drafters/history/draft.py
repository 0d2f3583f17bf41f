"""Draft trees from what followed earlier occurrences of a text's last tokens.

Occurrences are sorted by how many tokens match, `TUNING.history_bins`, and by whether they agree on what follows. Long
matches come first, shorter ones share the remaining probability, and within a group the tokens share by their counts.
How often a group holds the right token is counted as texts grow, so these probabilities are comparable to a trained
drafter's.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ...core.draft_tree import DraftTree, grown_tree
from ...core.tuning import TUNING
from .past_texts import Continuation

_ALONE, _AGREED, _SPLIT = range(3)  # one occurrence; several that one token follows; several that differ
Group = dict[int, list[Continuation]]  # occurrences by the token that follows, the longest and newest first


class Trust:
    """How often the tokens that followed earlier occurrences hold the next one, by length of match and agreement."""

    def __init__(self) -> None:
        self._counts = [[[0.0, 0.0] for _ in range(3)] for _ in TUNING.history_bins]  # right tokens, and all

    def of(self, place: int, group: Group) -> float:
        """Returns the probability that the next token is among a group's tokens."""
        kind, assumed = _kind(group), TUNING.history_right[place]
        if kind == _AGREED:
            assumed = 1.0 - (1.0 - assumed) / 2
        right, reached = self._counts[place][kind]
        return (right + TUNING.history_prior * assumed) / (reached + TUNING.history_prior)

    def count(self, place: int, group: Group, right: bool) -> None:
        counts = self._counts[place][_kind(group)]
        counts[0] += right
        counts[1] += 1
        if counts[1] > TUNING.history_most:
            counts[:] = counts[0] / 2, counts[1] / 2


def _kind(group: Group) -> int:
    if len(group) > 1:
        return _SPLIT
    return _AGREED if len(next(iter(group.values()))) > 1 else _ALONE


class HistoryDraft:
    """The continuations of one text, as a tree that grows from the root, the text's last token."""

    def __init__(self, root: int, found: Sequence[Continuation], trust: Trust) -> None:
        self._root, self._trust = root, trust
        # Of each path, by place in the bins.
        self._at: dict[tuple[int, ...], dict[int, Group]] = {(): _groups(found, 0)}

    def tree(self, size: int, depth: int, width: int | None = None, threshold: float = 0.0) -> DraftTree:
        """Returns the most probable continuations, with at most `size` nodes besides the root.

        `width` is the most children of a node, `threshold` the least probability of a path.
        """
        return grown_tree(self._root, self._next, size, depth, width, threshold)

    def _next(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """Returns tokens after a path with their probabilities, the most probable first."""
        found, left = dict[int, float](), 1.0
        for place, group in self._groups_at(path).items():
            share = left * self._trust.of(place, group)
            total = sum(map(len, group.values()))
            for token, occurrences in group.items():
                found[token] = found.get(token, 0.0) + share * len(occurrences) / total
            left -= share
        return sorted(found.items(), key=lambda each: -each[1])

    def _groups_at(self, path: tuple[int, ...]) -> dict[int, Group]:
        if path not in self._at:
            above = self._at[path[:-1]].values()
            alike = [each for group in above for each in group.get(path[-1], ())]
            self._at[path] = _groups(alike, len(path))
        return self._at[path]

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts which groups held the tokens that the text got, as far as the tree reaches."""
        for depth, token in enumerate(tokens):
            for place, group in self._groups_at(tuple(tokens[:depth])).items():
                self._trust.count(place, group, token in group)
                if token in group:
                    break
            else:
                break


def _groups(found: Sequence[Continuation], depth: int) -> dict[int, Group]:
    """Occurrences by place in the bins, from the longest matches to the shortest, `depth` tokens after the root."""
    groups: dict[int, Group] = {}
    for each in found:
        if depth < len(each.tokens):
            place = bisect.bisect(TUNING.history_bins, each.length + depth) - 1
            groups.setdefault(place, {}).setdefault(each.tokens[depth], []).append(each)
    return dict(sorted(groups.items(), reverse=True))
