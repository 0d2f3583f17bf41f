"""Which functions of the package one greedy round of one text passes through."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_hsdraft
from hf_hsdraft import HSDraftConfig, HSDrafter
from hf_hsdraft.engine.loop import Observer

PACKAGE = Path(hf_hsdraft.__file__).parent
TOKENS = 24

Functions = dict[str, set[str]]  # names of the functions that ran, by file of the package


class Tracer(Observer):
    """Notes which functions of the package run, round by round. It takes the place of a streamer.

    Attributes:
        rounds: the functions from the beginning of each round to that of the next one.
    """

    def __init__(self) -> None:
        self.rounds: list[Functions] = []

    def began(self) -> None:
        self.rounds.append(defaultdict(set))
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.rounds[-1][str(path.relative_to(PACKAGE))].add(frame.f_code.co_qualname)

    def put(self, tokens: torch.Tensor) -> None:
        """Of a streamer: takes tokens."""

    def end(self) -> None:
        sys.setprofile(None)


def traced_round() -> Functions:
    """Returns the functions of a greedy round of one text, by file."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    target = AutoModelForCausalLM.from_config(config).eval()
    drafted = {"num_draft_steps": 4, "tree_size": 16, "beam_width": 5, "draft_vocab_size": 97}
    drafter = HSDrafter(HSDraftConfig.for_target(target, injector_rank=8, **drafted)).eval()
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    call = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": TOKENS}
    prompt = torch.randint(2, 97, (1, 11))
    for tracer in (Tracer(), Tracer()):  # the first call finds out what the target can do
        try:
            target.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=tracer, **call)
        finally:
            sys.setprofile(None)
    return max(tracer.rounds[1:-1], key=len)  # the last one holds the end of the call


def needed(files: Functions) -> list[str]:
    """Returns the files without those that only make the same numbers faster, which depend on the machine."""
    return sorted(file for file in files if file.split("/")[0] not in ("cpu", "gpu"))
