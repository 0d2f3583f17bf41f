"""The prompts of `hsdraft bench` if you name no file: enough for a first look, too few for a figure."""

from __future__ import annotations

from importlib import resources

from ..training.data.conversations import read_prompts

with resources.as_file(resources.files(__package__) / "default_prompts.jsonl") as _file:
    DEFAULT_PROMPTS = tuple(read_prompts(_file))
NOTE = f"no --prompts given: {len(DEFAULT_PROMPTS)} prompts that come with the package"
