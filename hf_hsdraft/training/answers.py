"""Answers to training prompts, always by the target itself (DistillSpec, section 4: teacher-generated data)."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .conversations import Message, Prompt


def answer_prompts(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: str | os.PathLike[str],
    *,
    temperatures: Sequence[float] = (0.0, 0.0, 0.7, 1.0),
    max_new_tokens: int = 256,
    max_prompt_tokens: int = 1024,
    batch_size: int = 32,
    seed: int = 0,
    on_batch: Callable[[int, int], None] | None = None,
) -> int:
    """Lets the target answer every prompt and appends the conversations to `path`, one JSON object a line.

    Restartable: prompts whose `key` is already in the file are skipped, and a line torn by a kill is removed first.
    Batches hold prompts of similar length; order and temperatures of the batches follow from `seed` and from what is
    left to answer.

    Args:
        temperatures: drawn from per batch, 0 meaning greedy; repeat a value to weigh it.
        max_prompt_tokens: longer prompts are left out, they would only be cut.
        on_batch: called with (prompts done, answer tokens of the batch).

    Returns:
        The number of conversations in the file.
    """
    path = Path(path)
    tokenizer = _with_padding(tokenizer)
    done = _keys_present(path)
    pending = list({prompt.key: prompt for prompt in prompts if prompt.key not in done}.values())
    lengths = {
        prompt.key: len(
            tokenizer.apply_chat_template([_user(prompt.turns[0])], add_generation_prompt=True)["input_ids"]
        )
        for prompt in pending
    }
    pending = [prompt for prompt in pending if lengths[prompt.key] <= max_prompt_tokens]
    with path.open("a", encoding="utf-8") as file:
        for batch, temperature in _batches(pending, lengths, batch_size, temperatures, seed):
            histories, tokens = _answer_batch(target, tokenizer, batch, temperature, max_new_tokens)
            for prompt, history in zip(batch, histories, strict=True):
                row = {"key": prompt.key, "temperature": temperature, "messages": history}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            done.update(prompt.key for prompt in batch)
            if on_batch is not None:
                on_batch(len(done), tokens)
    return len(done)


def _with_padding(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that pads with the end of the turn where it has no token for padding (Llama's)."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _keys_present(path: Path) -> set[str]:
    """Keys of the complete lines; cuts a torn last line off so that appending stays safe."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) != len(data):
        os.truncate(path, len(complete))
    return {json.loads(line)["key"] for line in complete.decode("utf-8").splitlines() if line.strip()}


def _batches(
    prompts: list[Prompt], lengths: dict[str, int], batch_size: int, temperatures: Sequence[float], seed: int
) -> Iterator[tuple[list[Prompt], float]]:
    ordered = sorted(prompts, key=lambda prompt: (lengths[prompt.key], prompt.key))
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    rng = random.Random(seed)
    rng.shuffle(batches)
    for batch in batches:
        yield batch, rng.choice(list(temperatures))


@torch.inference_mode()
def _answer_batch(
    target: Any, tokenizer: Any, batch: list[Prompt], temperature: float, max_new_tokens: int
) -> tuple[list[list[Message]], int]:
    histories: list[list[Message]] = [[] for _ in batch]
    tokens = 0
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        active = [index for index, prompt in enumerate(batch) if turn < len(prompt.turns)]
        for index in active:
            histories[index].append(_user(batch[index].turns[turn]))
        inputs = tokenizer.apply_chat_template(
            [histories[index] for index in active],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
        ).to(target.device)
        output = target.generate(
            **inputs, **sampling, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id
        )
        replies = output[:, inputs["input_ids"].shape[1] :]
        tokens += int((replies != tokenizer.pad_token_id).sum())  # without an end that doubles as padding
        for index, text in zip(active, tokenizer.batch_decode(replies, skip_special_tokens=True), strict=True):
            histories[index].append({"role": "assistant", "content": text.strip()})
    return histories, tokens
