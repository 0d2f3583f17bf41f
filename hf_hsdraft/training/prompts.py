"""Training prompts from data sets, and prompts that the target itself invents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench.measure import end_tokens
from .conversations import Message, Prompt, with_padding
from .dataset import RowFolder

_SENTINEL = "\u2403hsdraft\u2403"  # stands for the text of a user; no template contains it
_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")


def prompts_from_dataset(
    name: str, config: str | None = None, split: str = "train", column: str | None = None
) -> list[Prompt]:
    """Reads the user turns of a data set. Its answers are not used: the target makes its own.

    Args:
        name: name of a data set on the Hub, or a local folder that `datasets` reads.
        config: configuration of the data set.
        split: split of the data set.
        column: column that holds a prompt (text), a list of user turns, or chat messages (`role`/`content` or
            `from`/`value`); `None` for the first column with a usual name.

    Raises:
        ValueError: there is no such column, or it holds no prompt.
    """
    from datasets import load_dataset, load_from_disk

    saved = Path(name)
    if (saved / "state.json").is_file():  # written by `save_to_disk`
        rows = load_from_disk(name)
    elif (saved / "dataset_dict.json").is_file():
        rows = load_from_disk(name)[split]
    else:
        rows = load_dataset(name, config, split=split)
    chosen = column or next((usual for usual in _COLUMNS if usual in rows.column_names), None)
    if chosen is None or chosen not in rows.column_names:
        raise ValueError(
            f"{name} has no column {column or ' or '.join(_COLUMNS)!r}; name one with --dataset-column: "
            f"{', '.join(rows.column_names)}"
        )
    prompts = [Prompt.of(turns, str(name)) for value in rows[chosen] if (turns := _user_turns(value))]
    if not prompts:
        raise ValueError(f"column {chosen!r} of {name} holds no prompts: expected text, turns or chat messages")
    return prompts


def _user_turns(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence):
        return []
    turns = []
    for turn in value:
        if isinstance(turn, dict):
            role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
            if role in ("user", "human") and isinstance(text, str):
                turns.append(text)
        elif isinstance(turn, str):
            turns.append(turn)
    return [turn.strip() for turn in turns if turn.strip()]


def user_header(tokenizer: Any, history: Sequence[Message] = ()) -> str:
    """Returns the text of a chat up to the place where the user's next turn begins, in the tokenizer's template.

    Raises:
        ValueError: there is no template, or it changes what a user says.
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


def invent_prompts(
    target: Any,
    tokenizer: Any,
    count: int,
    store: RowFolder,
    *,
    openings: Sequence[str] = ("",),
    temperature: float = 0.9,
    max_new_tokens: int = 96,
    batch_size: int = 64,
    seed: int = 0,
    max_batches: int = 1000,
    on_batch: Callable[[int], None] | None = None,
) -> list[Prompt]:
    """Lets the target invent prompts: it continues the user's header of its own template.

    A restarted run makes the same prompts, because each batch has its own seed. Stored prompts are not made again.

    Args:
        target: the target.
        tokenizer: the target's tokenizer.
        count: number of prompts.
        store: where they are kept.
        openings: beginnings of prompts. The batches take them in turn; `""` gives no beginning.
        temperature: temperature of the draws.
        max_new_tokens: greatest number of tokens of a prompt, without its beginning.
        batch_size: number of prompts invented at once.
        seed: seed of the draws.
        max_batches: greatest number of batches.
        on_batch: called with the number of prompts so far.

    Raises:
        ValueError: the target invents too few prompts.
    """
    header = user_header(tokenizer)
    known = {row["key"]: row for row in store.rows()}
    first = 1 + max((row["batch"] for row in known.values()), default=-1)
    for batch in range(first, max_batches):
        if len(known) >= count:
            break
        opening = openings[batch % len(openings)]
        headers = [header + opening] * batch_size
        texts = _continue(target, tokenizer, headers, temperature, max_new_tokens, seed * 1_000_003 + batch)
        fresh = {}
        for text in texts:
            prompt = Prompt.of([(opening + text).strip()], "invented")
            if len(text.strip()) >= 12 and prompt.key not in known:
                fresh[prompt.key] = {"key": prompt.key, "turns": list(prompt.turns), "batch": batch}
        rows = list(fresh.values())[: count - len(known)]
        store.append(rows)
        known |= {row["key"]: row for row in rows}
        if on_batch is not None:
            on_batch(len(known))
        if batch >= 20 and len(known) < batch:
            break
    if len(known) < count:
        raise ValueError(
            f"the target invented only {len(known)} of {count} prompts that end and differ; it may not be tuned to "
            "chat. Ask for fewer (--num-prompts), or pass prompts (--prompts, --dataset)"
        )
    return [Prompt.of(row["turns"], "invented") for row in known.values()][:count]


def invent_turns(
    target: Any, tokenizer: Any, histories: Sequence[Sequence[Message]], *, max_new_tokens: int = 96, seed: int = 0
) -> list[str]:
    """Lets the target guess what the user says next in each chat. Returns `""` where the text does not end."""
    headers = [user_header(tokenizer, history) for history in histories]
    return [text.strip() for text in _continue(target, tokenizer, headers, 0.9, max_new_tokens, seed)]


@torch.inference_mode()
def _continue(
    target: Any, tokenizer: Any, headers: Sequence[str], temperature: float, max_new_tokens: int, seed: int
) -> list[str]:
    """Returns a continuation of each text without its end token; `""` for one that does not end."""
    encoding = with_padding(tokenizer)(
        [header.rstrip(" ") for header in headers],
        return_tensors="pt",
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
    ).to(target.device)
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = target.generate(
            **encoding,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=max_new_tokens,
            pad_token_id=with_padding(tokenizer).pad_token_id,
        )
    ends = end_tokens(target) | {tokenizer.eos_token_id}
    texts = []
    for row in output[:, encoding["input_ids"].shape[1] :].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), 0)
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return texts
