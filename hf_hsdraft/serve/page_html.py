"""The parts of the page as HTML, and draft trees as lists. All texts of users and models are escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby

from ..core.draft_tree import DraftTree
from .talk import Reply, Turn

_LONGEST = 16  # characters of a label
TAU = "tokens emitted per target forward, the bonus token included; plain decoding has 1"
SPEED = "new tokens per second of generate(), the prompt's forward included"
SPEED_UP = "tokens/s with the drafter over tokens/s of plain generate()"
SAME = "whether plain generate() gives the same tokens"
DEFINITIONS = f"""<dl class="hs-definitions">
<dt>tau</dt><dd>{TAU}.</dd>
<dt>tokens/s</dt><dd>{SPEED}. Each answer is timed once.</dd>
<dt>speed-up</dt><dd>{SPEED_UP}. Both get the same message, options and cache, one after the other.</dd>
</dl>"""
LEGEND = '<p class="hs-legend"><mark>drafted and accepted</mark> <span>the target\'s own</span></p>'
_EMPTY = '<p class="hs-empty">Write a message below. Accepted drafts are coloured while the answer streams.</p>'


def conversation_html(turns: Sequence[Turn], busy: bool = False, waits: bool = False) -> str:
    """Returns all turns of a conversation; `busy` and `waits` are about the last one, see `turn_html`."""
    if not turns:
        return f'<div class="hs-turns">{_EMPTY}</div>'
    *earlier, last = turns
    shown = [*map(turn_html, earlier), turn_html(last, busy, waits)]
    return f'<div class="hs-turns">{"".join(shown)}</div>'


def turn_html(turn: Turn, busy: bool = False, waits: bool = False) -> str:
    """Returns a message with its answer, statistics and notes; `waits` is about the answers of other sessions."""
    parts = [f'<div class="hs-message">{escape(turn.message)}</div>']
    if turn.reply is not None and (turn.reply.pieces or not turn.error):
        parts.append(f'<div class="hs-answer">{pieces_html(turn.reply.pieces)}</div>')
        parts.append(figures_html(turn, busy))
    if turn.plain is not None and turn.plain.ids and (turn.plain.answer is None or turn.difference is not None):
        parts.append(_plain_html(turn, turn.plain))
    if waits:
        parts.append('<p class="hs-note">Another conversation is being answered. This message waits for its turn.</p>')
    if turn.error:
        answered = turn.reply is not None and turn.reply.answer is not None
        what = "There is no plain answer to compare with" if answered else "This message is forgotten"
        parts.append(f'<p class="hs-error" role="alert">{what}: {escape(turn.error)}</p>')
    elif turn.stopped:
        parts.append('<p class="hs-note">Stopped.</p>')
    elif turn.reply is not None and turn.reply.answer is not None and turn.reply.answer.cut:
        parts.append('<p class="hs-note">The limit of new tokens ended this answer.</p>')
    return f'<section class="hs-turn">{"".join(parts)}</section>'


def pieces_html(pieces: Iterable[tuple[str, bool]]) -> str:
    found = []
    for drafted, run in groupby(list(pieces), key=lambda piece: piece[1]):
        text = escape("".join(text for text, _ in run))
        found.append(f"<mark>{text}</mark>" if drafted and text else text)
    return "".join(found)


def figures_html(turn: Turn, busy: bool = False) -> str:
    """Returns the statistics of an answer; while it is decoded, its speed so far."""
    reply, plain = turn.reply, turn.plain
    if reply is None or not reply.ids:
        return ""
    statistics = reply.answer.statistics if reply.answer else None
    figures = []
    if statistics is not None:
        figures.append(_figure("tau", f"{statistics.tau:.2f}", TAU))
    name = "tokens/s, drafted" if turn.drafts else "tokens/s, plain"
    figures.append(_figure(name, f"{reply.speed:.1f}", SPEED))
    if plain is not None and plain.ids:
        figures.append(_figure("tokens/s, plain", f"{plain.speed:.1f}", SPEED))
    if reply.answer and plain is not None and plain.answer and not turn.stopped and not busy:
        figures.append(_figure("speed-up", f"{reply.speed / plain.speed:.2f}", SPEED_UP))
        figures.append(_figure("same text", "yes" if turn.difference is None else "no", SAME))
    number = f"{len(reply.ids)} token{'' if len(reply.ids) == 1 else 's'}"
    if statistics is not None:
        number += f", {sum(statistics.accepted_lengths)} of them drafted"
        number += "" if statistics.exact else ", lossy verification"
    return f'<div class="hs-figures">{"".join(figures)}<span class="hs-number">{number}</span></div>'


def _figure(name: str, value: str, definition: str) -> str:
    return f'<span class="hs-figure" title="{escape(definition)}"><b>{value}</b><small>{name}</small></span>'


def _plain_html(turn: Turn, plain: Reply) -> str:
    """The text of plain decoding, while it streams and where it differs."""
    if plain.answer is None:
        title = "Plain decoding of the same message"
    elif turn.stopped:
        title = "Plain decoding, stopped"
    else:
        title = f"Plain decoding. The texts differ from new token {turn.difference} on"
    return f'<div class="hs-plain"><small>{title}</small>{pieces_html(plain.pieces)}</div>'


def trees_html(turns: Sequence[Turn], word: Callable[[int], str]) -> str:
    """Returns the trees of the last rounds of the last drafted answer; `word` gives the text of a token."""
    drafted = (turn.reply for turn in reversed(turns) if turn.drafts and turn.reply is not None and turn.reply.rounds)
    reply = next(drafted, None)
    if reply is None:
        return '<div class="hs-trees"><p class="hs-note">There is no drafted answer with rounds yet.</p></div>'
    figures = []
    for number, done in list(reply.rounds):
        tree, accepted, tokens = done.trees[0], done.accepted[0], done.news[0].tokens
        text = f"Round {number}: {accepted} of {len(tree) - 1} drafted tokens accepted"
        if len(tree) == 1:
            text = f"Round {number}: nothing was drafted"
        figures.append(f"<figure><figcaption>{text}</figcaption>{tree_html(tree, accepted, tokens, word)}</figure>")
    return f'<div class="hs-trees">{_TREE_LEGEND}{"".join(figures)}</div>'


_TREE_LEGEND = (
    '<p class="hs-legend"><span class="hs-key hs-key-root"></span>last token of the round before '
    '<span class="hs-key hs-key-accepted"></span>accepted <span class="hs-key hs-key-refused"></span>not accepted '
    '<span class="hs-key hs-key-own"></span>the target\'s own token, which comes after them</p>'
)


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


def tree_html(tree: DraftTree, accepted: int, tokens: Sequence[int], word: Callable[[int], str]) -> str:
    """Returns a round's tree as nested lists: beside each node what follows it, the emitted tokens first.

    The round emitted `tokens`, of which `accepted` are the tree's.
    """
    path, children = accepted_path(tree, tokens, accepted), tree.children()

    def item(token: int, kind: str, tip: str, following: str = "") -> str:
        label = f'<span title="{tip}">{escape(label_of(word(token)))}</span>'
        return f'<li class="hs-{kind}">{label}{following and f"<ul>{following}</ul>"}</li>'

    def after(node: int) -> str:
        nodes = sorted(children[node].values(), key=lambda child: child not in path)
        found = [
            item(
                tree.tokens[child],
                "accepted" if child in path else "refused",
                f"drafted with probability {math.exp(tree.scores[child]):.3f}",
                after(child),
            )
            for child in nodes
        ]
        if node == (path[-1] if path else 0) and len(tokens) > accepted:  # not if the text ended with a drafted token
            found.insert(0, item(tokens[accepted], "own", "the target's own token"))
        return "".join(found)

    root = item(tree.tokens[0], "root", "last token of the round before", after(0))
    return f'<ul class="hs-tree">{root}</ul>'
