r"""Compares drafting in vLLM with drafting in `generate()`: the same texts, and acceptance by depth.

    python benchmarks/vllm_parity.py --vllm-python vllm/bin/python --prompts prompts.jsonl \
        --drafter my-drafter --drafter ngrams

vLLM decodes in a separate process, without a drafter and with each, one request at a time and several at once.
`generate()` decodes the same prompts here with chains of the same length. Both decode greedily.

`LIKELY_COLUMNS` is overridden: `generate()` considers only the likeliest tokens of a draft, vLLM all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import counts, decoded, dtype_of, loaded_target, options, print_table, prompt_texts

_DEFINITION = (
    "chains: drafts that were verified. accepted: chains whose first, second, ... token was accepted. tokens/s: new "
    "tokens of all prompts over the seconds of all requests. same: texts that vLLM decodes without a drafter."
)


@dataclass(frozen=True)
class Chains:
    """Prompts decoded by one system, by chains."""

    tokens: list[list[int]]  # new tokens of each prompt
    chains: int  # number of drafts that were verified
    accepted: list[int]  # number of drafts whose first, second, ... token was accepted
    speed: float  # new tokens per second


def by_vllm(
    python: str, target: str, dtype: str, prompts: Sequence[list[int]], max_new_tokens: int, at_once: Sequence[int],
    speculation: dict[str, Any] | None, on_cpu: bool,
) -> list[Chains]:  # fmt: skip
    """Decodes prompts in a process of vLLM's environment, once for each number of requests at once."""
    task = {
        "target": target, "dtype": dtype, "prompts": list(prompts), "max_new_tokens": max_new_tokens,
        "at_once": list(at_once), "speculation": speculation, "on_cpu": on_cpu,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked, done = Path(folder) / "task.json", Path(folder) / "done.json"
        asked.write_text(json.dumps(task))
        command = [python, str(Path(__file__).with_name("vllm_decoding.py")), str(asked), str(done)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if not done.exists():
            raise RuntimeError("vLLM did not decode:\n" + "\n".join((run.stdout + run.stderr).splitlines()[-15:]))
        return [
            Chains(each["tokens"], each["chains"], each["accepted"], sum(map(len, each["tokens"])) / each["seconds"])
            for each in json.loads(done.read_text())
        ]


@contextlib.contextmanager
def all_columns() -> Iterator[None]:
    """Inside, `generate()` looks at all tokens of a draft, as vLLM does."""
    from unittest.mock import patch

    from hf_hsdraft.drafters.base import tree_session
    from hf_hsdraft.drafters.hidden_state import quick_weights

    with contextlib.ExitStack() as stack:
        for module in (tree_session, quick_weights):
            stack.enter_context(patch.object(module, "LIKELY_COLUMNS", 2**30))
        yield


def by_generate(target: Any, drafter: Any, prompts: Sequence[list[int]], max_new_tokens: int, length: int) -> Chains:
    """Decodes prompts by `generate()` with chains of a fixed length. Rounds that draft nothing are no chains."""
    import torch

    from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter

    options = drafter.generation_config
    options.num_assistant_tokens, options.tree_size, options.beam_width = length, length, 1
    options.tree_sizing = "fixed"
    if not isinstance(drafter, CachebackDrafter):
        options.ngram_length = 0
    tokens, rounds, seconds = [], [], 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        call = decoded(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens, drafter)
        seconds += call.seconds
        tokens += call.texts
        found = call.statistics
        rounds += [(a, n) for a, n in zip(found.accepted_lengths, found.drafted_nodes, strict=True) if n]
    accepted = [sum(length > depth for length, _ in rounds) for depth in range(length)]
    return Chains(tokens, len(rounds), accepted, sum(map(len, tokens)) / max(seconds, 1e-9))


def same(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """Returns how many texts are the same in both lists, in words."""
    return f"{sum(list(a) == list(b) for a, b in zip(one, other, strict=True))} of {len(one)}"


_COLUMNS = ("drafter", "decoded by", "at once", "chains", "accepted, by depth", "tokens/s", "over plain", "same")


def cells(name: str, by: str, at_once: int, found: Chains, plain: Sequence[Chains], over: float | None) -> list[Any]:
    """Returns a row of the table; `over` are the tokens per second without a drafter, where they compare."""
    accepted, gain = ", ".join(map(str, found.accepted)), None if over is None else found.speed / over
    return [name, by, at_once, found.chains, accepted, f"{found.speed:.1f}", gain, same(plain[0].tokens, found.tokens)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, drafter=..., prompts=..., limit=12, max_new_tokens=64, dtype="float32")
    parser.add_argument("--vllm-python", required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--at-once", type=counts, default=[1, 8], help="numbers of requests at once; default: 1,8")
    here = {"action": argparse.BooleanOptionalAction, "default": True}
    parser.add_argument("--here", **here, help="decode by generate() too")
    parser.add_argument("--num-speculative-tokens", type=int, help="of a chain; default: the drafter's, 5 of n-grams")
    given = parser.parse_args(arguments)
    import torch

    from hf_hsdraft.bench.calls import processor
    from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter
    from hf_hsdraft.generate.by_name import load_drafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import target_folder
    from hf_hsdraft.vllm_plugin.speculation import NGRAMS, speculation_of

    on_cpu, new = not torch.cuda.is_available(), given.max_new_tokens
    speculations = {name: speculation_of(name, given.num_speculative_tokens, on_cpu) for name in given.drafter}
    model, tokenizer = loaded_target(given)
    ids = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in prompt_texts(given)]
    folder = target_folder(given.target, dtype_of(given))
    served = functools.partial(by_vllm, given.vllm_python, folder, given.dtype, ids, new, given.at_once, on_cpu=on_cpu)
    plain = served(speculation=None)

    def rows() -> Iterator[list[Any]]:
        for count, found in zip(given.at_once, plain, strict=True):
            yield cells("none", "vLLM", count, found, plain, found.speed)
        for name, speculation in speculations.items():
            label = Path(name).name
            for count, without, found in zip(given.at_once, plain, served(speculation=speculation), strict=True):
                yield cells(label, "vLLM", count, found, plain, without.speed)
            if given.here:
                loaded = CachebackDrafter() if name == NGRAMS else load_drafter(name, dtype_of(given))
                with all_columns():
                    found = by_generate(model, loaded, ids, new, speculation["num_speculative_tokens"])
                yield cells(label, "generate()", 1, found, plain, None)

    print(f"{len(ids)} prompts, {new} tokens, {given.dtype}, {processor(torch.device('cpu'))}\n")
    print_table(_COLUMNS, rows())
    print(f"\n{_DEFINITION}")


if __name__ == "__main__":
    main()
