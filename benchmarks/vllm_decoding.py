"""Decodes prompts by vLLM, and writes texts, seconds and acceptance. It runs in vLLM's environment.

    python benchmarks/vllm_decoding.py task.json done.json
    python benchmarks/vllm_decoding.py --steps TARGET DTYPE ROWS

`vllm_parity.py` writes the task and reads the result. With `--steps` it takes steps of vLLM's engine for `serving.py`,
one for each line of JSON, `{"new": [[name, ids, tokens], ...]}`, and answers with the requests that have got a token:
`[[name, ended], ...]`.
"""

from __future__ import annotations

import json
import os
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


def take_steps(target: str, dtype: str, rows: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs there
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import EngineArgs, LLMEngine, SamplingParams

    args = EngineArgs(model=target, dtype=dtype, max_num_seqs=rows, max_model_len=2048)
    engine = LLMEngine.from_engine_args(args)

    def step(new: list[Any]) -> list[tuple[str, bool]]:
        for name, ids, count in new:
            sampling = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        found = engine.step() if engine.has_unfinished_requests() else []
        return [(each.request_id, each.finished) for each in found if each.outputs[0].token_ids]

    step([["first", [5, 6, 7], 4]])
    while engine.has_unfinished_requests():  # the first request takes long
        step([])
    print("true", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(step(json.loads(line)["new"])), file=answers, flush=True)


def main(task: str, done: str) -> None:
    Path(done).write_text(json.dumps(decode(json.loads(Path(task).read_text()))))


if __name__ == "__main__":
    if sys.argv[1] == "--steps":
        take_steps(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
