"""An OpenAI-compatible server of one target with a drafter attached, built on transformers' serving code."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler

from ..generate.attachment import Attachment
from ..verify.registry import is_lossy
from .answers import CLIENT, ChatHandler, OneTarget, ResponsesHandler, TextHandler


class LoadedTarget(ModelManager):
    """The one model of a server, loaded before the server starts; `name` is what clients call it."""

    def __init__(self, target: Any, tokenizer: Any, name: str) -> None:
        super().__init__()
        self._target, self._tokenizer, self.force_model = target, tokenizer, name

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Any = None, tqdm_class: Any = None, gguf_file: Any = None
    ) -> tuple[Any, Any]:
        """Returns target and tokenizer; raises a ValueError if another model is requested."""
        if model_id_and_revision != self.process_model_name(str(self.force_model)):
            raise ValueError(f"this server has one model, {self.force_model!r}; found {model_id_and_revision!r}")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self._target, self._tokenizer

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        model = {"id": self.force_model, "object": "model", "created": 0, "owned_by": "hf_hsdraft"}
        return [{**model, "status": {"value": "loaded"}}]

    get_gen_models = list_models  # its name in transformers 5.23


def build_app(target: Any, tokenizer: Any, name: str, attachment: Attachment | None) -> FastAPI:
    """Builds the application for `Server`: transformers' routes and `GET /drafting`.

    `name` is what clients call the model; without an `attachment` it decodes plainly.
    """
    manager, state = LoadedTarget(target, tokenizer, name), OneTarget()
    app = build_server(
        manager,
        ChatHandler(manager, state),
        completion_handler=TextHandler(manager, state),
        response_handler=ResponsesHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    app.state.manager = state.manager
    app.add_middleware(EachRequest, attachment=attachment)

    @app.get("/drafting")
    def drafting() -> JSONResponse:
        return JSONResponse(report(attachment))

    for kind in (HTTPException, RequestValidationError, ValueError, TemplateError, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


class EachRequest:
    """Gives each request its connection, to detect a disconnect, and adds the verification rule to each response.

    `X-Verification` is `exact`, or the name of a lossy rule and `lossy`: "fly; lossy". Plain decoding is exact.
    """

    def __init__(self, app: ASGIApp, attachment: Attachment | None) -> None:
        self.app, self._attachment = app, attachment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                rule = (b"x-verification", _rule_of(self._attachment).encode())
                message["headers"] = [*message.get("headers", []), rule]
            await send(message)

        CLIENT.set(receive)
        await self.app(scope, receive, marked)


def _rule_of(attachment: Attachment | None) -> str:
    """Returns the verification rule of the next request: `exact`, or the name of a lossy rule and `lossy`."""
    rule = None if attachment is None else getattr(attachment.drafter.generation_config, "verification", None)
    return f"{rule}; lossy" if is_lossy(rule) else "exact"


class Server(uvicorn.Server):
    """A server of one application that ends running answers when it is stopped."""

    def __init__(self, app: FastAPI, log_level: str = "info") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level))
        self._manager = app.state.manager

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._manager.stop()
        await super().shutdown(sockets)
        await self._manager.idle()


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
        **{name: value for name, value in dataclasses.asdict(total).items() if name != "exact"},
        "last": None if last is None else {"tau": last.tau, "new_tokens": last.new_tokens, "lossless": last.exact},
    }


async def _answer_error(_: Request, error: Any) -> JSONResponse:
    status, message = 500, f"{type(error).__name__}: {error}"
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        status, message = 422, "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    elif isinstance(error, ValueError | TemplateError):
        status, message = 400, str(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    document = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(document, status_code=status)
