"""One row of a table: drafting with the installed transformers, in float32 with drafts of a fixed size.

    python benchmarks/transformers_versions.py [--max-new-tokens 64]

The target is SmolLM2-135M-Instruct, with the drafter of `model_cards/` and the prompts of `hsdraft bench`. Each cell
is tau and the number of texts that equal plain `generate()`. tau is tokens emitted per target forward and row, bonus
included. Run it once for each version. Every figure is a count, so the machine need not be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner import decoded, options, print_table, prompt_texts


def cell(target: Any, drafter: Any, calls: list[Any], tokens: int, seed: int | None, **call: Any) -> str:
    """Tau and equal texts of some calls, each with and without the drafter."""
    import torch

    tokens_made = forwards = same = texts = 0
    for inputs in calls:
        found = []
        for assistant in (None, drafter):
            torch.manual_seed(seed or 0)
            found.append(decoded(target, inputs, tokens, assistant, do_sample=seed is not None, **call))
        plain, drafted = found
        tokens_made += drafted.statistics.new_tokens
        forwards += drafted.statistics.row_forwards
        same += sum(own == other for own, other in zip(drafted.texts, plain.texts, strict=True))
        texts += len(plain.texts)
    return f"{tokens_made / forwards:.2f}, {same} of {texts}"


def main(arguments: Sequence[str] | None = None) -> None:
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
    singly = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    batch = [encode_batch(tokenizer, prompts, "cpu")]
    static = {"cache_implementation": "static"}
    asked: dict[str, Any] = {
        "dynamic cache": (singly, None, {}),
        "sampled, seed 1": (singly, 1, {}),
        "static cache": (singly, None, static),
        f"batch of {len(prompts)}": (batch, None, {}),
        f"batch of {len(prompts)}, static": (batch, None, static),
    }
    cells = [cell(target, drafter, calls, given.max_new_tokens, seed, **call) for calls, seed, call in asked.values()]
    print_table(["transformers", *asked], [[transformers.__version__, *cells]])


if __name__ == "__main__":
    main()
