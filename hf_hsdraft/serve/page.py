"""`hsdraft ui`: a chat page with Gradio. Drafts are coloured while they stream, beside statistics of plain decoding.

Each browser session has a separate conversation, and one thread decodes for all. The page needs nothing from outside
this machine: it uses system fonts, Gradio's analytics are off, and browsers are told to load from this server only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .guards import LOCAL_HOSTS, Guard, PromptServer, RequestLimits
from .page_html import DEFINITIONS, LEGEND, conversation_html, trees_html
from .talk import ReplySettings, Talk, Talks

_SHOW, _HIDE = "Show the last trees", "Hide the trees"
_INTERVAL = 0.25  # seconds between updates of an answer; each takes time from decoding
_FONTS = ("system-ui", "Segoe UI", "Roboto", "sans-serif"), ("ui-monospace", "Menlo", "Consolas", "monospace")
# Gradio's page has inline scripts, and compiles templates to functions.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'self'; base-uri 'self'; form-action 'self'"
)


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
