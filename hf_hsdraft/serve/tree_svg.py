"""A draft tree as an image: the root at the left, a column for each depth, the accepted path marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..core.draft_tree import DraftTree

_ROW, _HEIGHT, _GAP, _CHAR, _PAD = 28, 22, 26, 7.3, 8  # pixels; a character of the monospaced font is 12 px high
_LONGEST = 16  # characters of a label


@dataclass(frozen=True)
class Box:
    """A node of the image; `kind` is `root`, `accepted`, `refused`, or `own` for the target's own token."""

    label: str
    kind: str
    tip: str
    column: int
    row: float
    parent: int


def label_of(text: str) -> str:
    """Returns the text of a token with visible spaces, shortened if it is long."""
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def accepted_path(tree: DraftTree, tokens: Sequence[int], accepted: int) -> list[int]:
    """Returns the nodes of the first `accepted` emitted tokens, from the root's child on."""
    children, node, path = tree.children(), 0, []
    for token in tokens[:accepted]:
        node = children[node][token]
        path.append(node)
    return path


def boxes_of(tree: DraftTree, accepted: int, tokens: Sequence[int], word: Callable[[int], str]) -> list[Box]:
    """Returns the boxes of a round: the tree's nodes in order, then the target's own token.

    Args:
        accepted: number of the tree's tokens that were emitted.
        tokens: emitted by the round.
        word: returns the text of a token.
    """
    path = accepted_path(tree, tokens, accepted)
    parents, labels = list(tree.parents), list(tree.tokens)
    kinds = ["accepted" if node in path else "refused" for node in range(len(tree))]
    tips = [f"drafted with probability {math.exp(score):.3f}" for score in tree.scores]
    kinds[0], tips[0] = "root", "last token of the round before"
    if len(tokens) > accepted:  # not if the text ended with a drafted token
        parents.append(path[-1] if path else 0)
        labels.append(tokens[accepted])
        kinds.append("own")
        tips.append("the target's own token")
    columns = [0] * len(parents)
    for node in range(1, len(parents)):
        columns[node] = columns[parents[node]] + 1
    rows = _rows(parents, kinds)
    return [
        Box(label_of(word(labels[node])), kinds[node], tips[node], columns[node], rows[node], parents[node])
        for node in range(len(parents))
    ]


def _rows(parents: Sequence[int], kinds: Sequence[str]) -> list[float]:
    """Places from the top: leaves below each other, the emitted path first; a parent beside its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    rows, free = [0.0] * len(parents), 0
    stack, order = [0], []
    while stack:
        node = stack.pop()
        order.append(node)
        stack += sorted(children[node], key=lambda child: kinds[child] == "refused", reverse=True)
    for node in order:
        if not children[node]:
            rows[node], free = free, free + 1
    for node in reversed(order):
        if children[node]:
            rows[node] = min(rows[child] for child in children[node])
    return rows


def round_svg(tree: DraftTree, accepted: int, tokens: Sequence[int], word: Callable[[int], str]) -> str:
    boxes = boxes_of(tree, accepted, tokens, word)
    widths = [0.0] * (max(box.column for box in boxes) + 1)
    for box in boxes:
        widths[box.column] = max(widths[box.column], len(box.label) * _CHAR + 2 * _PAD)
    lefts = [sum(widths[:column]) + _GAP * column for column in range(len(widths))]
    width, height = lefts[-1] + widths[-1] + 2, (max(box.row for box in boxes) + 1) * _ROW
    lines, nodes = [], []
    for box in boxes:
        x, y = lefts[box.column] + 1, box.row * _ROW + 2
        own = len(box.label) * _CHAR + 2 * _PAD
        if box.parent >= 0:
            parent = boxes[box.parent]
            begin = lefts[parent.column] + 1 + len(parent.label) * _CHAR + 2 * _PAD
            lines.append(_line(begin, parent.row * _ROW + 2 + _HEIGHT / 2, x, y + _HEIGHT / 2, box.kind))
        nodes.append(
            f'<g class="hs-node hs-{box.kind}"><title>{escape(box.tip)}</title>'
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{own:.1f}" height="{_HEIGHT}" rx="5"/>'
            f'<text x="{x + own / 2:.1f}" y="{y + 15:.1f}" text-anchor="middle">{escape(box.label)}</text></g>'
        )
    return (
        f'<svg class="hs-tree" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(lines)}{"".join(nodes)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    middle = x2 - _GAP / 2
    path = f"M{x1:.1f} {y1:.1f}H{middle:.1f}V{y2:.1f}H{x2:.1f}"
    return f'<path class="hs-line hs-{kind}" d="{path}"/>'
