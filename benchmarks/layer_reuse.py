"""What self-speculation brings: tau, the share of the target's work that is reused, and the speed-up.

    python benchmarks/layer_reuse.py --drafters self4 self8 self15 --prompts heldout_prompts.jsonl --count 24

Plain decoding, drafts whose layers are reused, and drafts whose layers are computed anew decode each prompt in turn.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_hsdraft.bench.measure import encode_prompt, pooled_tau
from hf_hsdraft.bench.run import spread, turn_order
from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from hf_hsdraft.engine.call_output import DraftStatistics
from hf_hsdraft.runtime.target_loading import load_target
from hf_hsdraft.training.data.conversations import read_prompts

_WAYS = ("plain", "reuse", "anew")


@dataclass
class Compared:
    """What was measured of one drafter.

    Attributes:
        seconds: of all calls, by the way of decoding.
        tokens: number of new tokens of all calls, by the way of decoding.
        calls: statistics of the drafted calls, by the way of decoding.
        texts: new tokens of each call, by the way of decoding.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WAYS, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_WAYS, 0))
    calls: dict[str, list[DraftStatistics]] = field(default_factory=lambda: {way: [] for way in _WAYS})
    texts: dict[str, list[list[int]]] = field(default_factory=lambda: {way: [] for way in _WAYS})

    def same(self, way: str) -> int:
        """Number of texts that are those of plain decoding."""
        return sum(plain == own for plain, own in zip(self.texts["plain"], self.texts[way], strict=True))

    @property
    def reused(self) -> float:
        """Share of the layers' work in verifying that the drafts had done, by the nodes of all calls."""
        nodes = [sum(call.drafted_nodes) + call.rounds for call in self.calls["reuse"]]
        shares = [call.reused_share for call in self.calls["reuse"]]
        return sum(map(float.__mul__, shares, map(float, nodes))) / max(sum(nodes), 1)

    def speed_up(self, way: str) -> float:
        """Tokens per second over those of plain decoding."""
        rates = [self.tokens[each] / max(self.seconds[each], 1e-9) for each in (way, "plain")]
        return rates[0] / rates[1]

    def line(self, name: str) -> str:
        tau = pooled_tau(self.calls["reuse"])
        return (
            f"| {name} | {tau:.2f} | {self.reused:.0%} | {self.speed_up('reuse'):.2f} | {self.speed_up('anew'):.2f} | "
            f"{self.same('reuse')} and {self.same('anew')} of {len(self.texts['plain'])} |"
        )


HEADER = (
    "| drafter | tau | target's work reused | speed-up | speed-up, computed anew | texts as plain, both |\n"
    "|---|---|---|---|---|---|"
)


def compare(
    target: Any, drafter: Any, inputs: Sequence[Mapping[str, Any]], max_new_tokens: int, **options: Any
) -> Compared:
    """Decodes prompts greedily in three ways, in changing order.

    Args:
        target: the target.
        drafter: a drafter; of other families than self-speculation both ways of drafting are the same.
        inputs: inputs of `generate()`, of one prompt each. The first one is also decoded before, to warm up.
        max_new_tokens: greatest number of new tokens of a text.
        options: drafting options that differ from the drafter's own.
    """
    ways = {way: _with_options(drafter, **options, layer_reuse=way == "reuse") for way in _WAYS[1:]}
    found = Compared()
    for index, each in enumerate([inputs[0], *inputs]):
        for way in turn_order(_WAYS, index):
            begin = time.perf_counter()
            output = target.generate(
                **each,
                assistant_model=ways.get(way),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
            )
            seconds = time.perf_counter() - begin
            if index == 0:
                continue
            text = output.sequences[0, each["input_ids"].shape[1] :].tolist()
            found.seconds[way] += seconds
            found.tokens[way] += len(text)
            found.texts[way].append(text)
            if way != "plain":
                found.calls[way].append(output.statistics)
    return found


def _with_options(drafter: Any, **options: Any) -> Any:
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    known = {option.name for option in drafter.own_options}
    for name, value in options.items():
        if name != "layer_reuse" or name in known:
            setattr(other.generation_config, name, value)
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", required=True, help="folders or Hub names")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `turns`")
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--num-assistant-tokens", type=int, help="depth; default: the drafter's")
    parser.add_argument("--tree-size", type=int)
    parser.add_argument("--beam-width", type=int, help="1 drafts chains")
    parser.add_argument("--ngram-length", type=int, default=0)
    parser.add_argument("--tree-sizing", choices=("cost", "fixed"), default="fixed")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    target, tokenizer = load_target(given.target, dtype, "cpu")
    prompts = spread(read_prompts(given.prompts), given.count)
    inputs = [encode_prompt(tokenizer, prompt.turns[0]) for prompt in prompts]
    names = ("num_assistant_tokens", "tree_size", "beam_width", "ngram_length", "tree_sizing")
    options = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    print(f"{given.dtype}, {torch.get_num_threads()} threads, {len(inputs)} prompts, {options}", HEADER, sep="\n")
    for name in given.drafters:
        drafter = AutoDrafter.from_pretrained(name, dtype=dtype).eval()
        print(compare(target, drafter, inputs, given.max_new_tokens, **options).line(name), flush=True)


if __name__ == "__main__":
    main()
