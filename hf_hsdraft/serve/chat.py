"""`hsdraft chat` and `hsdraft demo`: answers in the terminal, drafted tokens coloured, with statistics."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..core.progress import working
from ..drafters.base.protocol import Drafter
from ..runtime.misreading import first_divergence
from ..runtime.prompt_inputs import encode_prompts, room_left
from .conversation import Answer, Conversation, PieceStreamer

DRAFTED, _OWN = "green", "default"
HELP = """/clear   forget the conversation
/plain   answer without the drafter
/draft   answer with the drafter again
/help    these lines
/exit    leave (also Ctrl-D); Ctrl-C ends an answer"""
_WARM_UP = 24  # tokens
DEFINITIONS = (
    "tau: tokens emitted per target forward, bonus included (plain: 1). plain: generate() without a drafter, same "
    "settings and process. tokens/s: new tokens over the seconds of one call, made after the text above. same text: "
    "whether the text above is plain generate()'s."
)


class DraftColourStreamer(PieceStreamer):
    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer)
        self._console = console

    def show(self, text: str, drafted: bool) -> None:
        self._console.print(Text(text, style=DRAFTED if drafted else _OWN), end="", soft_wrap=True)

    def end(self) -> None:
        super().end()
        self._console.print()


class TerminalChat:
    """Reads messages and commands from standard input, a terminal or lines of a file, until the user leaves."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation, self._console = conversation, console
        self._drafter = conversation.drafter

    def run(self, echo: bool) -> None:
        """Runs until the input ends; `echo` prints the messages too, for input that no user typed."""
        self._help()
        while True:
            try:
                line = self._console.input("\n[bold]> [/]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if echo:
                self._console.print(line, markup=False, highlight=False)
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _answer(self, message: str) -> None:
        streamer = DraftColourStreamer(self._conversation.tokenizer, self._console)
        try:
            answer = self._conversation.ask(message, streamer)
        except KeyboardInterrupt:
            self._console.print("\n[dim]stopped; this message is forgotten[/]")
        except ValueError as error:
            self._console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
            self._console.print("[dim]this message is forgotten; /clear starts over[/]")
        else:
            self._console.print(Text(figures(answer), style="dim"))

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._conversation.clear()
            self._console.print("[dim]a new conversation[/]")
        elif line in ("/plain", "/draft"):
            self._conversation.drafter = self._drafter if line == "/draft" else None
            which = "with" if line == "/draft" else "without"
            self._console.print(f"[dim]{which} the drafter from here on[/]")
        else:
            if line != "/help":
                self._console.print(f"no such command: {escape(line)}; expected one of these", highlight=False)
            self._help()

    def _help(self) -> None:
        self._console.print(HELP, style="dim", markup=False, highlight=False)
        self._console.print("[green]drafted and accepted[/], the target's own")


def figures(answer: Answer) -> str:
    parts = [f"{answer.tokens / answer.seconds:.1f} tokens/s", f"{answer.tokens} tokens"]
    statistics = answer.statistics
    parts.insert(0, "plain" if statistics is None else f"tau {statistics.tau:.2f}")
    if statistics is not None and not statistics.exact:
        parts.append("lossy verification")
    if answer.kept:
        parts.append(f"{answer.kept} tokens from the cache")
    if answer.cut:
        parts.append("cut at the limit of new tokens")
    return ", ".join(parts)


def warm_up(target: Any, tokenizer: Any, drafter: Any) -> None:
    """Decodes a few tokens, so that the first answer does not include measuring the cost of drafting."""
    conversation = Conversation(target, tokenizer, drafter, do_sample=False, max_new_tokens=_WARM_UP)
    conversation.ask("Hello, who are you?")


def _why_more(statistics: Any) -> str:
    if statistics.packed_weights or statistics.compiled_layers:
        found = {"packed weights": statistics.packed_weights, "compiled layers": statistics.compiled_layers}
        names = " and ".join(name for name, used in found.items() if used)
        return f"rounds also have {names}, which plain generate() does not have"
    return "a forward took less time with the drafter than without, so something else slowed plain decoding down"


def run_demo(target: Any, tokenizer: Any, drafter: Drafter, prompt: str, max_new_tokens: int, console: Console) -> None:
    """Answers a prompt with the drafter; then times calls with and without it, and prints what drafting changed."""
    [inputs] = encode_prompts(target, tokenizer, [prompt])
    room = room_left(target, inputs["input_ids"].shape[1])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": min(max_new_tokens, room)}
    settings["return_dict_in_generate"] = True
    console.print(Text(prompt, style="bold"), soft_wrap=True)
    console.print(f"[{DRAFTED}]drafted and accepted[/], the target's own\n" if console.color_system else "")
    streamer = DraftColourStreamer(tokenizer, console)
    output = target.generate(**inputs, **settings, assistant_model=drafter, streamer=streamer)
    timed, speeds = {}, {}
    with working("timing plain generate() and the drafter"):
        target.generate(**inputs, **{**settings, "max_new_tokens": min(_WARM_UP, room)})  # first calls take longer
        for name, assistant in (("plain", None), ("with drafter", drafter)):  # without a streamer, which takes time
            begin = time.perf_counter()
            timed[name] = target.generate(**inputs, **settings, assistant_model=assistant)
            seconds = time.perf_counter() - begin
            speeds[name] = (timed[name].sequences.shape[1] - inputs["input_ids"].shape[1]) / seconds
    console.print()
    statistics = timed["with drafter"].statistics
    forwards = statistics.target_forwards
    console.print(
        f"tau            {statistics.tau:.2f}  ({statistics.new_tokens} tokens in {forwards} target forwards)"
    )
    console.print(f"plain          {speeds['plain']:.1f} tokens/s")
    gain = speeds["with drafter"] / speeds["plain"]
    console.print(f"with drafter   {speeds['with drafter']:.1f} tokens/s, {gain:.2f} times plain (timed once)")
    if gain > statistics.tau:
        console.print(f"               more than tau: {_why_more(statistics)}")
    divergence = first_divergence(target, inputs["input_ids"].shape[1], timed["plain"].sequences, output.sequences)
    console.print(f"same text      {'yes' if divergence is None else divergence}")
    console.print(Text(DEFINITIONS, style="dim"))
