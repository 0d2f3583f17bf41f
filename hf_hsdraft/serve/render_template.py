"""Renders a chat template that a client sent, as a process that cannot take much time or memory."""

from __future__ import annotations

import json
import math
import resource
import sys

MOST_MEMORY = 1 << 30  # bytes


def main() -> None:
    asked = json.load(sys.stdin)
    seconds = math.ceil(asked["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    try:
        [text], _ = render_jinja_template(
            [asked["messages"]],
            tools=asked["tools"],
            chat_template=asked["chat_template"],
            add_generation_prompt=True,
            **asked["variables"],
        )
        answer = {"text": text} if len(text) <= asked["most"] else {"error": f"it makes {len(text)} characters"}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
