"""Training prompts from data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .conversations import Prompt

_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")


def prompts_from_dataset(
    name: str, config: str | None = None, split: str = "train", column: str | None = None
) -> list[Prompt]:
    """Reads the user turns of a data set. Its answers are not used: the target makes its own.

    Args:
        name: name of a data set on the Hub, or a local folder that `datasets` reads.
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
