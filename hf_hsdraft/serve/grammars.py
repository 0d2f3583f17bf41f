"""Grammars of answers: the `response_format` of a chat, compiled by xgrammar outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from ..runtime.prompt_inputs import end_tokens
from .requests import ChatRequest, refused

_PARAM = "response_format"
_MOST_BYTES = 64 << 20  # of compiled grammars that are kept
_MOST_SCHEMA = 1 << 16  # characters
_MOST_LATE = 2  # compilations that continue after their requests were refused


class Grammars:
    """Compiles the grammars of a server, one after another and apart from its prompts.

    A compilation cannot be interrupted: one that takes too long continues alone, and later ones do not
    wait for it.

    Args:
        seconds: that one may take, with those before it.
    """

    def __init__(self, target: Any, tokenizer: Any, seconds: float) -> None:
        self._target, self._tokenizer, self._seconds = target, tokenizer, seconds
        self._turn, self._late = asyncio.Lock(), list[threading.Thread]()
        self._compiler: Any = None

    async def of(self, asked: ChatRequest) -> Any:
        """Returns a request's compiled grammar, None for none; raises an HTTPException if there cannot be one."""
        schema = asked.schema_text
        if schema is None:
            return None
        if find_spec("xgrammar") is None:
            raise refused(_PARAM, f"`{_PARAM}` needs xgrammar, which this server does not have: leave it out")
        if len(schema) > _MOST_SCHEMA:
            raise refused(_PARAM, f"the schema has {len(schema)} characters: expected at most {_MOST_SCHEMA}")
        try:
            async with asyncio.timeout(self._seconds), self._turn:
                return await self._of_thread(schema)
        except TimeoutError:
            raise refused(_PARAM, f"`{_PARAM}` was not compiled within {self._seconds:g} s", 503) from None
        except RuntimeError as error:
            said = str(error).strip().rpartition(": ")[2]
            raise refused(_PARAM, f"xgrammar cannot compile the schema: {said}") from error

    async def _of_thread(self, schema: str) -> Any:
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= _MOST_LATE:
            raise refused(_PARAM, "earlier grammars are still being compiled: try again later", 503)
        done = Future[Any]()
        done.set_running_or_notify_cancel()

        def work() -> None:
            try:
                done.set_result(self._compiled(schema))
            except BaseException as error:
                done.set_exception(error)

        thread = threading.Thread(target=work, name="grammar", daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._late.append(thread)
            self._compiler = None  # it may be locked
            raise

    def _compiled(self, schema: str) -> Any:
        import xgrammar

        compiler = self._compiler
        if compiler is None:
            size, ends = self._target.config.get_text_config().vocab_size, sorted(end_tokens(self._target))
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=size, stop_token_ids=ends or None
            )
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MOST_BYTES)
            self._compiler = compiler
        return compiler.compile_json_schema(schema)


def constraining(grammar: Any) -> list[Any]:
    """Returns the logits processors of one answer with a compiled grammar, or None."""
    if grammar is None:
        return []
    from xgrammar.contrib.hf import LogitsProcessor

    return [LogitsProcessor(grammar)]
