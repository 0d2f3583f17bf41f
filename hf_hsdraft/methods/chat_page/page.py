"""`hsdraft ui`: a chat page with Gradio. Drafts are coloured while they stream, beside statistics of plain decoding.

Each browser session has a separate conversation, and one thread decodes for all. The page needs nothing from outside
this machine: it uses system fonts, Gradio's analytics are off, and browsers are told to load from this server only.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.draft_tree import DraftTree
from ...serve.guards import LOCAL_HOSTS, Guard, PromptServer, RequestLimits
from .talk import Reply, ReplySettings, Talk, Talks, Turn

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
_KEYS = {"root": "last token of the round before", "accepted": "accepted", "refused": "not accepted"}
_KEYS["own"] = "the target's own token, which comes after them"
_PAIRS = [f'<span><span class="hs-key hs-key-{kind}"></span>{text}</span>' for kind, text in _KEYS.items()]
_TREE_LEGEND = f'<p class="hs-legend">{" ".join(_PAIRS)}</p>'
_SHOW, _HIDE = "Show the last trees", "Hide the trees"
_INTERVAL = 0.25  # seconds between updates of an answer; each takes time from decoding
_FONTS = ("system-ui", "Segoe UI", "Roboto", "sans-serif"), ("ui-monospace", "Menlo", "Consolas", "monospace")
# Gradio's page has inline scripts, and compiles templates to functions.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'self'; base-uri 'self'; form-action 'self'"
)


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


class ChatPage:
    """The page's components and event handlers; `blocks` is for Gradio."""

    def __init__(self, talks: Talks, title: str, defaults: ReplySettings) -> None:
        self._talks = talks
        with gr.Blocks(title="hf_hsdraft", analytics_enabled=False, fill_width=True) as self.blocks:
            gr.HTML(f"<h1>hf_hsdraft</h1><p>{escape(title)}</p>{LEGEND}", elem_id="hs-title")
            self._chat = gr.HTML(conversation_html([]), elem_id="hs-chat", max_height="46vh", autoscroll=True)
            with gr.Row(elem_id="hs-entry", equal_height=True):
                self._message = gr.Textbox(
                    placeholder="Your message", lines=1, max_lines=8, scale=8, container=False, autofocus=True,
                    elem_id="hs-message", label="Your message", show_label=False,
                )  # fmt: skip
                self._send = gr.Button("Send", variant="primary", scale=1, min_width=80, elem_id="hs-send")
                self._stop = gr.Button("Stop", scale=1, min_width=80, interactive=False, elem_id="hs-stop")
            settings = self._settings(defaults)
            with gr.Row():
                self._clear = gr.Button("Clear chat", size="sm", elem_id="hs-clear")
                self._show = gr.Button(_SHOW, size="sm", elem_id="hs-show-trees")
            self._trees = gr.HTML("", visible=False, elem_id="hs-trees")
            gr.HTML(DEFINITIONS)
            self._wire(settings)

    def _settings(self, defaults: ReplySettings) -> list[Any]:
        with gr.Row(elem_id="hs-switches"):
            draft = gr.Checkbox(defaults.draft, label="Draft", container=False, elem_id="hs-draft")
            compare = gr.Checkbox(
                defaults.compare, label="Compare with plain decoding", container=False, elem_id="hs-compare"
            )
            sample = gr.Checkbox(defaults.sample, label="Sample", container=False, elem_id="hs-sample")
        with gr.Row():
            temperature = gr.Slider(0.1, 2.0, defaults.temperature, step=0.1, label="Temperature, where it samples")
            limit = gr.Slider(
                1, 2048, defaults.max_new_tokens, step=1, label="Greatest number of new tokens", elem_id="hs-limit"
            )
        return [draft, compare, sample, temperature, limit]

    def _wire(self, settings: list[Any]) -> None:
        """Connects events to methods. Gradio's queue is not used: `Talk` queues."""
        everything = [self._chat, self._message, self._send, self._stop, self._clear, self._trees]
        quiet: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        for event in (self._message.submit, self._send.click):
            event(self._answer, [self._message, *settings], everything, **quiet)
        self._stop.click(self._end, None, None, **quiet)
        self._clear.click(self._forget, None, [self._chat, self._trees], **quiet)
        self._show.click(self._toggle_trees, None, [self._show, self._trees], **quiet)
        self.blocks.unload(self._leave)

    async def _answer(
        self,
        message: str,
        draft: bool,
        compare: bool,
        sample: bool,
        temperature: float,
        max_new_tokens: int,
        request: gr.Request,
    ) -> AsyncIterator[Any]:
        talk = self._talks.of(request.session_hash)
        try:
            talk.say(message, ReplySettings(draft, compare, sample, temperature, max_new_tokens))
        except ValueError as error:
            gr.Warning(str(error))
            yield gr.skip()
            return
        yield self._view(talk, busy=True, message="")
        shown = ""
        try:
            while talk.busy:
                await asyncio.sleep(_INTERVAL)
                html = _html_of(talk)
                if talk.busy and html != shown:
                    shown = html
                    yield html, *[gr.skip()] * 5  # unchanged parts are not sent
        finally:
            talk.stop()  # the browser has left
        failed = talk.turns[-1].error
        yield self._view(talk, busy=False, message=message if failed else None)

    def _view(self, talk: Talk, busy: bool, message: str | None) -> Any:
        """The updates of the page; `message` replaces the text of the entry field."""
        buttons = [gr.Button(interactive=not busy), gr.Button(interactive=busy), gr.Button(interactive=not busy)]
        trees = self._trees_of(talk) if talk.shows_trees and not busy else gr.skip()
        return _html_of(talk), gr.skip() if message is None else message, *buttons, trees

    def _end(self, request: gr.Request) -> None:
        self._talks.of(request.session_hash).stop()

    def _forget(self, request: gr.Request) -> Any:
        talk = self._talks.of(request.session_hash)
        try:
            talk.clear()
        except ValueError as error:
            gr.Warning(str(error))
        return _html_of(talk), self._trees_of(talk)

    def _toggle_trees(self, request: gr.Request) -> Any:
        talk = self._talks.of(request.session_hash)
        talk.shows_trees = not talk.shows_trees
        return gr.Button(_HIDE if talk.shows_trees else _SHOW), self._trees_of(talk)

    def _trees_of(self, talk: Talk) -> Any:
        return gr.HTML(trees_html(talk.turns, self._talks.word) if talk.shows_trees else "", visible=talk.shows_trees)

    def _leave(self, request: gr.Request) -> None:
        self._talks.leave(request.session_hash)


def _html_of(talk: Talk) -> str:
    return conversation_html(talk.turns, talk.busy, talk.waits)


class _FromHereOnly:
    """Middleware: forbids browsers to load from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", _POLICY.encode())
                message = {**message, "headers": [*message.get("headers", []), policy]}
            await send(message)

        await self.app(scope, receive, with_policy)


def build_app(page: ChatPage, hosts: Sequence[str]) -> FastAPI:
    """Builds the application that serves a page, for requests to these host names."""
    theme = gr.themes.Base(primary_hue="emerald", neutral_hue="slate", font=_FONTS[0], font_mono=_FONTS[1])
    dark_green = {f"button_primary_background_fill{state}": "*primary_700" for state in ("", "_dark")}
    bright_green = {f"button_primary_background_fill_hover{state}": "*primary_800" for state in ("", "_dark")}
    theme.set(**dark_green, **bright_green)
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page.blocks,
        "/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=theme,
        css_paths=Path(__file__).with_name("page.css"),
    )
    app.add_middleware(_FromHereOnly)
    app.add_middleware(Guard, hosts=hosts, key="", most=RequestLimits().max_body)  # uploads, which are no JSON, too
    return app


def page_server(page: ChatPage, listener: socket.socket, hosts: Sequence[str] = LOCAL_HOSTS) -> uvicorn.Server:
    """Returns the server of a page, for `run`. It does not wait for browsers when it ends.

    It answers to these host names only, against DNS rebinding.
    """
    return PromptServer(uvicorn.Config(build_app(page, hosts), log_level="warning", timeout_graceful_shutdown=1))


def serve_page(page: ChatPage, talks: Talks, listener: socket.socket, hosts: Sequence[str] = LOCAL_HOSTS) -> None:
    """Serves a page until the process is interrupted."""
    try:
        page_server(page, listener, hosts).run(sockets=[listener])
    finally:
        talks.close()
