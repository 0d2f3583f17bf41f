"""`hsdraft chat`: answers in the terminal, drafted tokens coloured, with statistics."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from .conversation import Answer, Conversation, DraftColourStreamer

HELP = """/clear   forget the conversation
/plain   answer without the drafter
/draft   answer with the drafter again
/help    these lines
/exit    leave (also Ctrl-D); Ctrl-C ends an answer"""


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
            self._console.print()
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
