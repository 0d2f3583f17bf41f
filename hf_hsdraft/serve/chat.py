"""`hsdraft chat`: a chat in the terminal with drafted tokens coloured and statistics after each answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from .conversation import Answer, Conversation
from .streamers import DraftColourStreamer

HELP = """/clear   forget the conversation
/plain   answer without the drafter
/draft   answer with the drafter again
/help    these lines
/exit    leave (also Ctrl-D); Ctrl-C ends an answer"""
_WARM_UP = 24  # tokens


class TerminalChat:
    """Reads messages and commands from standard input, a terminal or lines of a file, until the user leaves."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation, self._console = conversation, console
        self._drafter = conversation.drafter
        self._commands = {"/clear": self._clear, "/plain": self._plain, "/draft": self._draft, "/help": self._help}

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
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                self._console.print(f"no such command: {escape(line)}; expected one of these", highlight=False)
                self._help()
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
            self._console.print("[dim]this message is forgotten; /clear begins anew[/]")
        else:
            self._console.print(Text(figures(answer), style="dim"))

    def _clear(self) -> None:
        self._conversation.clear()
        self._console.print("[dim]a new conversation[/]")

    def _plain(self) -> None:
        self._conversation.drafter = None
        self._console.print("[dim]without the drafter from here on[/]")

    def _draft(self) -> None:
        self._conversation.drafter = self._drafter
        self._console.print("[dim]with the drafter from here on[/]")

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
