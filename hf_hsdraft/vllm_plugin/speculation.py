"""How vLLM is told to draft with a drafter: its `speculative_config`. Nothing of vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.checks import is_integer, printable
from ..common.tuning import TUNING
from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..repository.checkpoint import Checkpoint
from .plugin_limits import check

NGRAMS = "ngrams"
_PROPOSER = "hf_hsdraft.vllm_plugin.ngram_proposer.NgramProposer"
_METHODS = (
    "eagle3",
    "peagle",
    "dflash",
    "dspark",
    "dflash2",
)  # in the format of speculators


def speculation_of(
    name: str | os.PathLike[str], num_speculative_tokens: int | None = None, on_cpu: bool = False
) -> dict[str, Any]:
    """Returns the `speculative_config` with which vLLM drafts with a drafter.

    Args:
        name: folder or Hub name of the drafter; `"ngrams"` for n-grams of the text, which need no drafter.
        num_speculative_tokens: length of a chain; `None` for as many tokens as the drafter drafts.
        on_cpu: whether vLLM runs on a CPU, where it refuses some methods.

    Raises:
        OSError: there is no such drafter.
        ValueError: vLLM does not draft with it, or not with such chains.
    """
    if name == NGRAMS:
        found: dict[str, Any] = {"method": "custom_class", "model": _PROPOSER}
        longest = TUNING.ngram_depth
    else:
        config = Checkpoint.open(name).config
        method, longest = _method_of(str(name), config)
        if on_cpu and method == "dspark":
            raise ValueError(
                f"{name} is a DSpark drafter, which vLLM runs by its second model runner, and that needs Triton: vLLM "
                "refuses it on CPUs. Use it in generate(), or a hidden-state or EAGLE-3 drafter in vLLM"
            )
        found = {"method": method, "model": str(Path(name).resolve()) if os.path.isdir(name) else str(name)}
    wanted = longest if num_speculative_tokens is None else num_speculative_tokens
    if not 1 <= wanted <= longest:
        raise ValueError(
            f"chains of {wanted} tokens do not go with {name}, which drafts {longest} tokens: expected 1 to {longest}"
        )
    return {**found, "num_speculative_tokens": wanted}


def _method_of(name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    """The method in vLLM, and the number of tokens that the drafter drafts."""
    if config.get("model_type") == HSDraftConfig.model_type:
        own = HSDraftConfig.from_dict(dict(config))
        check(own)
        return "eagle3", own.num_draft_steps
    method = config.get("speculators_model_type")
    if method not in _METHODS:
        seen = printable(method or config.get("model_type"))
        raise ValueError(
            f"vLLM does not draft with {name}, whose config.json says {seen}: expected a hidden-state drafter, one in "
            f"the format of speculators ({', '.join(_METHODS)}), or {NGRAMS!r}. `hsdraft export` writes that format"
        )
    return method, _proposed_tokens(name, config)


def _proposed_tokens(name: str, config: Mapping[str, Any]) -> int:
    """The number of tokens that a drafter in the format of speculators drafts, by its config.json."""
    described = config.get("speculators_config") or {}
    proposals = described.get("proposal_methods") or [{}] if isinstance(described, dict) else None
    if not isinstance(proposals, list) or not isinstance(proposals[0], dict):
        raise ValueError(
            f"the config.json of {name} is damaged: expected a list of mappings as proposal_methods in its "
            f"speculators_config, found {printable(described)}"
        )
    tokens = proposals[0].get("speculative_tokens") or config.get("block_size") or 1
    if not is_integer(tokens):
        raise ValueError(f"the config.json of {name} is damaged: it drafts {printable(tokens)} tokens, no number")
    return int(tokens)
