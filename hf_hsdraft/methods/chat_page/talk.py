"""The conversations of browser sessions, decoded on one thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from ...core.tensors import shared_length
from ...engine.loop import Observer, Round
from ...serve.conversation import Answer, Conversation, PieceStreamer, warm_up

LAST_ROUNDS = 8  # rounds whose trees are kept


@dataclass(frozen=True)
class ReplySettings:
    """How a message is answered; `compare` adds a plain answer after a drafted one."""

    draft: bool = True
    compare: bool = True
    sample: bool = False
    temperature: float = 0.7
    max_new_tokens: int = 256

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `generate()`."""
        sampling: dict[str, Any] = {"do_sample": self.sample}
        if self.sample:
            sampling["temperature"] = float(self.temperature)
        return {**sampling, "max_new_tokens": int(self.max_new_tokens)}


class Reply(PieceStreamer, Observer):
    """The answer to a message, during and after decoding."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.pieces: list[tuple[str, bool]] = []  # decoded texts so far, each with whether it was drafted
        self.rounds: deque[tuple[int, Round]] = deque(maxlen=LAST_ROUNDS)  # each with its number
        self.answer: Answer | None = None  # set when decoding has ended
        self._count = 0
        self._began = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self._began:  # the prompt
            self._began = time.perf_counter()
        super().put(value)

    def show(self, text: str, drafted: bool) -> None:
        self.pieces.append((text, drafted))

    def ended(self, done: Round) -> None:
        self._count += 1
        self.rounds.append((self._count, done))

    @property
    def speed(self) -> float:
        """Tokens per second, the prompt's forward included; during decoding, so far."""
        if self.answer is not None:
            return self.answer.tokens / self.answer.seconds
        return len(self.ids) / (time.perf_counter() - self._began) if self.ids else 0.0


@dataclass
class Turn:
    """A message and its answers."""

    message: str
    drafts: bool = True  # whether `reply` was requested with the drafter
    reply: Reply | None = None  # `None` before it begins
    plain: Reply | None = None  # the answer without the drafter, for comparison; `None` without one
    stopped: bool = False
    error: str = ""  # why it could not be answered; empty if it could

    @property
    def difference(self) -> int | None:
        """Index of the first new token in which the answers differ; `None` if they are the same."""
        mine, other = (reply.ids if reply else [] for reply in (self.reply, self.plain))
        return None if mine == other else shared_length(mine, other)


class Talk:
    """The conversation of a browser session; `thread` runs the jobs of all sessions, one after the other."""

    def __init__(self, target: Any, tokenizer: Any, drafter: Any, thread: Executor, system: str | None = None) -> None:
        self.drafter, self._thread = drafter, thread
        self.turns: list[Turn] = []  # all messages, failed ones included
        self.shows_trees = False  # whether the page shows the trees of the last rounds
        self._conversation, self._plain = (Conversation(target, tokenizer, each, system) for each in (drafter, None))
        self._stop = threading.Event()
        self._job: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a message is being answered or waits."""
        return self._job is not None and not self._job.done()

    @property
    def waits(self) -> bool:
        """Whether a message waits for the answers of other sessions."""
        return self.busy and self._job is not None and not self._job.running()

    def say(self, message: str, settings: ReplySettings) -> None:
        """Starts to answer a message, as the last of `turns`.

        Raises a ValueError if the message is empty, a setting is wrong, or an answer is in progress.
        """
        if self.busy:
            raise ValueError("an answer is under way: wait for its end, or stop it")
        if not message.strip():
            raise ValueError("the message is empty: write something first")
        if settings.sample and not settings.temperature > 0:
            raise ValueError(f"the temperature is {settings.temperature}: choose one above 0, or switch sampling off")
        if settings.max_new_tokens < 1:
            raise ValueError(f"the number of new tokens is {settings.max_new_tokens}: choose 1 or more")
        self._stop.clear()
        self.turns.append(Turn(message, settings.draft))
        self._job = self._thread.submit(self._answer, self.turns[-1], settings)

    def stop(self) -> None:
        """Ends the answer at its next token. The text so far stays in the conversation."""
        if self.busy and self._job is not None:
            self._stop.set()
            if self._job.cancel():
                self.turns[-1].stopped = True

    def clear(self) -> None:
        """Forgets all turns; raises a ValueError while an answer is in progress."""
        if self.busy:
            raise ValueError("an answer is under way: stop it before the chat is cleared")
        self.turns.clear()
        self._conversation.clear()
        self._plain.clear()

    def _answer(self, turn: Turn, settings: ReplySettings) -> None:
        """Runs on the decoding thread."""
        compares = settings.draft and settings.compare
        seed = secrets.randbits(32)
        try:
            if compares:
                self._plain.follow(self._conversation)
            self._conversation.drafter = self.drafter if settings.draft else None
            turn.reply = Reply(self._conversation.tokenizer)
            self._decode(self._conversation, turn.message, turn.reply, settings, seed)
            if compares and not self._stop.is_set():
                turn.plain = Reply(self._plain.tokenizer)
                self._decode(self._plain, turn.message, turn.plain, settings, seed)
        except ValueError as error:
            turn.error = str(error)
        except Exception as error:  # out of memory, for example: the page shows it and keeps working
            turn.error = f"decoding failed ({type(error).__name__}): {error}"
        turn.stopped = self._stop.is_set()

    def _decode(
        self, conversation: Conversation, message: str, reply: Reply, settings: ReplySettings, seed: int
    ) -> None:
        stopping = [_Stopped(self._stop)]
        conversation.options = {**settings.options(), "stopping_criteria": stopping}
        torch.manual_seed(seed)  # the same draws for both answers
        reply.answer = conversation.ask(message, reply)


class _Stopped(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


class Talks:
    """The conversations of all browser sessions with a target; raises a ValueError without a chat template."""

    def __init__(self, target: Any, tokenizer: Any, drafter: Any, system: str | None = None) -> None:
        self._target, self._tokenizer, self._drafter, self._system = target, tokenizer, drafter, system
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._talks: dict[str, Talk] = {}
        Conversation(target, tokenizer, drafter)  # refuses a target that cannot chat before there is a page

    def warm_up(self) -> None:
        """Decodes a few tokens with and without the drafter, so that no answer includes one-time costs."""
        for drafter in (None, self._drafter):
            self._thread.submit(warm_up, self._target, self._tokenizer, drafter).result()

    def of(self, session: str | None) -> Talk:
        """Returns the conversation of a browser session; creates it if needed."""
        name = session or ""
        if name not in self._talks:
            self._talks[name] = Talk(self._target, self._tokenizer, self._drafter, self._thread, self._system)
        return self._talks[name]

    def leave(self, session: str | None) -> None:
        """Ends and forgets the conversation of a browser session."""
        talk = self._talks.pop(session or "", None)
        if talk is not None:
            talk.stop()

    def word(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def close(self) -> None:
        for session in list(self._talks):
            self.leave(session)
        self._thread.shutdown(wait=True)
