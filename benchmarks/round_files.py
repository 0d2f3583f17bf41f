"""Prints the files of the package that one greedy round of one text passes through, with their lines.

    python benchmarks/round_files.py [--functions]

Traces a call with a tiny hidden-state drafter from its second round on, and prints the round with the most files. Costs
are given, so every run drafts the same; all other options are the defaults.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from runner import options

PACKAGE = Path(__file__).resolve().parents[1] / "hf_hsdraft"
TOKENS = 24

Functions = dict[str, set[str]]  # names of the functions that ran, by file of the package


def traced_round() -> Functions:
    """Returns the functions of a greedy round of one text, by file."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hf_hsdraft import HSDraftConfig, HSDrafter

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    target = AutoModelForCausalLM.from_config(config).eval()
    drafted = {"num_draft_steps": 4, "tree_size": 16, "beam_width": 5, "draft_vocab_size": 97}
    drafter = HSDrafter(HSDraftConfig.for_target(target, injector_rank=8, **drafted)).eval()
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    call = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": TOKENS}
    prompt = torch.randint(2, 97, (1, 11))
    rounds: list[Functions] = []
    for _ in range(2):  # the first call finds out what the target can do
        rounds.clear()
        try:
            target.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=_tracer(rounds), **call)
        finally:
            sys.setprofile(None)
    return max(rounds[1:-1], key=len)  # the last one holds the end of the call


def _tracer(rounds: list[Functions]) -> Any:
    """Returns an observer, in the place of a streamer, that notes what runs from each round's beginning to the next."""
    from hf_hsdraft.engine.loop import Observer

    class Tracer(Observer):
        def began(self) -> None:
            rounds.append(defaultdict(set))
            sys.setprofile(self._note)

        def _note(self, frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
                rounds[-1][str(file)].add(frame.f_code.co_qualname)

        def put(self, tokens: Any) -> None:
            """Of a streamer: takes tokens."""

        def end(self) -> None:
            sys.setprofile(None)

    return Tracer()


def needed(files: Functions) -> list[str]:
    """Returns the files without those that only make the same numbers faster, which depend on the machine."""
    return sorted(file for file in files if file.split("/")[0] not in ("cpu", "gpu"))


def _counted(files: Iterable[str]) -> str:
    lines = [len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files]
    return f"{len(lines)} files, {sum(lines):,} lines"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--functions", action="store_true", help="print the functions of each file too")
    given = parser.parse_args(arguments)
    found = traced_round()
    for file in sorted(found):
        print(file, _counted([file]).split(", ")[1], sep=": ")
        if given.functions:
            print(*(f"    {name}" for name in sorted(found[file])), sep="\n")
    print(_counted(found), f"{_counted(needed(found))} without cpu/ and gpu/", sep="; ")


if __name__ == "__main__":
    main()
