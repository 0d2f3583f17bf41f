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


@torch.inference_mode()
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
    encoding = with_padding(tokenizer)(
        [text.rstrip(" ") for text in texts],
        return_tensors="pt",
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
    ).to(target.device)
    pad = with_padding(tokenizer).pad_token_id
    call = {
        **encoding,
        **decoding(temperature),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": pad,
        "max_time": seconds,
    }
    with seeded(target, seed):
        output = _generate(target, call, None if recorder is None else TapRecorder(()))[0]
    ends = end_tokens(target) | {tokenizer.eos_token_id}
    found = []
    for row in output[:, encoding["input_ids"].shape[1] :].tolist():
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


@torch.inference_mode()
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
    tokenizer = with_padding(tokenizer)
    inputs = tokenizer.apply_chat_template(
        list(histories),
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    ).to(target.device)
    pad = tokenizer.pad_token_id
    call = {
        **inputs,
        **decoding(temperature),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": pad,
        "max_time": seconds,
    }
    output, states = _generate(target, call, recorder)
    replies = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    counts = (replies != pad).sum(dim=1).tolist()
    begins = (inputs["attention_mask"] == 0).sum(dim=1).tolist()  # padding is on the left
    read = [(row[begin : begin + len(each)], each) for row, begin, each in zip(output, begins, states, strict=False)]
    return [
        Reply(text.strip(), count, read[row] if read else None)
        for row, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]


def _generate(
    target: Any, call: dict[str, Any], recorder: TapRecorder | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the tokens of `generate()`, and what was recorded: nothing where the target takes no drafted call."""
    if recorder is None:
        return target.generate(**call), []
    try:
        output = target.generate(**call, assistant_model=recorder)
    except DraftingRefused:
        return target.generate(**call), []
    return output, recorder.taken() if recorder.taps else []
