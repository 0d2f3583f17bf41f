r"""Compares drafting in vLLM with drafting in `generate()`: the same texts, and acceptance by depth.

    python -m hf_hsdraft.bench.vllm_parity --vllm-python vllm/bin/python --prompts prompts.jsonl \
        --drafter my-drafter --drafter ngrams

vLLM decodes in a process of its own, without a drafter and with each, one request at a time and several at once. The
same prompts are decoded here by chains of the same length. Both decode greedily.

`TUNING.likely_columns` is set aside here: `generate()` looks at the likeliest tokens of a draft only, vLLM at all.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..core.tuning import TUNING
from ..drafters.ngrams.cacheback import CachebackDrafter
from ..generate.by_name import load_drafter
from ..runtime.prompt_inputs import encode_prompt
from ..runtime.target_loading import load_target, target_folder
from ..training.data.conversations import read_prompts
from ..vllm_plugin.speculation import NGRAMS, speculation_of
from .machine import processor
from .run import spread

_DTYPES = ("float32", "bfloat16", "float16")
_DEFINITION = (
    "chains: drafts that were verified. accepted: chains whose first, second, ... token was accepted. tokens/s: new "
    "tokens of all prompts over the seconds of all requests. same: texts that vLLM decodes without a drafter."
)


@dataclass(frozen=True)
class Decoded:
    """Prompts decoded by one system.

    Attributes:
        tokens: new tokens of each prompt.
        chains: number of drafts that were verified.
        accepted: number of drafts whose first, second, ... token was accepted.
        speed: new tokens per second.
    """

    tokens: list[list[int]]
    chains: int
    accepted: list[int]
    speed: float


def by_vllm(
    python: str, target: str, dtype: str, prompts: Sequence[list[int]], max_new_tokens: int, at_once: Sequence[int],
    speculation: dict[str, Any] | None, on_cpu: bool,
) -> list[Decoded]:  # fmt: skip
    """Decodes prompts in a process of vLLM's environment, once for each number of requests at once.

    Raises:
        RuntimeError: vLLM failed; the message has its last lines.
    """
    task = {
        "target": target, "dtype": dtype, "prompts": list(prompts), "max_new_tokens": max_new_tokens,
        "at_once": list(at_once), "speculation": speculation, "on_cpu": on_cpu,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked, done = Path(folder) / "task.json", Path(folder) / "done.json"
        asked.write_text(json.dumps(task))
        command = [python, "-m", "hf_hsdraft.vllm_plugin.decoding", str(asked), str(done)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if not done.exists():
            raise RuntimeError("vLLM did not decode:\n" + "\n".join((run.stdout + run.stderr).splitlines()[-15:]))
        return [
            Decoded(each["tokens"], each["chains"], each["accepted"], sum(map(len, each["tokens"])) / each["seconds"])
            for each in json.loads(done.read_text())
        ]


@contextlib.contextmanager
def all_columns() -> Iterator[None]:
    """Inside, `generate()` looks at all tokens of a draft, as vLLM does."""
    before = TUNING.likely_columns
    object.__setattr__(TUNING, "likely_columns", 2**30)
    try:
        yield
    finally:
        object.__setattr__(TUNING, "likely_columns", before)


def by_generate(target: Any, drafter: Any, prompts: Sequence[list[int]], max_new_tokens: int, length: int) -> Decoded:
    """Decodes prompts by `generate()` with chains of a fixed length. Rounds that draft nothing are no chains."""
    options = drafter.generation_config
    options.num_assistant_tokens, options.tree_size, options.beam_width = length, length, 1
    options.tree_sizing = "fixed"
    if not isinstance(drafter, CachebackDrafter):
        options.ngram_length = 0
    tokens, rounds, seconds = [], [], 0.0
    for prompt in prompts:
        begin = time.perf_counter()
        output = target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=max_new_tokens, assistant_model=drafter, return_dict_in_generate=True,
        )  # fmt: skip
        seconds += time.perf_counter() - begin
        found = output.statistics
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        rounds += [(a, n) for a, n in zip(found.accepted_lengths, found.drafted_nodes, strict=True) if n]
    accepted = [sum(length > depth for length, _ in rounds) for depth in range(length)]
    return Decoded(tokens, len(rounds), accepted, sum(map(len, tokens)) / max(seconds, 1e-9))


def same(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """Returns how many texts are the same in both lists, in words."""
    return f"{sum(list(a) == list(b) for a, b in zip(one, other, strict=True))} of {len(one)}"


def numbers_at_once(text: str) -> list[int]:
    """Returns the numbers of requests at once that a user asks for, as in `1,8`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise typer.BadParameter(f"{text}: expected whole numbers from 1 on, as in 1,8", param_hint="--at-once")
    return [int(part) for part in parts]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name that a user gave."""
    if name not in _DTYPES:
        raise typer.BadParameter(f"{name}: expected one of {', '.join(_DTYPES)}", param_hint="--dtype")
    return getattr(torch, name)


def main(
    vllm_python: Annotated[str, typer.Option(help="Interpreter of vLLM's environment.")],
    prompts: Annotated[Path, typer.Option(help="JSONL with `turns`.")],
    drafter: Annotated[list[str], typer.Option(help=f"Folder or Hub name, or {NGRAMS}; repeat.")],
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and drafters.")] = "float32",
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most, evenly from the categories.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    at_once: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "1,8",
    here: Annotated[bool, typer.Option(help="Decode by generate() too.")] = True,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a chain. Default: the drafter's; 5 of n-grams.")
    ] = None,
) -> None:
    """Prints, for each drafter, how many chains were accepted to which depth in vLLM and here, and the speeds."""
    numbers, kind = numbers_at_once(at_once), dtype_of(dtype)
    on_cpu = not torch.cuda.is_available()
    speculations = {name: speculation_of(name, num_speculative_tokens, on_cpu) for name in drafter}
    model, tokenizer = load_target(target, kind)
    questions = spread(read_prompts(prompts), limit)
    ids = [encode_prompt(tokenizer, each.turns[0])["input_ids"][0].tolist() for each in questions]
    console = Console(width=160)
    plain = by_vllm(vllm_python, target_folder(target, kind), dtype, ids, max_new_tokens, numbers, None, on_cpu)
    table = Table(title=f"{len(ids)} prompts, {max_new_tokens} tokens, {dtype}, {processor(torch.device('cpu'))}")
    for title in ("drafter", "decoded by", "at once", "chains", "accepted, by depth", "tokens/s", "over plain", "same"):
        table.add_column(title)
    for count, found in zip(numbers, plain, strict=True):
        table.add_row(
            "none", "vLLM", str(count), "", "", f"{found.speed:.1f}", "1", same(plain[0].tokens, found.tokens)
        )
    for name, speculation in speculations.items():
        label = Path(name).name
        served = by_vllm(
            vllm_python, target_folder(target, kind), dtype, ids, max_new_tokens, numbers, speculation, on_cpu
        )
        for count, without, found in zip(numbers, plain, served, strict=True):
            table.add_row(label, "vLLM", str(count), str(found.chains), ", ".join(map(str, found.accepted)),
                          f"{found.speed:.1f}", f"{found.speed / without.speed:.2f}",
                          same(plain[0].tokens, found.tokens))  # fmt: skip
        if here:
            loaded = CachebackDrafter() if name == NGRAMS else load_drafter(name, kind)
            with all_columns():
                found = by_generate(model, loaded, ids, max_new_tokens, speculation["num_speculative_tokens"])
            table.add_row(label, "generate()", "1", str(found.chains), ", ".join(map(str, found.accepted)),
                          f"{found.speed:.1f}", "", same(plain[0].tokens, found.tokens))  # fmt: skip
    console.print(table)
    console.print(_DEFINITION)


if __name__ == "__main__":
    typer.run(main)
