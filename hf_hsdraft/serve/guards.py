"""What a server refuses before it reads a request, and the limits of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.checks import demand, printable

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
    """Middleware: refuses hosts that are not allowed, requests without the key, posts that are not JSON, long bodies.

    A browser sends a JSON post for a page from elsewhere only after the server has agreed, which this one never does.
    `/health` needs no key; an empty `key` is none. The application gets a body once all of it has come in.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], key: str, most: int) -> None:
        self.app, self._hosts, self._key, self._most = app, [host.lower() for host in hosts], key.encode(), most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refusal := self._refusal(Headers(scope=scope), scope):
            return await refusal(scope, receive, send)
        body = await self._body(receive)
        if isinstance(body, JSONResponse):
            return await body(scope, receive, send)
        waiting: list[Message] = [{"type": "http.request", "body": body}]

        async def received() -> Message:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, received, send)

    async def _body(self, receive: Receive) -> bytes | JSONResponse:
        """Reads a body. The rest of one that is too long is dropped, so that its sender sees the answer."""
        body, more, now = bytearray(), True, asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_SECONDS) as limit:
                while more:
                    message = await receive()
                    more = message.get("more_body", False)
                    if len(body) <= self._most:
                        body += message.get("body", b"")
                        if len(body) > self._most:
                            limit.reschedule(now() + _LINGER_SECONDS)
        closing = {"Connection": "close"}
        if len(body) > self._most:
            said = f"the request is too long: this server takes {self._most} bytes"
            return error_response(413, said, headers=closing)
        if more:
            return error_response(408, f"the request did not come in within {_READ_SECONDS:.0f} s", headers=closing)
        return bytes(body)

    def _refusal(self, headers: Headers, scope: Scope) -> JSONResponse | None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if not any(host == each or (each[:1] == "*" and host.endswith(each[1:])) for each in self._hosts):
            return error_response(400, f"this server does not answer to the host {printable(host, 60)!r}")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        if self._key and not known and scope["path"] != "/health":
            said = "this server needs its API key: send the header `Authorization: Bearer KEY`"
            return error_response(401, said, headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and kind != "application/json":
            return error_response(415, f"found the content type {kind[:60]!r}: expected application/json")
        return None
