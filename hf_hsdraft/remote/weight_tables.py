"""The embedding rows that drafters borrow, as a server sends and a device caches them, and the target made of them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from .messages import INPUT, MOST_ROWS, OUTPUT, PIECE_BYTES, Hello, packed_states, unpacked_states

_NAMES = {INPUT: "input", OUTPUT: "output"}


class ServedTables:
    """The embedding tables of a target; `tied` if both are the same. `fingerprint` is a SHA-256 of all rows as sent."""

    def __init__(self, target: Any) -> None:
        rows = getattr(target.get_input_embeddings(), "weight", None)
        if not isinstance(rows, torch.Tensor):
            kinds = type(target).__name__, type(target.get_input_embeddings()).__name__
            raise ValueError(
                f"{kinds[0]} cannot be served: its input embedding, a {kinds[1]}, has no table `weight`, which devices "
                "draft with. Give the target an nn.Embedding."
            )
        rows = rows.detach()
        self._tables = {INPUT: rows}
        output: Any = getattr(target.get_output_embeddings(), "weight", None)
        is_table = isinstance(output, torch.Tensor) and output.is_floating_point() and output.shape == rows.shape
        if is_table and output.data_ptr() != rows.data_ptr():
            self._tables[OUTPUT] = output.detach()
        self.tied = OUTPUT not in self._tables
        self.fingerprint = _fingerprint(list(self._tables.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and width of a row."""
        rows, width = self._tables[INPUT].shape
        return rows, width

    def rows(self, table: int, first: int, count: int) -> bytes:
        """Returns packed rows; raises a ValueError if there are no such rows, or too many for a message."""
        rows, width = self.shape
        if first + count > rows or 2 * width * count > PIECE_BYTES:
            raise ValueError(f"rows {first} to {first + count} are asked for: the table has {rows}")
        return packed_states(self._tables.get(table, self._tables[INPUT])[first : first + count])


def weights_digest(target: Any) -> str:
    """Returns a SHA-256 of the names, shapes and some numbers of all weights, which identifies the target."""
    digest = hashlib.sha256()
    for name, weight in target.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if not weight.is_meta:  # offloaded layers are
            few = weight.detach().flatten()[:: max(weight.numel() // 64, 1)]
            digest.update(few.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def kept_tables(hello: Hello, fetch: Callable[[int, int, int], bytes]) -> dict[int, torch.Tensor]:
    """Returns the tables of a target, by `INPUT` and, unless tied, `OUTPUT`, each `[rows, width]`, bfloat16.

    They are cached on disk under their fingerprint. A cached file that does not match it is fetched again: `fetch`
    returns packed rows, given the table, the first row and their number. Raises a ValueError if those do not match.
    """
    path = Path(HF_HOME) / "hf_hsdraft" / f"{hello.fingerprint}.safetensors"
    wanted = [INPUT] if hello.tied else [INPUT, OUTPUT]
    kept = _on_disk(path)
    if not _is_announced(hello, kept, wanted):
        kept = {_NAMES[table]: _fetched(hello, table, fetch) for table in wanted}
        if not _is_announced(hello, kept, wanted):
            raise ValueError("the embedding rows that came in are not those that the server announced: try again")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        save_file(kept, partial)
        os.replace(partial, path)
    return {table: kept[_NAMES[table]] for table in wanted}


def _fetched(hello: Hello, table: int, fetch: Callable[[int, int, int], bytes]) -> torch.Tensor:
    step = max(min(PIECE_BYTES // (2 * hello.width), MOST_ROWS), 1)
    firsts = range(0, hello.rows, step)
    parts = [unpacked_states(fetch(table, at, min(step, hello.rows - at)), hello.width) for at in firsts]
    return torch.cat(parts)


def _on_disk(path: Path) -> dict[str, torch.Tensor]:
    """Cached tables; none where the file is missing or unreadable."""
    try:
        return load_file(path) if path.is_file() else {}
    except (OSError, SafetensorError):
        return {}


def _is_announced(hello: Hello, tables: dict[str, torch.Tensor], wanted: Sequence[int]) -> bool:
    shape = (hello.rows, hello.width)
    found = {name: (tuple(table.shape), table.dtype) for name, table in tables.items()}
    if found != {_NAMES[table]: (shape, torch.bfloat16) for table in wanted}:
        return False
    return _fingerprint([tables[_NAMES[table]] for table in wanted]) == hello.fingerprint


def _fingerprint(tables: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        for part in table.split(MOST_ROWS):
            digest.update(packed_states(part))
    return digest.hexdigest()


class TargetShell:
    """A target without layers; `tables` are `None` for drafters that borrow no rows."""

    training = False
    generation_config = None

    def __init__(
        self,
        hello: Hello,
        tables: Mapping[int, torch.Tensor] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.config = _config_of(hello)
        self.name_or_path = hello.target
        self.dtype = getattr(torch, hello.dtype, torch.float32)
        self.device = device
        with torch.device("meta"):  # drafters that read no hidden states ask for sizes only
            self._input = nn.Embedding(hello.rows, hello.width)
            self._output = nn.Linear(hello.width, hello.rows, bias=False)
        if tables is not None:
            rows = tables[INPUT].to(device, self.dtype)
            self._input.weight = nn.Parameter(rows, requires_grad=False)
            output = rows if hello.tied else tables[OUTPUT].to(device, self.dtype)
            self._output.weight = nn.Parameter(output, requires_grad=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._input

    def get_output_embeddings(self) -> nn.Linear:
        return self._output


def _config_of(hello: Hello) -> Any:
    """Parses the server's configuration; raises a ValueError if it cannot."""
    try:
        fields = json.loads(hello.config)
        kind = fields.pop("model_type", "")
        return AutoConfig.for_model(kind, **fields) if isinstance(kind, str) else PreTrainedConfig(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the server's target has a configuration that is not known here: {error}") from None
