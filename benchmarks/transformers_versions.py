"""One row of a table: what drafting does with the installed transformers, in float32 with drafts of a fixed size.

    python benchmarks/transformers_versions.py [--max-new-tokens 64]

The target is SmolLM2-135M-Instruct, with the drafter of `model_cards/` and the prompts of `hsdraft bench`. Each cell
is tau and the number of texts that equal plain `generate()`. tau is tokens emitted per target forward and row, bonus
included. Run it once for each version; every figure is a count, so the machine need not be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner import options, print_table, prompt_texts

if TYPE_CHECKING:
    import torch


def kept_rows(output: Any, plain: torch.Tensor) -> int:
    """Number of rows that equal plain decoding's."""
    import torch

    return sum(map(torch.equal, output.sequences, plain)) if output.sequences.shape == plain.shape else 0


def cell(target: Any, drafter: Any, calls: list[dict[str, Any]], tokens: int, seed: int | None) -> str:
    """Tau and equal texts of some calls, each with and without the drafter."""
    import torch

    tokens_made = forwards = same = texts = 0
    for inputs in calls:
        call = {**inputs, "max_new_tokens": tokens, "do_sample": seed is not None, "return_dict_in_generate": True}
        torch.manual_seed(seed or 0)
        plain = target.generate(**call).sequences
        torch.manual_seed(seed or 0)
        output = target.generate(**call, assistant_model=drafter)
        tokens_made, forwards = tokens_made + output.statistics.new_tokens, forwards + output.statistics.row_forwards
        same, texts = same + kept_rows(output, plain), texts + len(plain)
    return f"{tokens_made / forwards:.2f}, {same} of {texts}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the row."""
    given = options(__doc__, prompts=None, limit=None, max_new_tokens=64).parse_args(arguments)
    import torch
    import transformers

    from hf_hsdraft import AutoDrafter, load_target
    from hf_hsdraft.runtime.prompt_inputs import encode_batch, encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter

    target, tokenizer = load_target(None, dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(default_drafter(None), dtype=torch.float32)
    drafter.generation_config.tree_sizing = "fixed"
    prompts = prompt_texts(given)
    singly = [dict(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    batch = [dict(encode_batch(tokenizer, prompts, "cpu"))]
    static, batch_static = (
        [{**inputs, "cache_implementation": "static"} for inputs in calls] for calls in (singly, batch)
    )
    asked = {
        "dynamic cache": (singly, None),
        "sampled, seed 1": (singly, 1),
        "static cache": (static, None),
        f"batch of {len(prompts)}": (batch, None),
        f"batch of {len(prompts)}, static": (batch_static, None),
    }
    cells = [cell(target, drafter, calls, given.max_new_tokens, seed) for calls, seed in asked.values()]
    print_table(["transformers", *asked], [[transformers.__version__, *cells]])


if __name__ == "__main__":
    main()
