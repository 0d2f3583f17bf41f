"""`hsdraft demo`: answers a prompt, colours the drafted tokens, and prints the measurements."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text

from ..drafters.base.protocol import Drafter
from ..engine.divergence import first_divergence
from ..runtime.prompt_inputs import encode_prompts, room_left
from .streamers import DRAFTED, DraftColourStreamer

DEFINITIONS = (
    "tau: tokens emitted per target forward, bonus included (plain decoding: 1). "
    "speed-up: tokens/s over plain generate(), same settings and process, alternating."
)
_WARM_UP = 24  # number of tokens


def _why_more(statistics: Any) -> str:
    if statistics.packed_weights:
        return "rounds also multiply by packed weights, which plain generate() does not have"
    return "a forward took less time with the drafter than without, so something else slowed plain decoding down"


def run_demo(target: Any, tokenizer: Any, drafter: Drafter, prompt: str, max_new_tokens: int, console: Console) -> None:
    """Answers a prompt with the drafter and without it, and prints the speed-up."""
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
    console.print(f"[{DRAFTED}]drafted and accepted[/], the target's own\n" if console.color_system else "")
    streamer = DraftColourStreamer(tokenizer, console)
    output = target.generate(**inputs, **settings, assistant_model=drafter, streamer=streamer)
    statistics = output.statistics
    timed, speeds = {}, {}
    for name, assistant in (("plain", None), ("with drafter", drafter)):  # without a streamer, which takes time
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
