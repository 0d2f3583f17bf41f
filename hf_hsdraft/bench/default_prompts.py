"""The prompts of `hsdraft bench` where the user names no file. They are few: enough for a first look, for no figure."""

from __future__ import annotations

from ..training.data.conversations import Prompt

DEFAULT_PROMPTS = tuple(
    Prompt.of([text], category)
    for category, text in (
        ("mathematics", "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Explain each step."),
        ("writing", "Write a short letter to a neighbour who has lost a grey cat."),
        ("facts", "What is the difference between weather and climate?"),
        ("code", "Write a Python function that returns the words of a text, each with how often it occurs."),
        ("rewriting", "Rewrite as one sentence: The bridge is old. It is narrow. Trucks may not cross it."),
        ("lists", "List five things to pack for two days of hiking in the rain, each with a reason."),
    )
)
NOTE = f"no --prompts given: {len(DEFAULT_PROMPTS)} prompts that come with the package"
