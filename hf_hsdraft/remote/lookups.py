"""Lookups of devices at a server: embedding rows, encoding and decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .messages import Decode, Encode, RowData, Rows, Text, Tokens
from .packing import packed_ints, unpacked_ints
from .weight_tables import ServedTables
from .wire import MOST_TEXT, Message
from .workers import on_own_thread


class Lookups:
    """Answers lookups of all connections."""

    def __init__(self, tokenizer: Any, tables: ServedTables) -> None:
        self._tokenizer, self._tables = tokenizer, tables
        self._turns = asyncio.Lock()  # tokenizers are not thread-safe

    async def rows(self, message: Rows) -> Message:
        return RowData(
            await asyncio.to_thread(on_own_thread, self._tables.rows, message.table, message.first, message.count)
        )

    async def encode(self, message: Encode) -> Message:
        ids = await self._tokenized(lambda tokenizer: _ids_of(tokenizer, message.text, message.chat))
        return Tokens(packed_ints(ids))

    async def decode(self, message: Decode) -> Message:
        ids, rows = unpacked_ints(message.ids), self._tables.shape[0]
        if not all(0 <= token < rows for token in ids):
            raise ValueError(f"the text holds ids that are no tokens: the target's vocabulary has {rows}")
        text = await self._tokenized(lambda tokenizer: tokenizer.decode(ids, skip_special_tokens=True))
        if len(text.encode()) > MOST_TEXT:
            raise ValueError(f"the text has {len(text.encode())} bytes, more than a message holds: decode it in parts")
        return Text(text)

    async def _tokenized(self, work: Callable[[Any], Any]) -> Any:
        if self._tokenizer is None:
            raise ValueError("this server has no tokenizer: send token ids")
        async with self._turns:
            return await asyncio.to_thread(work, self._tokenizer)


def _ids_of(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
