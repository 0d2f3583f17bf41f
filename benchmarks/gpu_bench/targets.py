"""The targets of `gpu.py`, with their prompts and drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from oracles.forced_drafter import ForcedDrafter, let_count, pattern
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_hsdraft.bench.calls import padded_batches
from hf_hsdraft.drafters.base.draft_options import BATCH_SHARE
from hf_hsdraft.drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter
from hf_hsdraft.runtime.prompt_inputs import encode_prompt
from hf_hsdraft.runtime.target_loading import default_drafter, load_target

from .plan import Settings

Inputs = dict[str, torch.Tensor]
_PROMPTS_ALONE = 4  # calls of one text each


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, by the names of `LlamaConfig`. The defaults are those of Llama-3-8B."""

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    vocab_size: int = 128256


TINY = Shape(128, 4, 4, 2, 256, 384)


@dataclass(frozen=True)
class Case:
    """A target to decode and to train for."""

    target: Any
    inputs: Callable[[int], list[Inputs]]  # takes a number of texts, and returns the inputs of each call
    # By name in the table; each takes the number of texts and returns a drafter for one call. Drafters of forced calls
    # keep their place in the pattern.
    drafters: Mapping[str, Callable[[int], Any]]
    longest: int  # tokens of the longest prompt


def case_of(name: str, settings: Settings, device: torch.device, prompts: Sequence[str]) -> Case:
    """Returns the case of a target, `"8b"` or `"smollm2"`. The texts `prompts` are SmolLM2's."""
    torch.manual_seed(settings.seed)
    dtype = getattr(torch, settings.dtype)
    if name == "8b" or settings.tiny:
        target = random_target(TINY if settings.tiny else Shape(), settings, device, dtype)
        return _counting(target, settings) if name == "8b" else _tiny(target, settings)
    target, tokenizer = load_target(None, dtype, device)
    folder = default_drafter(None)
    if folder is None:
        raise FileNotFoundError("the committed drafter is missing: run this in a checkout")
    drafter = HSDrafter.from_pretrained(folder, dtype=dtype).to(device).eval()
    texts = [prompts[index % len(prompts)] for index in range(max(*settings.batches, _PROMPTS_ALONE))]
    alone = [encode_prompt(tokenizer, text, device) for text in texts]

    def inputs(rows: int) -> list[Inputs]:
        return alone[:_PROMPTS_ALONE] if rows == 1 else padded_batches(tokenizer, texts[:rows], rows, device)

    longest = max(each["input_ids"].shape[1] for each in alone)
    return Case(target, inputs, {"default": lambda rows: drafter, **_fixed(drafter, settings)}, longest)


def random_target(shape: Shape, settings: Settings, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a Llama with random weights, made on the device."""
    length = 2 * (settings.prompt_length + settings.max_new_tokens + settings.rows)
    config = LlamaConfig(
        **asdict(shape),
        max_position_embeddings=max(length, settings.train_length, 1024),
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_drafter(target: Any, **fields: Any) -> HSDrafter:
    """Returns an untrained drafter of a target's device and dtype."""
    with torch.device(target.device):
        return HSDrafter(HSDraftConfig.for_target(target, **fields)).to(target.dtype).eval()


def with_nodes(drafter: Any, nodes: int, rows: int) -> None:
    """Lets a drafter draft a fixed number of nodes for each of `rows` texts, without n-grams."""
    options = drafter.generation_config
    # Rows of a batch share a part of the option's nodes.
    options.tree_size = nodes if rows == 1 else math.ceil(nodes * rows / BATCH_SHARE)
    options.tree_sizing, options.ngram_length, options.ngram_continuation = "fixed", 0, 0


def _counting(target: Any, settings: Settings) -> Case:
    """A target that counts, and drafts with forced acceptance."""
    let_count(target)
    drafter = random_drafter(target, num_draft_steps=5)
    generator = torch.Generator().manual_seed(settings.seed)
    size = max(settings.batches), settings.prompt_length
    ids = torch.randint(1, target.config.vocab_size, size, generator=generator).to(target.device)

    def inputs(rows: int) -> list[Inputs]:
        return [{"input_ids": ids[:rows], "attention_mask": torch.ones_like(ids[:rows])}]

    def forced(rate: float) -> Callable[[int], Any]:
        def made(rows: int) -> Any:
            with_nodes(drafter, settings.nodes_of_text(rows), rows)
            return ForcedDrafter(drafter, pattern(rate, drafter.num_draft_steps))

        return made

    drafters = {f"acceptance {rate:g}": forced(rate) for rate in settings.rates}
    return Case(target, inputs, drafters, settings.prompt_length)


def _tiny(target: Any, settings: Settings) -> Case:
    """A small target in place of SmolLM2, with an untrained drafter."""
    drafter = random_drafter(target)
    ids = torch.randint(1, target.config.vocab_size, (max(settings.batches), settings.prompt_length))
    ids = ids.to(target.device)

    def inputs(rows: int) -> list[Inputs]:
        return [{"input_ids": ids[:rows], "attention_mask": torch.ones_like(ids[:rows])}]

    drafters = {"default": lambda rows: drafter, **_fixed(drafter, settings)}
    return Case(target, inputs, drafters, settings.prompt_length)


def _fixed(drafter: Any, settings: Settings) -> dict[str, Callable[[int], Any]]:
    """The same drafter with drafts of a fixed size."""
    from hf_hsdraft.drafters.base.protocol import WrappedDrafter

    def made(rows: int) -> Any:
        wrapped = WrappedDrafter(drafter)
        with_nodes(wrapped, settings.nodes_of_text(rows), rows)
        return wrapped

    return {"fixed size": made}
