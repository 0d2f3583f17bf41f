"""Measures self-speculation: tau, the reused share of the target's work, and the speed-up with and without reuse.

    python benchmarks/layer_reuse.py --drafter self4 --drafter self8 --prompts heldout_prompts.jsonl

Each prompt is decoded plainly, with reused layers, and with all layers recomputed, in turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from runner import decoded, dtype_of, in_turns, loaded_target, options, print_table, prompt_texts

if TYPE_CHECKING:
    from hf_hsdraft.core.statistics import DraftStatistics

_WAYS = ("plain", "reuse", "anew")


@dataclass
class Compared:
    """What was measured of one drafter, by way of decoding."""

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
        return statistics.fmean((call.reused_share for call in self.calls["reuse"]), nodes)

    def speed_up(self, way: str) -> float:
        """Tokens per second over those of plain decoding."""
        rates = [self.tokens[each] / max(self.seconds[each], 1e-9) for each in (way, "plain")]
        return rates[0] / rates[1]

    def cells(self) -> list[Any]:
        """Returns a row of the table, without the drafter's name."""
        from hf_hsdraft.core.statistics import DraftStatistics

        texts = f"{self.same('reuse')} and {self.same('anew')} of {len(self.texts['plain'])}"
        speeds = self.speed_up("reuse"), self.speed_up("anew")
        return [DraftStatistics.sum(self.calls["reuse"]).tau, f"{self.reused:.0%}", *speeds, texts]


COLUMNS = (
    "drafter",
    "tau",
    "target's work reused",
    "speed-up",
    "speed-up, recomputed",
    "texts as plain, both",
)


def compare(
    target: Any, drafter: Any, inputs: Sequence[Mapping[str, Any]], max_new_tokens: int, **options: Any
) -> Compared:
    """Decodes prompts greedily in three ways, in changing order; the first one also before, to warm up.

    Of other families than self-speculation both ways of drafting are the same. `options` are drafting options that
    differ from the drafter's own.
    """
    drafters = {way: _with_options(drafter, **options, layer_reuse=way == "reuse") for way in _WAYS[1:]}
    found = Compared()
    for index, each in enumerate([inputs[0], *inputs]):
        decode = {way: partial(decoded, target, each, max_new_tokens, drafters.get(way)) for way in _WAYS}
        done = in_turns(decode, 1, warm_up=0, begin=index)
        if index == 0:
            continue
        for way, [call] in done.items():
            found.seconds[way] += call.seconds
            found.tokens[way] += len(call.texts[0])
            found.texts[way] += call.texts
            found.calls[way].append(call.statistics)
    return found


def _with_options(drafter: Any, **options: Any) -> Any:
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    known = {option.name for option in drafter.own_options}
    for name, value in options.items():
        if name != "layer_reuse" or name in known:
            setattr(other.generation_config, name, value)
    return other


_OPTIONS = ("num_assistant_tokens", "tree_size", "beam_width", "ngram_length", "tree_sizing")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(
        __doc__, target=None, drafter=..., prompts=..., limit=24, max_new_tokens=128, dtype="bfloat16", device="cpu"
    )
    parser.add_argument("--num-assistant-tokens", type=int, help="depth; default: the drafter's")
    parser.add_argument("--tree-size", type=int, help="default: the drafter's")
    parser.add_argument("--beam-width", type=int, help="1 drafts chains; default: the drafter's")
    parser.add_argument("--ngram-length", type=int, default=0, help="default: 0, no n-grams")
    parser.add_argument("--tree-sizing", choices=("cost", "fixed"), default="fixed", help="default: fixed")
    given = parser.parse_args(arguments)
    import torch

    from hf_hsdraft.generate.by_name import load_drafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompts

    target, tokenizer = loaded_target(given)
    inputs = encode_prompts(target, tokenizer, prompt_texts(given))
    chosen = {name: getattr(given, name) for name in _OPTIONS if getattr(given, name) is not None}
    print(f"{given.dtype}, {torch.get_num_threads()} threads, {len(inputs)} prompts, {chosen}\n")

    def row(name: str) -> list[Any]:
        drafter = load_drafter(name, dtype_of(given), given.device)
        return [name, *compare(target, drafter, inputs, given.max_new_tokens, **chosen).cells()]

    print_table(COLUMNS, map(row, given.drafter))


if __name__ == "__main__":
    main()
