"""`hsdraft demo`: answers a prompt, colours the drafted tokens, and prints the figures."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..bench.measure import DEFINITIONS, encode_prompts, first_divergence
from ..drafters.base.protocol import Drafter
from ..runtime.answer_limits import room_left

_DRAFTED, _OWN = "green", "default"
_WARM_UP = 24  # number of tokens


class PieceStreamer(BaseStreamer):
    """Hands on the text of tokens as they come. The last token of each round is the target's own, others are drafted.

    Text waits for as long as its last character is incomplete.

    Attributes:
        ids: the tokens so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self._shown = 0  # number of characters
        self._prompt = True

    def show(self, text: str, drafted: bool) -> None:
        """Takes the next piece of text."""
        raise NotImplementedError

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        tokens = value.flatten().tolist()
        for index, token in enumerate(tokens):
            self.ids.append(token)
            text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            self.show(text[self._shown :], drafted=index < len(tokens) - 1)
            self._shown = len(text)

    def end(self) -> None:
        rest = self._tokenizer.decode(self.ids, skip_special_tokens=True)[self._shown :]
        self.show(rest, drafted=False)


class DraftColourStreamer(PieceStreamer):
    """Prints tokens as they come, with accepted drafts in colour."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer)
        self._console = console

    def show(self, text: str, drafted: bool) -> None:
        self._console.print(Text(text, style=_DRAFTED if drafted else _OWN), end="", soft_wrap=True)

    def end(self) -> None:
        super().end()
        self._console.print()


def _why_more(statistics: Any) -> str:
    """Why a call may have been faster, over plain decoding, than its forwards are fewer."""
    if statistics.packed_weights:
        return "rounds also multiply by packed weights, which plain generate() does not have"
    return "a forward took less time with the drafter than without, so something else slowed plain decoding down"


def run_demo(target: Any, tokenizer: Any, drafter: Drafter, prompt: str, max_new_tokens: int, console: Console) -> None:
    """Answers a prompt with the drafter and without it, and prints what the drafter gained."""
    [inputs] = encode_prompts(target, tokenizer, [prompt])
    room = room_left(target, inputs["input_ids"].shape[1])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": min(max_new_tokens, room)}
    settings["return_dict_in_generate"] = True
    # The first calls also initialise libraries, and measure what forwards and drafts cost here.
    with console.status("measuring what drafting costs on this machine"):
        for assistant in (None, drafter):
            warm_up = {**settings, "max_new_tokens": min(_WARM_UP, room)}
            target.generate(**inputs, **warm_up, assistant_model=assistant)
    console.print(Text(prompt, style="bold"), soft_wrap=True)
    console.print(f"[{_DRAFTED}]drafted and accepted[/], the target's own\n" if console.color_system else "")
    streamer = DraftColourStreamer(tokenizer, console)
    output = target.generate(**inputs, **settings, assistant_model=drafter, streamer=streamer)
    statistics = output.statistics
    timed, speeds = {}, {}
    for name, assistant in (("plain", None), ("with drafter", drafter)):  # a streamer would take time
        begin = time.perf_counter()
        timed[name] = target.generate(**inputs, **settings, assistant_model=assistant)
        seconds = time.perf_counter() - begin
        speeds[name] = (timed[name].sequences.shape[1] - inputs["input_ids"].shape[1]) / seconds
    console.print()
    forwards = statistics.target_forwards
    console.print(
        f"tau            {statistics.tau:.2f}  ({statistics.new_tokens} tokens in {forwards} target forwards)"
    )
    console.print(f"plain          {speeds['plain']:.1f} tokens/s")
    gain = speeds["with drafter"] / speeds["plain"]
    console.print(f"with drafter   {speeds['with drafter']:.1f} tokens/s, {gain:.2f} times plain (timed once)")
    if gain > statistics.tau:
        console.print(f"               more than tau: {_why_more(timed['with drafter'].statistics)}")
    divergence = first_divergence(target, inputs["input_ids"].shape[1], timed["plain"].sequences, output.sequences)
    console.print(f"same text      {'yes' if divergence is None else divergence}")
    console.print(Text(DEFINITIONS, style="dim"))
