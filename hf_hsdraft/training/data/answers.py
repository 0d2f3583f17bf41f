"""Answers to training prompts, given by the target (DistillSpec, section 4: teacher-generated data)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .conversations import Message, Prompt, with_padding
from .generating import reply
from .inventing import invent_turns
from .plan import TEMPERATURES
from .recording import TapRecorder

OnSkip = Callable[[Prompt, str], object]  # gets a prompt that is left out, and the reason


@dataclass(frozen=True)
class Answered:
    """A conversation that the target finished.

    Attributes:
        new_tokens: number of tokens of all answers.
        read: see `Reply.read`, of the last answer.
    """

    prompt: Prompt
    temperature: float
    messages: list[Message]
    new_tokens: int
    read: tuple[torch.Tensor, torch.Tensor] | None = None


def temperature_of(prompt: Prompt, temperatures: Sequence[float], seed: int) -> float:
    """Draws a prompt's temperature; it depends on the seed and the prompt's key alone."""
    return random.Random(f"{seed} {prompt.key}").choice(list(temperatures))


def prompts_that_fit(tokenizer: Any, prompts: Sequence[Prompt], most: int, on_skip: OnSkip) -> list[Prompt]:
    """Returns the prompts whose first turn has at most `most` tokens, template included; `on_skip` gets the others."""
    fitting = []
    for prompt in prompts:
        length = _length(tokenizer, prompt)
        if length <= most:
            fitting.append(prompt)
        else:
            on_skip(prompt, f"its first turn has {length} tokens, more than {most}")
    return fitting


def _length(tokenizer: Any, prompt: Prompt) -> int:
    """Number of tokens of a prompt's first turn, template included."""
    first = [{"role": "user", "content": prompt.turns[0]}]
    return len(tokenizer.apply_chat_template(first, add_generation_prompt=True)["input_ids"])


def answer_prompts(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    invented_turns: int = 0,
    seed: int = 0,
    shuffled: bool = False,
    recorder: TapRecorder | None = None,
    seconds: Callable[[], float | None] = lambda: None,
) -> Iterator[list[Answered]]:
    """Lets the target answer prompts in batches of one temperature and similar length, the longest prompts first.

    Args:
        shuffled: whether the batches behind the first come in random order, for learning from them as they arrive.
        temperatures: values to draw each prompt's temperature from; 0 is greedy. Repeat a value to weigh it.
        invented_turns: number of further user turns that the target makes up in each chat, and answers.
        recorder: keeps the hidden states of what is read.
        seconds: returns the time for the next turn of a batch, whose answers are cut then; `None` for no limit.
    """
    tokenizer = with_padding(tokenizer)
    groups: dict[float, list[tuple[int, Prompt]]] = {}
    for prompt in prompts:
        length = _length(tokenizer, prompt)
        groups.setdefault(temperature_of(prompt, temperatures, seed), []).append((length, prompt))
    batches: list[tuple[float, list[Prompt]]] = []
    for temperature, group in sorted(groups.items()):
        group.sort(key=lambda pair: (-pair[0], pair[1].key))  # if a batch does not fit into memory, the first does not
        parts = (group[start : start + batch_size] for start in range(0, len(group), batch_size))
        batches += [(temperature, [prompt for _, prompt in part]) for part in parts]
    if shuffled:
        further = batches[1:]
        random.Random(seed).shuffle(further)
        batches[1:] = further
    for temperature, batch in batches:
        yield _answer_batch(
            target, tokenizer, batch, temperature, max_new_tokens, invented_turns, seed, recorder, seconds
        )


def row_of(answered: Answered) -> dict[str, Any]:
    """Returns the row that a store keeps."""
    prompt = answered.prompt
    return {
        "key": prompt.key,
        "category": prompt.category,
        "temperature": answered.temperature,
        "new_tokens": answered.new_tokens,
        "messages": answered.messages,
    }


@torch.inference_mode()
def _answer_batch(
    target: Any,
    tokenizer: Any,
    batch: Sequence[Prompt],
    temperature: float,
    max_new_tokens: int,
    invented_turns: int,
    seed: int,
    recorder: TapRecorder | None,
    seconds: Callable[[], float | None],
) -> list[Answered]:
    histories: list[list[Message]] = [[] for _ in batch]
    tokens = [0] * len(batch)
    read: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(batch)
    turns = [list(prompt.turns) for prompt in batch]
    while active := [index for index, left in enumerate(turns) if left]:
        for index in active:
            histories[index].append({"role": "user", "content": turns[index].pop(0)})
        chats = [histories[index] for index in active]
        for index, each in zip(
            active, reply(target, tokenizer, chats, temperature, max_new_tokens, recorder, seconds()), strict=True
        ):
            histories[index].append({"role": "assistant", "content": each.text})
            tokens[index] += each.new_tokens
            read[index] = each.read
        ended = [index for index in active if not turns[index]]
        ended = [index for index in ended if len(histories[index]) < 2 * (len(batch[index].turns) + invented_turns)]
        if ended:
            known = [histories[index] for index in ended]
            invented = invent_turns(target, tokenizer, known, seed + len(histories))
            for index, text in zip(ended, invented, strict=True):
                turns[index] += [text] if text else []
    return [
        Answered(prompt, temperature, history, count, own)
        for prompt, history, count, own in zip(batch, histories, tokens, read, strict=True)
    ]
