"""An OpenAI-compatible server of one target with a drafter attached, built on transformers' serving code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler

from ..batching.scheduler import ContinuousBatching
from ..generate.attachment import Attachment
from ..verify.registry import is_lossy
from . import answers, requests
from .guards import LOCAL_HOSTS, Guard, PromptServer, RequestLimits, error_response
from .metrics import Metrics
from .prompts import Grammars, Prompts
from .together import Together

_GRACE_SECONDS = 1  # that running answers have to end in, and then the decoding thread


def build_app(
    target: Any,
    tokenizer: Any,
    name: str,
    attachment: Attachment | None,
    limits: RequestLimits | None = None,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    api_key: str = "",
    client_templates: bool = False,
    max_batch_size: int = 8,
    prefix_cache_tokens: int = 4096,
) -> FastAPI:
    """Builds the application for `Server`: OpenAI's routes, `GET /health`, `GET /drafting` and `GET /metrics`.

    `name` is what clients call the model; without an `attachment` it decodes plainly, one request after another. With
    one, up to `max_batch_size` requests are decoded together, and prompts that begin alike share what was read (see
    `ContinuousBatching`). Only requests for one of the `hosts` are answered, and only with the `api_key` if there is
    one. `client_templates` allows clients to send a chat template.
    """
    limits = limits or RequestLimits()
    decoder = answers.Decoder(target, tokenizer, name, limits, attachment=attachment)
    prompts = Prompts(tokenizer, limits, client_templates)
    grammars = Grammars(target, tokenizer, limits.prompt_seconds)
    if attachment is not None and max_batch_size > 1:
        own = target, attachment.drafter, max_batch_size
        make = functools.partial(
            ContinuousBatching, *own, prefix_cache_tokens=prefix_cache_tokens, attachment=attachment
        )
        decoder.together = Together(make, decoder.thread.submit)
    chat, text, responses = (kind(None, None) for kind in (ChatCompletionHandler, CompletionHandler, ResponseHandler))
    app = FastAPI(title="hf_hsdraft", openapi_url=None)
    app.state.decoder = decoder

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: requests.ChatRequest, request: Request) -> Response:
        decoder.check(asked)
        ids, grammar = await prompts.of_chat(asked), await grammars.of(asked)
        return await decoder.respond(chat, asked, ids, request, grammar, tools=asked.nested_tools())

    @app.post("/v1/completions")
    async def completions(asked: requests.TextRequest, request: Request) -> Response:
        decoder.check(asked)
        return await decoder.respond(text, asked, await prompts.of_text(asked.prompt), request)

    @app.post("/v1/responses")
    async def respond(asked: requests.ResponsesRequest, request: Request) -> Response:
        decoder.check(asked)
        further = {"tools": asked.nested_tools(), "body": asked.model_extra or {}}
        return await decoder.respond(responses, asked, await prompts.of_chat(asked), request, **further)

    _add_reports(app, name, attachment, decoder.metrics)
    for kind in (StarletteException, RequestValidationError, ValueError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Guard, hosts=hosts, key=api_key, most=limits.max_body)
    app.add_middleware(EachRequest, attachment=attachment)
    return app


def _add_reports(app: FastAPI, name: str, attachment: Attachment | None, metrics: Metrics) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "hf_hsdraft", "status": {"value": "loaded"}}
        return {"object": "list", "data": [model]}

    @app.post("/load_model")
    async def load_model(asked: requests.LoadRequest) -> Response:
        """Says that the model is loaded, to `transformers chat`."""
        known = asked.model == name
        status = {"status": "ready", "cached": True} if known else {"status": "error", "message": "another model"}
        return Response(f"data: {json.dumps({**status, 'model': asked.model})}\n\n", media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.exported(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/drafting")
    async def drafting() -> dict[str, Any]:
        return report(attachment)


class EachRequest:
    """Names each request, and adds its name and the verification rule to the response.

    `X-Verification` is `exact`, or the name of a lossy rule and `lossy`: "fly; lossy". Plain decoding is exact.
    """

    def __init__(self, app: ASGIApp, attachment: Attachment | None) -> None:
        self.app, self._attachment = app, attachment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = str(uuid.uuid4())
        scope.setdefault("state", {})["name"] = name

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                rule = (b"x-verification", _rule_of(self._attachment).encode())
                message["headers"] = [*message.get("headers", []), rule, (b"x-request-id", name.encode())]
            await send(message)

        await self.app(scope, receive, marked)


def _rule_of(attachment: Attachment | None) -> str:
    """Returns the verification rule of the next request: `exact`, or the name of a lossy rule and `lossy`."""
    rule = None if attachment is None else getattr(attachment.drafter.generation_config, "verification", None)
    return f"{rule}; lossy" if is_lossy(rule) else "exact"


class Server(PromptServer):
    """A server of one application that ends running answers when it is stopped."""

    def __init__(self, app: FastAPI, log_level: str = "info") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=_GRACE_SECONDS))
        self._decoder = app.state.decoder

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._decoder.stopped.set()
        await super().shutdown(sockets)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._decoder.thread.async_submit(lambda: None), _GRACE_SECONDS)


def report(attachment: Attachment | None) -> dict[str, Any]:
    """Returns drafting statistics since the server started, and of the last drafted call."""
    if attachment is None:
        return {"drafting": False}
    total, last = attachment.statistics, attachment.last
    return {
        "drafting": True,
        "verification": _rule_of(attachment),
        "lossless": total.exact,
        "tau": total.tau if total.calls else None,
        **{name: value for name, value in total.totals().items() if name != "exact"},
        "last": None if last is None else {"tau": last.tau, "new_tokens": last.new_tokens, "lossless": last.exact},
    }


async def _answer_error(_: Request, error: Any) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        field, said = requests.told(error.errors()[0])
        return error_response(400, said, field or None)
    status, message, param = answers.told(error)
    return error_response(status, message, param, getattr(error, "headers", None))
