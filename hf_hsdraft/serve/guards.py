"""What a server refuses before it reads a request, and the limits of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.checks import demand

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_LINGER_SECONDS = 5.0  # in which the rest of a refused body is read and dropped
_READ_SECONDS = 60.0  # that a body may take to come in
_END_SECONDS = 4.0  # after which a signal ends the process, whatever still runs


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a server's requests."""

    max_body: int = 2 << 20  # bytes of a request
    max_prompt: int = 1 << 20  # characters of a prompt, in the chat template
    prompt_seconds: float = 30.0  # for a prompt to be rendered and tokenized
    max_stops: int = 4  # stop strings
    max_stop: int = 256  # characters of a stop string
    max_beams: int = 8
    max_requests: int = 256  # that are decoded or wait

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            demand(value > 0, field.name, value, "expected a positive number")


def allowed_hosts(host: str, further: Sequence[str] = ()) -> list[str]:
    """Returns the names that a server at `host` answers to: local ones, `host` and `further`; `*` is any."""
    own = f"[{host}]" if ":" in host else host
    return [*dict.fromkeys((*LOCAL_HOSTS, own, *further))]


def error_document(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns an error as OpenAI's clients parse it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    document = error_document(status, message.encode(errors="replace").decode(), param)
    return JSONResponse(document, status_code=status, headers=dict(headers or {}))


class PromptServer(uvicorn.Server):
    """A server that a signal ends within 5 s: a forward or a tokenizer cannot be interrupted."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        end = threading.Timer(_END_SECONDS, os._exit, (128 + sig,))
        end.daemon = True
        end.start()


class Guard:
    """Middleware: refuses requests without the key, posts that are not JSON, and bodies of more than `most` bytes.

    A browser sends a JSON post for a page from elsewhere only after the server has agreed, which this one never does.
    `/health` needs no key; an empty `key` is none. A body that is too long or comes in too slowly is an HTTPException
    for the application, as soon as that is known. The rest of a long one is read and dropped, so that its sender sees
    the answer.
    """

    def __init__(self, app: ASGIApp, key: str, most: int) -> None:
        self.app, self._key, self._most = app, key.encode(), most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refusal := self._refusal(scope):
            return await refusal(scope, receive, send)
        until, taken, too_long = time.monotonic() + _READ_SECONDS, 0, False
        length = int(Headers(scope=scope).get("content-length") or 0)

        async def timely() -> Message:
            nonlocal until, taken
            if max(length, taken) > self._most:
                raise HTTPException(413, f"the request is too long: this server takes {self._most} bytes")
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic() if until else None)
            except TimeoutError:
                raise HTTPException(408, f"the request did not come in within {_READ_SECONDS:.0f} s") from None
            taken += len(message.get("body", b""))
            if not message.get("more_body"):
                until = 0.0  # it has been read: what comes next is that the client leaves
            return message

        async def lingering(message: Message) -> None:
            nonlocal too_long
            if message["type"] == "http.response.start" and message["status"] == 413:
                too_long = True
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif too_long and not message.get("more_body"):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_dropped(receive), _LINGER_SECONDS)
                message = {"type": "http.response.body"}
            await send(message)

        await self.app(scope, timely, lingering)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        if self._key and not known and scope["path"] != "/health":
            said = "this server needs its API key: send the header `Authorization: Bearer KEY`"
            return error_response(401, said, headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and kind != "application/json":
            return error_response(415, f"found the content type {kind[:60]!r}: expected application/json")
        return None


async def _dropped(receive: Receive) -> None:
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
