"""This checkout against another one: the same texts, tau and speed, prompt by prompt in turns.

    python benchmarks/checkouts.py ../other-checkout [--dtype bfloat16] [--prompts dev.jsonl] [--max-new-tokens 64]

Each checkout has a separate process and decodes greedily; only one computes at a time, in changing order. tau is tokens
emitted per target forward, bonus included. "Speed" is tokens/s of this checkout over the other's: median and quartiles
of the prompts' ratios. Where drafts are sized by cost (the default) tau varies between runs; `--fixed` drafts the same
in every run. Needs an idle machine.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import LineWorker, options, print_table, prompt_texts

ROOT = Path(__file__).resolve().parents[1]
_WORKER = """
import json, sys, time, torch
sys.path.insert(0, sys.argv[1])
from transformers.utils.logging import disable_progress_bar
disable_progress_bar()
from hf_hsdraft import AutoDrafter, load_target
dtype, drafter_folder = getattr(torch, sys.argv[2]), sys.argv[3]
target, tokenizer = load_target(None, dtype=dtype)
drafter = AutoDrafter.from_pretrained(drafter_folder, dtype=dtype)
if sys.argv[4] == "fixed":
    drafter.generation_config.tree_sizing = "fixed"
say = lambda found: print(json.dumps(found), flush=True)
say("ready")
for line in sys.stdin:
    order = json.loads(line)
    chat = [{"role": "user", "content": order["prompt"]}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    call = {"do_sample": False, "max_new_tokens": order["tokens"], "return_dict_in_generate": True}
    began = time.perf_counter()
    output = target.generate(**inputs, **call, assistant_model=drafter)
    seconds = time.perf_counter() - began
    tokens = output.sequences[0, inputs["input_ids"].shape[1]:].tolist()
    say({"seconds": seconds, "tokens": tokens, "forwards": output.statistics.row_forwards})
"""


def worker_of(checkout: Path, dtype: str, fixed: bool) -> LineWorker:
    """Starts a process that decodes with the package of one checkout."""
    drafter = ROOT / "model_cards" / "SmolLM2-135M-Instruct-hsdraft"
    command = [sys.executable, "-c", _WORKER, str(checkout), dtype, str(drafter), "fixed" if fixed else "cost"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return LineWorker(command, cwd=checkout, env=environment)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, prompts=None, limit=None, max_new_tokens=64)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated; default: float32,bfloat16")
    parser.add_argument("--fixed", action="store_true", help="drafts of a fixed size, the same in every run")
    given = parser.parse_args(arguments)
    prompts = prompt_texts(given)
    columns = ("dtype", "prompts", "same text", "tau here", "tau there", "speed", "quartiles")
    print_table(columns, (row(given, dtype, prompts) for dtype in given.dtype.split(",")))


def row(given: Any, dtype: str, prompts: list[str]) -> list[Any]:
    workers = [worker_of(checkout.resolve(), dtype, given.fixed) for checkout in (ROOT, given.other)]
    found: list[list[dict[str, Any]]] = [[], []]
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        for side in (0, 1) if number % 2 else (1, 0):
            answer = workers[side].ask({"prompt": prompt, "tokens": given.max_new_tokens})
            if number:
                found[side].append(answer)
    for worker in workers:
        worker.close()
    ratios = [there["seconds"] / here["seconds"] for here, there in zip(*found, strict=True)]
    same = sum(here["tokens"] == there["tokens"] for here, there in zip(*found, strict=True))
    taus = [sum(len(one["tokens"]) for one in side) / sum(one["forwards"] for one in side) for side in found]
    low, median, high = statistics.quantiles(ratios, n=4)
    return [dtype, len(prompts), f"{same} of {len(prompts)}", *taus, f"{median:.3f}", f"{low:.2f} to {high:.2f}"]


if __name__ == "__main__":
    main()
