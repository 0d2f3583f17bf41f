"""Which fields of OpenAI's requests this server supports.

transformers ignores the others, and logs that once. Here a request is refused if a field that changes its answer would
be ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import HTTPException

_SAMPLING = ("model", "stream", "temperature", "top_p", "seed", "generation_config")
CHAT_FIELDS = (*_SAMPLING, "messages", "max_tokens", "max_completion_tokens", "frequency_penalty", "logit_bias", "stop",
               "tools", "chat_template_kwargs")  # fmt: skip
TEXT_FIELDS = (*_SAMPLING, "prompt", "max_tokens", "frequency_penalty", "logit_bias", "stop")
RESPONSE_FIELDS = (*_SAMPLING, "input", "instructions", "max_output_tokens", "tools", "chat_template_kwargs")

# Fields that do not affect the answer. Usage is reported whatever `stream_options` says.
_LABELS = ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
           "stream_options", "user")  # fmt: skip
_ABOUT_TOOLS = ("parallel_tool_calls", "tool_choice")
_PLAIN_TEXT = {"type": "text"}
_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {  # OpenAI's defaults, which are the behaviour here
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": (_PLAIN_TEXT,),
    "service_tier": ("auto", "default"),
    "reasoning": ({},),
    "store": (False, True),
    "suffix": ("",),
    "text": ({"format": _PLAIN_TEXT}, {}, {"format": _PLAIN_TEXT, "verbosity": "medium"}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


def check_fields(body: Mapping[str, Any], answered: Collection[str]) -> None:
    """Raises an HTTPException (400) for a field that would be ignored; `answered` are the supported ones."""
    for name, value in body.items():
        if value is None or name in answered or name in _LABELS or (name in _ABOUT_TOOLS and not body.get("tools")):
            continue
        nothing = _ASK_FOR_NOTHING.get(name, ())
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in nothing):
            expected = "".join(f"expected {json.dumps(each)}, or " for each in nothing[:1])
            raise HTTPException(
                400,
                f"`{name}` is not supported here, found {value!r}: {expected}leave it out. "
                f"This route answers to {', '.join(sorted(answered))}",
            )
