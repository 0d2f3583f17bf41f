"""What the target writes for training: answers (DistillSpec, section 4), texts, user turns, and what it reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ...core.draft_tree import DraftTree
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ...drafters.lookup.cacheback import CachebackConfig
from ...runtime.prompt_inputs import end_tokens, length_of
from ...runtime.target_loading import is_sharded
from .conversations import Message, Prompt, with_padding
from .plan import TEMPERATURES


class TapRecorder(Drafter):
    """An assistant that drafts nothing, and keeps the hidden states `taps` of each row of the last call."""

    num_draft_steps = 1

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps, self.config = tuple(taps), CachebackConfig()
        self.generation_config = self.default_generation_config()
        self._session: _Recording | None = None

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=1, beam_width=1)

    def session(self, call: Call) -> Session:
        self._session = _Recording(call.rows)
        return self._session

    def taken(self) -> list[torch.Tensor]:
        """Returns what the last call read, and forgets it: of each row `[n, taps * D]`, padding left out.

        The list is empty where nothing was recorded.
        """
        session, self._session = self._session, None
        if session is None or not all(session.news):
            return []
        taken: list[torch.Tensor] = []
        while session.news:  # each row's news is dropped once it is joined
            taken.append(torch.cat([each.taps for each in session.news.pop()]))
        return taken[::-1]


class _Recording(Session):
    free, listens = True, True  # it observes each round at once, whatever can be drafted
    takes_ngrams = False

    def __init__(self, rows: int) -> None:
        self.news: list[list[Accepted]] = [[] for _ in range(rows)]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [DraftTree.root(ask.root) for ask in asks]

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self.news[each.row].append(each)


def can_record(target: Any) -> bool:
    """Whether recording saves time: on CPUs, where reading a text again takes as long as writing it."""
    return bool(target.device.type == "cpu" and not hasattr(target, "hf_device_map") and not is_sharded(target))


_TURN_TOKENS = 96  # of a user's further turn
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


@dataclass(frozen=True)
class Reply:
    """The target's next message in a chat."""

    text: str
    new_tokens: int  # number of its tokens; the end is not counted if it is the padding token
    # The tokens `[n]` that the target read for it, chat and message, and their tapped hidden states `[n, taps * D]`;
    # `None` where they were not recorded
    read: tuple[torch.Tensor, torch.Tensor] | None = None


class TargetWriter:
    """Lets a target write messages and texts, one call of `generate()` for several at once.

    A `recorder` keeps the hidden states of what is read for messages. Texts are cut after `seconds()`, unless `None`.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        recorder: TapRecorder | None = None,
        seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.target, self.tokenizer, self._recorder, self._seconds = target, with_padding(tokenizer), recorder, seconds

    def reply(self, histories: Sequence[list[Message]], temperature: float, max_new_tokens: int) -> list[Reply]:
        """Returns the target's next message in each chat."""
        texts = self.tokenizer.apply_chat_template(list(histories), add_generation_prompt=True, tokenize=False)
        rows, read = self._written(texts, temperature, max_new_tokens, self._recorder)
        counts = (rows != self.tokenizer.pad_token_id).sum(dim=1).tolist()
        written = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [Reply(text.strip(), *rest) for text, *rest in zip(written, counts, read, strict=True)]

    def continued(self, texts: Sequence[str], temperature: float, max_new_tokens: int, seed: int) -> list[str]:
        """Returns a continuation of each text without its end token; `""` for one that does not end.

        With a recorder the target is read as in a drafted call, which is faster; nothing is recorded.
        """
        recorder = None if self._recorder is None else TapRecorder(())
        with seeded(self.target, seed):
            rows, _ = self._written([text.rstrip(" ") for text in texts], temperature, max_new_tokens, recorder)
        ends = end_tokens(self.target) | {self.tokenizer.eos_token_id}
        found = []
        for row in rows.tolist():
            end = next((index for index, token in enumerate(row) if token in ends), 0)
            found.append(self.tokenizer.decode(row[:end], skip_special_tokens=True))
        return found

    def _written(
        self, texts: Sequence[str], temperature: float, max_new_tokens: int, recorder: TapRecorder | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """Returns the tokens `[rows, n]` that the target adds to texts, and of each row what was read, see `Reply`.

        Nothing is recorded where the target takes no drafted call.
        """
        form: dict[str, Any] = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        form |= {"add_special_tokens": False, "return_token_type_ids": False}
        inputs = self.tokenizer(list(texts), **form).to(self.target.device)
        call = {**inputs, **decoding(temperature), "max_new_tokens": max_new_tokens, "max_time": self._seconds()}
        call["pad_token_id"] = self.tokenizer.pad_token_id
        begins, states = (inputs["attention_mask"] == 0).sum(dim=1).tolist(), list[torch.Tensor]()
        try:
            output = self.target.generate(**call, **({} if recorder is None else {"assistant_model": recorder}))
            states = recorder.taken() if recorder is not None and recorder.taps else []
        except DraftingRefused:
            output = self.target.generate(**call)
        read: list[Any] = [None] * len(output)
        for row, states_of_row in enumerate(states):
            begin = begins[row]
            read[row] = output[row, begin : begin + len(states_of_row)], states_of_row
        return output[:, inputs["input_ids"].shape[1] :], read


OnSkip = Callable[[Prompt, str], object]  # gets a prompt that is left out, and the reason


@dataclass(frozen=True)
class Answered:
    """A conversation that the target finished."""

    prompt: Prompt
    temperature: float
    messages: list[Message]
    new_tokens: int  # number of tokens of all answers
    read: tuple[torch.Tensor, torch.Tensor] | None = None  # see `Reply.read`, of the last answer


def temperature_of(prompt: Prompt, temperatures: Sequence[float], seed: int) -> float:
    """Draws a prompt's temperature; it depends on the seed and the prompt's key alone."""
    return random.Random(f"{seed} {prompt.key}").choice(list(temperatures))


def prompts_that_fit(tokenizer: Any, prompts: Sequence[Prompt], most: int, on_skip: OnSkip) -> list[Prompt]:
    """Returns the prompts whose first turn has at most `most` tokens, template included; `on_skip` gets the others."""
    fitting = []
    for prompt in prompts:
        length = length_of(tokenizer, prompt.turns[0])
        if length <= most:
            fitting.append(prompt)
        else:
            on_skip(prompt, f"its first turn has {length} tokens, more than {most}")
    return fitting


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
        temperatures: values to draw each prompt's temperature from; 0 is greedy.
        invented_turns: number of further user turns that the target makes up in each chat, and answers.
        recorder, seconds: see `TargetWriter`.
    """
    writer, guesser = TargetWriter(target, tokenizer, recorder, seconds), TargetWriter(target, tokenizer)
    groups: dict[float, list[tuple[int, Prompt]]] = {}
    for prompt in prompts:
        length = length_of(tokenizer, prompt.turns[0])
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

    def answered(temperature: float, batch: Sequence[Prompt]) -> list[Answered]:
        histories: list[list[Message]] = [[] for _ in batch]
        tokens, turns = [0] * len(batch), [list(prompt.turns) for prompt in batch]
        read: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(batch)
        while active := [index for index, left in enumerate(turns) if left]:
            for index in active:
                histories[index].append({"role": "user", "content": turns[index].pop(0)})
            chats = [histories[index] for index in active]
            for index, each in zip(active, writer.reply(chats, temperature, max_new_tokens), strict=True):
                histories[index].append({"role": "assistant", "content": each.text})
                tokens[index] += each.new_tokens
                read[index] = each.read
            most = {index: 2 * (len(batch[index].turns) + invented_turns) for index in active}  # messages
            if ended := [index for index in active if not turns[index] and len(histories[index]) < most[index]]:
                headers = [user_header(tokenizer, histories[index]) for index in ended]
                guessed = guesser.continued(headers, 0.9, _TURN_TOKENS, seed + len(histories))
                for index, text in zip(ended, guessed, strict=True):
                    turns[index] += [text.strip()] if text.strip() else []  # "" where the user's turn does not end
        rows = zip(batch, histories, tokens, read, strict=True)
        return [Answered(prompt, temperature, history, count, own) for prompt, history, count, own in rows]

    return (answered(*batch) for batch in batches)


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
