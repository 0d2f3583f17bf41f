"""Streamers that show text as it comes, and which of it was drafted."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

DRAFTED, _OWN = "green", "default"


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
    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer)
        self._console = console

    def show(self, text: str, drafted: bool) -> None:
        self._console.print(Text(text, style=DRAFTED if drafted else _OWN), end="", soft_wrap=True)

    def end(self) -> None:
        super().end()
        self._console.print()
