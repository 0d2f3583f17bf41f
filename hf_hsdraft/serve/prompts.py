"""Prompts as token ids and grammars of answers, made outside the event loop: either may take seconds."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..runtime.prompt_inputs import end_tokens
from .guards import RequestLimits
from .requests import ChatRequest, Chatting, refused

# What `apply_chat_template` does besides rendering; the other names are variables of the template.
_NO_VARIABLES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
_VARIABLES = "chat_template_kwargs"
# As a file, for it needs nothing of this package; without its folder on the path.
_RENDER = [sys.executable, "-P", str(Path(__file__).with_name("render_template.py"))]
_FORMAT = "response_format"  # field of a request with a grammar
_MOST_BYTES = 64 << 20  # of compiled grammars that are kept
_MOST_SCHEMA = 1 << 16  # characters
_MOST_LATE = 2  # compilations that continue after their requests were refused


class Prompts:
    """Renders and tokenizes the prompts of a server, one after the other.

    A template that a client sends is refused unless `client_templates`. It is rendered by another process, which is
    killed when its time or memory is used up, since a template can loop.
    """

    def __init__(self, tokenizer: Any, limits: RequestLimits, client_templates: bool = False) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not thread-safe, and answers are decoded meanwhile
        self._limits, self._client_templates = limits, client_templates
        self._thread = ThreadPoolExecutor(1, "prompts")

    async def of_text(self, text: str) -> torch.Tensor:
        """Returns the ids `[1, n]` of a text; raises an HTTPException (400) if there are none."""
        return await self._timely(lambda: self._ids("prompt", text, True), "prompt")

    async def of_chat(self, asked: Chatting) -> torch.Tensor:
        """Returns the ids `[1, n]` of a request's conversation; raises an HTTPException (400)."""
        messages, tools, param = asked.chat(), asked.nested_tools(), asked.chat_param
        variables = dict(asked.chat_template_kwargs or {})
        template = variables.pop("chat_template", None)
        if wrong := sorted(_NO_VARIABLES.intersection(variables)):
            raise refused(_VARIABLES, f"`{_VARIABLES}.{wrong[0]}` is not a variable of a chat template")
        if template is not None:
            text = await asyncio.to_thread(self._rendered_apart, template, messages, tools, variables)
            return await self._timely(lambda: self._ids(param, text, False), param)

        def ids() -> torch.Tensor:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
                )
            except Exception as error:  # templates raise anything about messages that they cannot say
                raise refused(param, f"the chat template cannot render this: {error}") from error
            return self._ids(param, text, False)

        return await self._timely(ids, param)

    def _ids(self, param: str, text: str, special: bool) -> torch.Tensor:
        if len(text) > self._limits.max_prompt:
            raise refused(
                param, f"`{param}` has {len(text)} characters as a prompt: this server takes {self._limits.max_prompt}"
            )
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=special)["input_ids"]
        if not ids.numel():
            raise refused(param, f"`{param}` is empty: it has no token")
        return ids.long()

    async def _timely(self, work: Callable[[], torch.Tensor], param: str) -> torch.Tensor:
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.wait_for(done, self._limits.prompt_seconds)
        except TimeoutError:
            raise self._late(param) from None

    def _late(self, param: str) -> Exception:
        return refused(param, f"`{param}` was not rendered within {self._limits.prompt_seconds:g} s", 503)

    def _rendered_apart(self, template: Any, messages: list[Any], tools: Any, variables: dict[str, Any]) -> str:
        if not self._client_templates:
            said = f"`{_VARIABLES}.chat_template` is not taken here: a server takes it with --client-templates"
            raise refused(_VARIABLES, said)
        variables = {**self._tokenizer.special_tokens_map, **variables}
        asked = {"chat_template": template, "messages": messages, "tools": tools, "variables": variables}
        seconds = self._limits.prompt_seconds
        asked |= {"seconds": seconds, "most": self._limits.max_prompt}
        try:
            run = subprocess.run(_RENDER, input=json.dumps(asked).encode(), capture_output=True, timeout=seconds)
            answer = json.loads(run.stdout)
        except subprocess.TimeoutExpired:
            raise self._late(_VARIABLES) from None
        except ValueError:  # killed for its memory
            answer = {"error": "it takes too much time or memory"}
        if "error" in answer:
            raise refused(_VARIABLES, f"`chat_template` cannot be rendered: {answer['error']}")
        return answer["text"]


class Grammars:
    """Compiles the grammars of a server with xgrammar, one after another and apart from its prompts.

    A compilation cannot be interrupted: one that takes too long continues alone, and later ones do not
    wait for it.

    Args:
        seconds: that one may take, with those before it.
    """

    def __init__(self, target: Any, tokenizer: Any, seconds: float) -> None:
        self._target, self._tokenizer, self._seconds = target, tokenizer, seconds
        self._turn, self._late, self._thread = asyncio.Lock(), list[Future[Any]](), ThreadPoolExecutor(1, "grammars")
        self._compiler: Any = None

    async def of(self, asked: ChatRequest) -> Any:
        """Returns a request's compiled grammar, None for none; raises an HTTPException if there cannot be one."""
        schema = asked.schema_text
        if schema is None:
            return None
        if find_spec("xgrammar") is None:
            raise refused(_FORMAT, f"`{_FORMAT}` needs xgrammar, which this server does not have: leave it out")
        if len(schema) > _MOST_SCHEMA:
            raise refused(_FORMAT, f"the schema has {len(schema)} characters: expected at most {_MOST_SCHEMA}")
        try:
            async with asyncio.timeout(self._seconds), self._turn:
                return await self._of_thread(schema)
        except TimeoutError:
            raise refused(_FORMAT, f"`{_FORMAT}` was not compiled within {self._seconds:g} s", 503) from None
        except RuntimeError as error:
            said = str(error).strip().rpartition(": ")[2]
            raise refused(_FORMAT, f"xgrammar cannot compile the schema: {said}") from error

    async def _of_thread(self, schema: str) -> Any:
        self._late = [each for each in self._late if not each.done()]
        if len(self._late) >= _MOST_LATE:
            raise refused(_FORMAT, "earlier grammars are still being compiled: try again later", 503)
        done = self._thread.submit(self._compiled, schema)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._late.append(done)
            self._compiler = None  # it may be locked
            self._thread = ThreadPoolExecutor(1, "grammars")
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
