"""Grammars of answers: the `response_format` of a chat, compiled by xgrammar outside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from ..runtime.prompt_inputs import end_tokens
from .requests import ChatRequest, refused

_PARAM = "response_format"
_MOST_BYTES = 64 << 20  # of compiled grammars that are kept
_MOST_SCHEMA = 1 << 16  # characters


class Grammars:
    """Compiles the grammars of a server, one after another and apart from its prompts.

    Args:
        seconds: that one may take.
    """

    def __init__(self, target: Any, tokenizer: Any, seconds: float) -> None:
        self._target, self._tokenizer, self._seconds = target, tokenizer, seconds
        self._thread = ThreadPoolExecutor(1, "grammars")
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
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, schema)
        try:
            return await asyncio.wait_for(work, self._seconds)
        except TimeoutError:
            raise refused(_PARAM, f"`{_PARAM}` was not compiled within {self._seconds:g} s", 503) from None
        except RuntimeError as error:
            said = str(error).strip().rpartition(": ")[2]
            raise refused(_PARAM, f"xgrammar cannot compile the schema: {said}") from error

    def _compiled(self, schema: str) -> Any:
        import xgrammar

        if self._compiler is None:
            size, ends = self._target.config.get_text_config().vocab_size, sorted(end_tokens(self._target))
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=size, stop_token_ids=ends or None
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MOST_BYTES)
        return self._compiler.compile_json_schema(schema)


def constraining(grammar: Any) -> list[Any]:
    """Returns the logits processors of one answer with a compiled grammar, or None."""
    if grammar is None:
        return []
    from xgrammar.contrib.hf import LogitsProcessor

    return [LogitsProcessor(grammar)]
