"""Generation by the target for training: answers, texts, and user turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ...core.refusals import DraftingRefused
from ...runtime.prompt_inputs import end_tokens
from .conversations import Message, with_padding
from .recording import TapRecorder

_SENTINEL = "\u2403hsdraft\u2403"  # stands for the text of a user; no template contains it


def user_header(tokenizer: Any, history: Sequence[Message] = ()) -> str:
    """Returns a chat rendered up to where the user's next turn begins.

    A missing template, or one that changes what a user says, is a ValueError.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template, so the target cannot invent chats: pass prompts (--prompts, "
            "--dataset) and a template (--chat-template), or use an instruction-tuned target"
        )
    text = tokenizer.apply_chat_template([*history, {"role": "user", "content": _SENTINEL}], tokenize=False)
    before, found, _ = text.partition(_SENTINEL)
    if not found:
        raise ValueError("the chat template does not render what a user says as it is; pass prompts instead")
    return before


@contextlib.contextmanager
def seeded(target: Any, seed: int) -> Iterator[None]:
    """Seeds torch's RNG within the block and restores its state afterwards."""
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class DrawnToken(LogitsProcessor):
    """Leaves one token in each row's scores `[rows, V]`, drawn from their softmax at `temperature`.

    It takes one random number a row, and `torch.multinomial` one for each token of the vocabulary: on CPUs that is more
    than half of the time of a sampled batch.
    """

    row_wise = True  # for drafted calls

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mass = torch.softmax(scores.float() / self._temperature, dim=-1).cumsum(dim=-1)
        share = 1 - torch.rand(len(scores), 1, device=scores.device)  # in (0, 1]: never a token without mass
        chosen = torch.searchsorted(mass, share * mass[:, -1:])
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen, 0.0)


def decoding(temperature: float) -> dict[str, Any]:
    """Returns arguments of `generate()` that draw at `temperature` from the whole vocabulary; 0 is greedy."""
    drawn = [DrawnToken(temperature)] if temperature > 0 else []
    return {"do_sample": False, "logits_processor": LogitsProcessorList(drawn)}


def continue_texts(
    target: Any,
    tokenizer: Any,
    texts: Sequence[str],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    recorder: TapRecorder | None = None,
    seconds: float | None = None,
) -> list[str]:
    """Returns a continuation of each text without its end token; `""` for one that does not end, in `seconds` if given.

    With a `recorder` the target is read as in a drafted call, which is faster; nothing is recorded.
    """
    texts, recorder = [text.rstrip(" ") for text in texts], None if recorder is None else TapRecorder(())
    with seeded(target, seed):
        rows, _ = _written(target, tokenizer, texts, temperature, max_new_tokens, recorder, seconds)
    ends = end_tokens(target) | {tokenizer.eos_token_id}
    found = []
    for row in rows.tolist():
        end = next((index for index, token in enumerate(row) if token in ends), 0)
        found.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return found


@dataclass(frozen=True)
class Reply:
    """The target's next message in a chat.

    Attributes:
        new_tokens: number of its tokens; the end is not counted if it is the padding token.
        read: the tokens `[n]` that the target read for it, chat and message, and their tapped hidden states
            `[n, taps * D]`; `None` where they were not recorded.
    """

    text: str
    new_tokens: int
    read: tuple[torch.Tensor, torch.Tensor] | None = None


def reply(
    target: Any,
    tokenizer: Any,
    histories: Sequence[list[Message]],
    temperature: float,
    max_new_tokens: int,
    recorder: TapRecorder | None = None,
    seconds: float | None = None,
) -> list[Reply]:
    """Returns the target's next message in each chat; with a `recorder`, what was read for it too.

    After `seconds`, if given, messages are cut.
    """
    texts = tokenizer.apply_chat_template(list(histories), add_generation_prompt=True, tokenize=False)
    rows, read = _written(target, tokenizer, texts, temperature, max_new_tokens, recorder, seconds)
    counts = (rows != with_padding(tokenizer).pad_token_id).sum(dim=1).tolist()
    written = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [Reply(text.strip(), *rest) for text, *rest in zip(written, counts, read, strict=True)]


@torch.inference_mode()
def _written(
    target: Any,
    tokenizer: Any,
    texts: Sequence[str],
    temperature: float,
    max_new_tokens: int,
    recorder: TapRecorder | None,
    seconds: float | None,
) -> tuple[torch.Tensor, list[Any]]:
    """Returns the tokens `[rows, n]` that the target adds to texts, and of each row what was read, see `Reply`.

    Nothing is recorded where the target takes no drafted call.
    """
    tokenizer = with_padding(tokenizer)
    inputs = tokenizer(
        list(texts),
        return_tensors="pt",
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
    ).to(target.device)
    call = {**inputs, **decoding(temperature), "max_new_tokens": max_new_tokens, "max_time": seconds}
    call["pad_token_id"] = tokenizer.pad_token_id
    begins, states = (inputs["attention_mask"] == 0).sum(dim=1).tolist(), list[torch.Tensor]()
    try:
        output = target.generate(**call, **({} if recorder is None else {"assistant_model": recorder}))
        states = recorder.taken() if recorder is not None and recorder.taps else []
    except DraftingRefused:
        output = target.generate(**call)
    read: list[Any] = [None] * len(output)
    for row, states_of_row in enumerate(states):
        begin = begins[row]
        read[row] = output[row, begin : begin + len(states_of_row)], states_of_row
    return output[:, inputs["input_ids"].shape[1] :], read
