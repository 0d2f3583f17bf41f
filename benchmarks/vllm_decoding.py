"""Decodes prompts by vLLM, and writes texts, seconds and acceptance. It runs in vLLM's environment.

    python benchmarks/vllm_decoding.py task.json done.json

`vllm_parity.py` writes the task and reads the result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_COUNTERS = {"vllm:spec_decode_num_drafts": "chains", "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted"}


def decode(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Decodes the prompts of a task greedily, once for each number of requests at once.

    `task` has `target`, `dtype`, `speculation` (or `None`), `prompts` (lists of token ids), `max_new_tokens`, `at_once`
    (numbers of requests), `on_cpu`. Returns for each of these numbers `at_once`, `tokens` (a list of token ids for each
    prompt), `seconds` of all, `chains` that were drafted, and `accepted`, how many of them had their first, second, ...
    token accepted.
    """
    from vllm import LLM, SamplingParams

    from hf_hsdraft.vllm_plugin.speculation import CPU_MEMORY

    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    most = max(task["at_once"])
    longest = max(map(len, task["prompts"])) + task["max_new_tokens"] + 16
    llm = LLM(
        task["target"],
        dtype=task["dtype"],
        speculative_config=task["speculation"],
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=most * longest,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **({"gpu_memory_utilization": CPU_MEMORY} if task["on_cpu"] else {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=task["max_new_tokens"])
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # what a first call does once for all is not timed
    done = []
    for at_once in task["at_once"]:
        before = _counted(llm)
        begin = time.perf_counter()
        tokens: list[list[int]] = []
        for first in range(0, len(prompts), at_once):
            answers = llm.generate(prompts[first : first + at_once], sampling, use_tqdm=False)
            tokens += [list(answer.outputs[0].token_ids) for answer in answers]
        seconds = time.perf_counter() - begin
        news = {
            name: [now - then for now, then in zip(values, before[name], strict=True)]
            for name, values in _counted(llm).items()
        }
        counts = {"chains": sum(news.get("chains", [])), "accepted": news.get("accepted", [])}
        done.append({"at_once": at_once, "tokens": tokens, "seconds": seconds, **counts})
    return done


def _counted(llm: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        if (name := _COUNTERS.get(metric.name)) is not None:
            found[name] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    return found


def main(task: str, done: str) -> None:
    Path(done).write_text(json.dumps(decode(json.loads(Path(task).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
