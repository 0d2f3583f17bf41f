"""Compares an EAGLE-3 drafter with its int8 copy (torchao's `Int8WeightOnlyConfig`): trees, texts, memory, time.

    pip install torchao
    python benchmarks/quantised_drafters.py --dtype bfloat16

Target and drafter are random, 2,048 wide, with 32,000 tokens; most of the drafter's weights are its head's.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from runner import dtype_of, in_turns, keep, options, print_table

PROMPT, NEW_TOKENS, DEPTH = 64, 24, 5


def made(dtype: Any) -> tuple[Any, Any, Any]:
    """Returns a target, a drafter and its int8 copy."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_hsdraft import EagleConfig, EagleDrafter

    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 32000}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=8)).to(dtype).eval()
    drafter = EagleDrafter(EagleConfig.for_target(target)).eval()
    drafter.reset_parameters(std=0.03)
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    smaller = copy.deepcopy(drafter.to(dtype))
    quantize_(smaller, Int8WeightOnlyConfig())
    return target, drafter, smaller


def size_of(drafter: Any) -> float:
    """Returns the MiB of a drafter's weights."""
    parts = [
        [each.qdata, each.scale] if hasattr(each, "qdata") else [each]  # torchao's tensors
        for each in drafter.parameters()
    ]
    return sum(part.nbytes for tensors in parts for part in tensors) / 2**20


def timed(session: Any, ask: Any) -> float:
    """Returns the seconds of a draft."""
    begin = time.perf_counter()
    session.draft([ask])
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, dtype="bfloat16", repeats=5, json=None).parse_args(arguments)
    import torch

    from hf_hsdraft.drafters.base.draft_options import DraftOptions
    from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call

    target, drafter, smaller = made(dtype_of(given))
    ids = torch.randint(5, 32000, (1, PROMPT))
    root, ask = int(ids[0, -1]), Ask(0, int(ids[0, -1]), DEPTH, 24, 8)
    with torch.inference_mode():
        states = target(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap][0, :-1] for tap in drafter.taps], dim=-1)

    def session(of: Any) -> Any:
        made_for = of.session(Call(target, 1, DraftOptions.of(of)))
        made_for.observe([Accepted(0, [root], taps, torch.arange(PROMPT - 1), ids[0, 1:])])
        return made_for

    ways = {"as trained": drafter, "int8": smaller}
    sessions = {name: session(each) for name, each in ways.items()}
    with torch.inference_mode():
        drafts = {name: partial(timed, each, ask) for name, each in sessions.items()}
        seconds = in_turns(drafts, given.repeats)
        trees = [sessions[name].draft([ask])[0] for name in ways]
    paths = [{tuple(tree.tokens[node] for node in tree.path(end)) for end in range(1, len(tree))} for tree in trees]
    plain = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    rows = []
    for (name, each), own in zip(ways.items(), paths, strict=True):
        text = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=each)
        same = "plain decoding's" if text.tolist() == plain.tolist() else "another"
        nodes = f"{len(own & paths[0])} of {len(paths[0])}"
        rows.append([name, f"{size_of(each):.0f}", f"{1e3 * median(seconds[name]):.0f}", nodes, same])
    columns = ["drafter", "weights, MiB", "draft, ms", "nodes of the first one", "text"]
    print_table(columns, rows)
    keep(given.json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
