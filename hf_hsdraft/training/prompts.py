"""Where training prompts come from: files, data sets, or the target itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .conversations import Message, Prompt, with_padding
from .dataset import RowFolder

_SENTINEL = "\u2403hsdraft\u2403"  # stands for what a user writes; no template contains it
_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")


def prompts_from_dataset(
    name: str, config: str | None = None, split: str = "train", column: str | None = None
) -> list[Prompt]:
    """The user turns of a data set of the Hub, or of a local folder that `datasets.load_dataset` reads.

    Args:
        column: holds a prompt (text), a list of user turns, or chat messages (`role`/`content` or `from`/`value`), of
            which the user's are taken; answers are made anew by the target. `None` takes the first usual name there is.

    Raises:
        ValueError: there is no such column, or no prompt in it.
    """
    from datasets import load_dataset, load_from_disk

    saved = Path(name)
    if (saved / "state.json").is_file():  # by `save_to_disk`
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
    """The text of a chat up to where the user's next turn begins, by the template of the tokenizer.

    Raises:
        ValueError: there is no template, or it renders something else in place of a user's words.
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
    """Prompts that the target invents itself: it continues the user's header of its own template.

    Restartable: batch b always uses the same seed, and those already stored are not made again.

    Args:
        openings: beginnings given in turn, one a batch; `""` leaves the target free.
        on_batch: called with the prompts there are.

    Raises:
        ValueError: the target invents too little; prompts have to come from elsewhere.
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
    """What the user might say next in each chat, by the target's own guess; `""` where it comes to no end."""
    headers = [user_header(tokenizer, history) for history in histories]
    return [text.strip() for text in _continue(target, tokenizer, headers, 0.9, max_new_tokens, seed)]


@torch.inference_mode()
def _continue(
    target: Any, tokenizer: Any, headers: Sequence[str], temperature: float, max_new_tokens: int, seed: int
) -> list[str]:
    """A continuation of each text without what ends it; `""` for one that comes to no end."""
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
    ends = target.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or [])}
    texts = []
    for row in output[:, encoding["input_ids"].shape[1] :].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), 0)
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return texts
