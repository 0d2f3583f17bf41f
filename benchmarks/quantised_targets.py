"""One table of quantised and offloaded targets on a CPU: drafted or refused, the same text, tau, time over plain.

    python benchmarks/quantised_targets.py [--target FOLDER] [--drafter FOLDER] [--only quanto,HQQ]

Computes in float32 and decodes greedily. Libraries that are not installed are skipped. "apart" is the largest distance
in the last text between the target's logits of 9 tokens in one forward and of the same tokens read one at a time,
relative to their spread. The time over plain is of all prompts together; it needs an idle machine.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner import decoded, names, options, print_table, prompt_texts

if TYPE_CHECKING:
    import torch

_COLUMNS = ("target", "drafts", "apart", "same text", "tau", "time over plain", "reason")


def own_distance(target: Any, ids: torch.Tensor, columns: int = 9) -> float:
    """Distance between logits of tokens in one forward and of the same tokens read one at a time."""
    import torch

    name = "cache" if "cache" in inspect.signature(type(target).forward).parameters else "past_key_values"
    found = []
    with torch.no_grad():
        for start in range(ids.shape[1] // 2, ids.shape[1] - columns, columns):
            read = []
            for size in (1, columns):
                cache = getattr(target(ids[:, :start], use_cache=True), name)
                parts = ids[:, start : start + columns].split(size, dim=1)
                read.append(
                    torch.cat([target(part, use_cache=True, **{name: cache}).logits[0] for part in parts]).double()
                )
            apart = (read[1] - read[0]).norm(dim=-1) / (read[0] - read[0].mean(-1, keepdim=True)).norm(dim=-1)
            found.append(float(apart.max()))
    return max(found)


def row_of(target: Any, drafter: Any, prompts: Sequence[dict[str, Any]], tokens: int) -> list[Any]:
    """What became of some calls, as the cells of a table."""
    import torch

    from hf_hsdraft.core.refusals import DraftingRefused

    seconds, same, kinds, reason, new, forwards = [0.0, 0.0], 0, set(), "", 0, 0
    for inputs in prompts:
        plain = decoded(target, inputs, tokens)
        seconds[0] += plain.seconds
        try:
            drafted = decoded(target, inputs, tokens, drafter)
        except DraftingRefused as refusal:
            kinds, reason = kinds | {"refused"}, str(refusal)
            continue
        seconds[1] += drafted.seconds
        found, same = drafted.statistics, same + (plain.texts == drafted.texts)
        kinds, reason = kinds | {found.draft_kind}, found.reason or reason
        new, forwards = new + found.new_tokens, forwards + found.row_forwards
    apart = own_distance(target, torch.cat([inputs["input_ids"], torch.tensor(plain.texts)], dim=1))
    if kinds == {"refused"}:
        return ["refused", f"{apart:.0e}", None, None, None, reason]
    over = None if "refused" in kinds else seconds[1] / seconds[0]
    cells = [", ".join(sorted(kinds)), f"{apart:.0e}", f"{same} of {len(prompts)}", new / forwards]
    return [*cells, over, reason]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, drafter=None, prompts=None, limit=None, max_new_tokens=64)
    parser.add_argument("--only", type=names, default=[""], help="comma-separated beginnings of names of the table")
    given = parser.parse_args(arguments)
    import torch
    from quantised_loaders import TARGETS
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_hsdraft import AutoDrafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter, target_folder

    warnings.filterwarnings("ignore")
    folder = target_folder(given.target, torch.float32)
    [name] = given.drafter or [default_drafter(given.target)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [encode_prompt(tokenizer, text) for text in prompt_texts(given)]
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)

    def rows() -> Iterator[list[Any]]:
        for title, made in TARGETS.items():
            if not title.startswith(tuple(given.only)):
                continue
            torch.set_float32_matmul_precision("highest")  # some libraries lower it when they quantise
            try:
                target = made(load).eval()
            except ImportError as missing:
                yield [title, f"not tried: {missing}"]
                continue
            drafter = AutoDrafter.from_pretrained(name, dtype=torch.float32).eval()
            yield [title, *row_of(target, drafter, inputs, given.max_new_tokens)]

    print_table(_COLUMNS, rows())


if __name__ == "__main__":
    main()
