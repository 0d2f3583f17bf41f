"""`hsdraft chat`: a conversation that keeps its cache across turns, in the terminal, with drafted tokens coloured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..core.cache_name import CACHE, returned_cache
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of, shared_length
from ..runtime.prompt_inputs import end_tokens, room_left

DRAFTED, OWN = "green", "default"  # styles of text
_WARM_UP = 24  # tokens
HELP = """/clear   forget the conversation
/plain   answer without the drafter
/draft   answer with the drafter again
/help    these lines
/exit    leave (also Ctrl-D); Ctrl-C ends an answer"""


@dataclass(frozen=True)
class Answer:
    """One answer of the target."""

    text: str  # without special tokens
    tokens: int  # number of new tokens, the end of the turn included
    kept: int  # number of prompt tokens that were cached and not read again
    seconds: float  # wall-clock time of the call, the prompt's forward included
    statistics: DraftStatistics | None  # of the drafting; `None` for a plain answer
    cut: bool  # whether the limit of new tokens ended it


class Conversation:
    """Messages, and the target's cache of them.

    Every prompt is the chat template's text of all messages. Earlier turns keep the tokens that the target chose, and
    only the text behind them is tokenized, so the cache holds the beginning of the prompt. If a template rewrites
    earlier turns, without their thoughts for example, the whole text is tokenized and the cache is cropped to the
    common prefix. A cache that cannot be cropped is discarded. The answer is the same with and without a cache.

    A drafter keeps its context if the whole cache is used and the previous answer was drafted. Otherwise it starts with
    the tokens read in this turn, and drafts less well at first. The drafter may be changed between turns; `None`
    decodes plainly. `options` are those of `generate()`.

    Raises a ValueError if the tokenizer has no chat template.
    """

    def __init__(self, target: Any, tokenizer: Any, drafter: Any, system: str | None = None, **options: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template: choose a target that was trained to chat")
        self.target, self.tokenizer, self.drafter, self.options = target, tokenizer, drafter, options
        self._system = system
        self.clear()

    def clear(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._forget()

    def _forget(self) -> None:
        self._cache: Any = None
        self._text: list[int] = []  # the cache's tokens; it may lack the last one

    def follow(self, other: Conversation) -> None:
        """Copies another conversation and reads what it has read, so that both caches hold equally much."""
        self.messages = list(other.messages)
        if self._text == other._text:
            return
        self._text, self._cache = list(other._text), None
        held = 0 if other._cache is None else other._cache.get_seq_length()
        if held:
            ids = torch.tensor([self._text[:held]], device=device_of(self.target))
            reading = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True}
            output = self.target.generate(ids, attention_mask=torch.ones_like(ids), **reading)
            self._cache = returned_cache(output)

    def ask(self, question: str, streamer: BaseStreamer | None = None) -> Answer:
        """Answers a user message. If that fails or is interrupted, the message is forgotten.

        Raises a ValueError if the conversation exceeds the target's context window, or the drafter refuses.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._prompt(messages)
        ids = torch.tensor([prompt], device=device_of(self.target))
        room = room_left(self.target, ids.shape[1])
        limit = min(room, self.options.get("max_new_tokens") or room)
        cache = self._cache_of(prompt)
        self._forget()  # a failed call may leave it in any state
        kept = 0 if cache is None else cache.get_seq_length()
        begin = time.perf_counter()
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.drafter,
            streamer=streamer,
            return_dict_in_generate=True,
            **{**self.options, "max_new_tokens": limit, CACHE: cache},
        )
        seconds = time.perf_counter() - begin
        self._cache, self._text = returned_cache(output), output.sequences[0].tolist()
        new = output.sequences[0, ids.shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        cut = len(new) >= limit and int(new[-1]) not in end_tokens(self.target)
        return Answer(text, len(new), kept, seconds, getattr(output, "statistics", None), cut)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation; earlier turns keep theirs."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        held = self.tokenizer.decode(self._text, clean_up_tokenization_spaces=False) if self._text else ""
        kept = self._text if text.startswith(held) else []
        new = self.tokenizer(text[len(held) if kept else 0 :], add_special_tokens=False)["input_ids"]
        return [*kept, *new]

    def _cache_of(self, ids: list[int]) -> Any:
        """The cache of the beginning of a prompt, with at least one token left to read; `None` for none."""
        if self._cache is None:
            return None
        length = self._cache.get_seq_length()
        same = shared_length(self._text[:length], ids[:-1])
        if same < length:
            sliding = any(getattr(layer, "is_sliding", False) for layer in self._cache.layers)
            if same == 0 or sliding or not self._cache.is_croppable:
                return None
            self._cache.crop(same - length)
        return self._cache


class PieceStreamer(BaseStreamer):
    """Passes on decoded text as tokens come. The last token of each round is the target's own, the others are drafted.

    Text is held back while its last character is incomplete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self._shown = 0  # number of characters
        self._prompt = True

    def show(self, text: str, drafted: bool) -> None:
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
    """Keeps the pieces of a text, and prints them if there is a console, drafted ones in colour."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        super().__init__(tokenizer)
        self.pieces: list[tuple[str, bool, int]] = []  # text, whether it was drafted, number of tokens with it
        self._console = console

    def show(self, text: str, drafted: bool) -> None:
        self.pieces.append((text, drafted, len(self.ids)))
        if self._console is not None:
            self._console.print(Text(text, style=DRAFTED if drafted else OWN), end="", soft_wrap=True)


def warm_up(target: Any, tokenizer: Any, drafter: Any) -> None:
    """Decodes a few tokens, so that the first answer does not include measuring the cost of drafting."""
    conversation = Conversation(target, tokenizer, drafter, do_sample=False, max_new_tokens=_WARM_UP)
    conversation.ask("Hello, who are you?")


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
