"""What `hsdraft try` and `hsdraft demo` do once target and drafter are loaded."""

from __future__ import annotations

import html
import io
import platform
import re
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich import box
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._version import __version__
from ..bench.calls import processor
from ..core.processors import LEAST_SHARE
from ..core.progress import working
from ..core.statistics import DraftStatistics
from ..runtime.misreading import first_divergence
from ..runtime.prompt_inputs import encode_prompts, room_left
from ..serve.conversation import DRAFTED, OWN, DraftColourStreamer

_LATER = "dim"
_SHORTEST, _LONGEST, _SECONDS = 24, 64, 20.0  # tokens of a text by default; seconds for all texts, decoded plainly
_FIRST_CALLS = 3  # drafted calls at most before the timed ones, on CPUs until weights are packed
_WIDTH = 110  # columns of a picture
_WORSE, _SPREAD, _DOUBT = 0.95, 3.0, 1.5  # speed-up of a loss; factors between prompts, and to the costs of rounds
_TINY = 0.005  # seconds of a forward, below which Python counts
DEFINITIONS = (
    "tau: tokens emitted per target forward, bonus included (plain: 1). plain: generate() without a drafter, same "
    "settings and process. tokens/s: new tokens over the seconds of one call. same text: whether both texts are equal."
)


def machine(device: str | torch.device) -> dict[str, str]:
    """Returns versions and processor, as `hsdraft env` prints them."""
    return {
        "hf_hsdraft": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": processor(torch.device(device)),
        "threads": str(torch.get_num_threads()),
    }


@dataclass
class Side:
    """A text of one of the two sides."""

    pieces: list[tuple[str, bool, int]]
    tokens: int
    seconds: float
    statistics: DraftStatistics | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _, _ in self.pieces)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def forwards(self) -> int:
        """Forwards of the target: without drafts one a token."""
        return self.tokens if self.statistics is None else self.statistics.target_forwards

    def coloured(self, forwards: int) -> Text:
        """The text with accepted drafts coloured, and tokens that later forwards emit dimmed."""
        shown = Text()
        for text, drafted, tokens in self.pieces:
            late = self.statistics is None and tokens > forwards
            shown.append(text, style=_LATER if late else DRAFTED if drafted else OWN)
        return shown


@dataclass
class Tried:
    """A prompt and its two texts; `divergence` says where they differ, empty if they are equal."""

    prompt: str
    plain: Side
    drafted: Side
    divergence: str

    @property
    def gain(self) -> float:
        return self.drafted.speed / self.plain.speed


@dataclass
class Trial:
    """All that `hsdraft try` found out."""

    target: str
    drafter: str
    why: str
    code: list[str]
    machine: dict[str, str]
    tried: list[Tried] = field(default_factory=list)

    @property
    def totals(self) -> DraftStatistics:
        return DraftStatistics.sum(each.drafted.statistics for each in self.tried if each.drafted.statistics)

    @property
    def gains(self) -> list[float]:
        return [each.gain for each in self.tried]

    @property
    def verdict(self) -> str:
        """A sentence where drafting does not pay here, or where that cannot be told; else empty."""
        totals, plain = self.totals, sum(each.plain.seconds for each in self.tried)
        known = totals.prefill_seconds + (totals.plain_seconds or 0.0) * (totals.new_tokens - totals.calls)
        # Packed or compiled layers, a GPU's graphs and a tiny target's Python make plain decoding slower.
        slower = totals.packed_weights or totals.compiled_layers or totals.processor_share is None
        slower = slower or (totals.plain_seconds or 0.0) < _TINY
        wrong = bool(totals.plain_seconds) and (known > _DOUBT * plain or (plain > _DOUBT * known and not slower))
        fair = [each.gain * each.drafted.forwards / each.drafted.tokens for each in self.tried]  # whatever was accepted
        slow = statistics.median(self.gains) < _WORSE
        shares = [each.drafted.statistics.processor_share for each in self.tried if each.drafted.statistics]
        held_up = any((share or 1.0) < LEAST_SHARE for share in shares)
        if wrong or max(fair) > _SPREAD * min(fair) or (slow and held_up):
            return "The timings are unreliable: the machine was busy."
        return "Drafting is slower than plain decoding here: do not use it on this machine." if slow else ""

    def document(self) -> dict[str, Any]:
        """All of it, as JSON."""
        sides = [
            {
                "prompt": each.prompt,
                "same_text": not each.divergence,
                "divergence": each.divergence,
                "speed_up": each.gain,
                **{
                    name: {"text": side.text, "tokens": side.tokens, "seconds": side.seconds}
                    for name, side in (("plain", each.plain), ("drafted", each.drafted))
                },
                "tau": each.drafted.statistics.tau if each.drafted.statistics else None,
            }
            for each in self.tried
        ]
        found = vars(self) | {"tried": sides, "tau": self.totals.tau, "explanation": self.totals.explain()}
        found["verdict"] = self.verdict
        return found | {"speed_up": statistics.median(self.gains), "spread": [min(self.gains), max(self.gains)]}

    def picture(self, command: str) -> str:
        """An SVG of the last prompt's texts after the drafted one's forwards; `command` made it.

        It shows forwards, not seconds, so that it is about the model and not about a machine.
        """
        each = self.tried[-1]
        forwards, tau = each.drafted.forwards, each.drafted.tokens / each.drafted.forwards
        table = Table(box=box.SIMPLE, expand=True, padding=(0, 1))
        table.add_column(f"plain: {each.plain.forwards} target forwards", ratio=1)
        table.add_column(f"with drafts: {forwards} target forwards, {tau:.2f} tokens each", ratio=1)
        table.add_row(each.plain.coloured(forwards), each.drafted.coloured(forwards))
        canvas = Console(record=True, width=_WIDTH, file=io.StringIO(), color_system="truecolor", legacy_windows=False)
        canvas.print(Text(f"> {each.prompt}", style="bold"))
        canvas.print(table)
        key = Text.assemble(("drafted and accepted", DRAFTED), ", the target's own, ", ("not there yet", _LATER))
        canvas.print(Text.assemble(key, f" after {forwards} forwards"))
        without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # of other servers
        drawn = canvas.export_svg(title=f"hsdraft try {self.target}", code_format=without_fonts, unique_id="hsdraft")
        head, rest = drawn.split(">", 1)
        return f"{head}>\n<desc>{html.escape(command)}</desc>{rest}"


def decode(
    trial: Trial, model: Any, tokenizer: Any, drafter: Any, prompts: list[str], most: int | None, out: Console
) -> None:
    """Decodes each prompt with and without the drafter, and shows the drafted text while it comes.

    Raises a ValueError before anything is decoded if a prompt fills the context window.
    """
    calls: list[dict[str, Any]] = []
    for inputs in encode_prompts(model, tokenizer, prompts):
        limit = min(most or _LONGEST, room_left(model, inputs["input_ids"].shape[1]))
        calls.append({**inputs, "do_sample": False, "max_new_tokens": limit, "return_dict_in_generate": True})
    with working("first calls, which take longer: trying what decoding costs here"):
        short = calls[0] | {"max_new_tokens": min(_SHORTEST, calls[0]["max_new_tokens"]), "eos_token_id": None}
        model.generate(**short | {"max_new_tokens": 1})  # the first forward of a process is slow
        affordable = int(_decoded(model, short, None, DraftColourStreamer(tokenizer))[0].speed * _SECONDS / len(calls))
        for _ in range(_FIRST_CALLS):  # not shortened: short ones would pack no weights
            output = model.generate(**calls[0], assistant_model=drafter)
            if model.device.type != "cpu" or output.statistics.packed_weights:
                break
    for call in calls if most is None else ():
        call["max_new_tokens"] = min(call["max_new_tokens"], max(_SHORTEST, affordable))
    for number, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
        out.print(Text(prompt, style="bold"), soft_wrap=True)
        sides, outputs = dict[bool, Side](), dict[bool, Any]()
        for drafts in (True, False) if number % 2 == 0 else (False, True):
            if drafts:
                sides[True], outputs[True] = _decoded(model, call, drafter, DraftColourStreamer(tokenizer, out))
                out.print("\n")
            else:
                with working(f"the same without drafts ({number + 1} of {len(prompts)})"):
                    sides[False], outputs[False] = _decoded(model, call, None, DraftColourStreamer(tokenizer))
        length = call["input_ids"].shape[1]
        found = first_divergence(model, length, outputs[False].sequences, outputs[True].sequences)
        trial.tried.append(Tried(prompt, sides[False], sides[True], "" if found is None else str(found)))


def _decoded(model: Any, call: dict[str, Any], drafter: Any, streamer: DraftColourStreamer) -> tuple[Side, Any]:
    begin = time.perf_counter()
    output = model.generate(**call, assistant_model=drafter, streamer=streamer)
    seconds, tokens = time.perf_counter() - begin, output.sequences.shape[1] - call["input_ids"].shape[1]
    return Side(streamer.pieces, tokens, seconds, getattr(output, "statistics", None)), output


def report(trial: Trial, out: Console) -> None:
    """Prints what was found."""
    table = Table("prompt", "tau", "plain, tokens/s", "drafted, tokens/s", "speed-up", "same text", box=box.SIMPLE)
    for number, each in enumerate(trial.tried, 1):
        assert each.drafted.statistics is not None
        speeds = f"{each.plain.speed:.1f}", f"{each.drafted.speed:.1f}", f"{each.gain:.2f}"
        table.add_row(f"{number}", f"{each.drafted.statistics.tau:.2f}", *speeds, each.divergence or "yes")
    out.print(table)
    spread = f" ({min(trial.gains):.2f} to {max(trial.gains):.2f})" if len(trial.gains) > 1 else " (one prompt)"
    same = sum(not each.divergence for each in trial.tried)
    totals = trial.totals
    rows = {
        "speed-up": f"{statistics.median(trial.gains):.2f} times plain{spread}",
        "same text": "yes" if same == len(trial.tried) else f"{same} of {len(trial.tried)}",
        "tau": f"{totals.tau:.2f}  ({totals.new_tokens} tokens in {totals.target_forwards} target forwards)",
    }
    if statistics.median(trial.gains) > totals.tau:
        rows[""] = f"the speed-up is greater than tau: {_why_more(totals)}"
    rows["drafter"] = f"{trial.drafter}: {trial.why}"
    for title, value in rows.items():
        out.print(f"{title:12}{value}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"\n{totals.explain()}\n", markup=False, highlight=False)
    if verdict := trial.verdict:
        out.print(f"{verdict}\n", markup=False, highlight=False, soft_wrap=True)
    for line in () if "do not use" in verdict else trial.code:
        out.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    out.print()
    out.print(Text(DEFINITIONS, style="dim"))


def _why_more(totals: DraftStatistics) -> str:
    used = {"packed weights": totals.packed_weights, "compiled layers": totals.compiled_layers}
    if names := " and ".join(name for name, was in used.items() if was):
        return f"rounds also have {names}, which plain generate() does not have"
    return "a forward took less time with the drafter than without, so something else slowed plain decoding down"
