"""Prompts as token ids, made outside the event loop: a long one takes seconds."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .guards import RequestLimits
from .requests import Chatting, refused

# What `apply_chat_template` does besides rendering; the other names are variables of the template.
_NO_VARIABLES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
_VARIABLES = "chat_template_kwargs"
# As a file, for it needs nothing of this package; without its folder on the path.
_RENDER = [sys.executable, "-P", str(Path(__file__).with_name("render_template.py"))]


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
