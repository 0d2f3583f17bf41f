"""vLLM's `speculative_config` for a drafter. Does not import vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.checks import is_integer, printable
from ..core.tuning import NGRAM_DEPTH
from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..hub.checkpoint import Checkpoint

NGRAMS = "ngrams"
CPU_MEMORY = 0.5  # share that vLLM takes on a CPU; its default of 92% fails where that is not free
_PROPOSER = "hf_hsdraft.vllm_plugin.ngram_proposer.NgramProposer"
_NGRAM_TOKENS = 5  # default length of a chain
# vLLM's fields for each `speculators_model_type`. vLLM has no methods named `peagle` and `dflash2`.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}


def speculation_of(
    name: str | os.PathLike[str], num_speculative_tokens: int | None = None, on_cpu: bool = False
) -> dict[str, Any]:
    """Returns the `speculative_config` for a drafter.

    Args:
        name: folder or Hub name of the drafter; `"ngrams"` for n-grams of the text, which need no drafter.
        num_speculative_tokens: length of a chain; `None` for the drafter's maximum, or 5 for n-grams.
        on_cpu: whether vLLM runs on a CPU, where it refuses some methods.

    Raises:
        OSError: there is no such drafter.
        ValueError: vLLM does not support the drafter, or chains of this length.
    """
    if name == NGRAMS:
        found: dict[str, Any] = {"method": "custom_class", "model": _PROPOSER}
        usual, longest = _NGRAM_TOKENS, NGRAM_DEPTH
    else:
        config = Checkpoint.open(name).config
        fields, longest = _fields_of(str(name), config)
        if on_cpu and (kind := _refused_on_cpus(config)) is not None:
            raise ValueError(
                f"{name} is {kind}. Only vLLM's second model runner drafts with it, and that needs Triton: vLLM "
                "refuses it on CPUs. Run vLLM on a GPU (`hsdraft serve --device cuda`), use it in generate(), or use a "
                "hidden-state or EAGLE-3 drafter in vLLM"
            )
        found = {**fields, "model": str(Path(name).resolve()) if os.path.isdir(name) else str(name)}
        usual = longest
    wanted = usual if num_speculative_tokens is None else num_speculative_tokens
    if not 1 <= wanted <= longest:
        raise ValueError(
            f"chains of {wanted} tokens do not go with {name}, which drafts at most {longest} tokens: expected 1 to "
            f"{longest}"
        )
    return {**found, "num_speculative_tokens": wanted}


def is_hidden_state(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a hidden-state drafter, which vLLM runs by the plugin."""
    return config.get("model_type") == HSDraftConfig.model_type


def _fields_of(name: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """vLLM's fields for a drafter's kind, and the drafter's maximum chain length."""
    if is_hidden_state(config):
        own = HSDraftConfig.from_dict(dict(config))
        check(own)
        return {"method": "eagle3"}, own.num_draft_steps
    kind = config.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        seen = printable(kind or config.get("model_type"))
        raise ValueError(
            f"vLLM does not draft with {name}, whose config.json says {seen}: expected a hidden-state drafter, one in "
            f"the format of speculators ({', '.join(_FIELDS)}), or {NGRAMS!r}. `hsdraft hub export` writes that format"
        )
    head = config.get("markov_head_type") or "vanilla"
    if kind == "dspark" and head != "vanilla":
        raise ValueError(
            f"{name} has markov_head_type={printable(head)}, and vLLM drafts with 'vanilla' only: use it in "
            "generate(), or train one with that head"
        )
    return _FIELDS[kind], _proposed_tokens(name, config)


def _refused_on_cpus(config: Mapping[str, Any]) -> str | None:
    """Describes a drafter that vLLM refuses on CPUs; `None` for others."""
    kind = config.get("speculators_model_type")
    if kind == "dspark":
        return "a DSpark drafter"
    if kind == "dflash2":
        return "a DFlash2 drafter, with a head that chooses among candidates"
    layers = config.get("transformer_layer_config")
    types = layers.get("layer_types") if isinstance(layers, dict) else None
    if kind == "dflash" and isinstance(types, list) and 0 < types.count("sliding_attention") < len(types):
        return "a DFlash drafter with sliding and full attention in different layers"
    return None


def _proposed_tokens(name: str, config: Mapping[str, Any]) -> int:
    """The number of tokens that a drafter in the speculators format drafts."""
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


def state_width(config: HSDraftConfig) -> int:
    """Returns how many values pass between draft steps: drafted hidden state, injector's state, number of the step."""
    injector = 2 * config.injector_hidden_size if config.injector == "path" else config.injector_rank
    return config.hidden_size + injector + 1


def check(config: HSDraftConfig) -> None:
    """Raises a ValueError for a drafter that the plugin does not support."""
    told = {
        "a selector as injector": config.injector == "selector",
        "trained output rows": config.head != "target",
        "several sets of parameters for its steps": config.num_step_modules > 1,
        "roll-out steps through a part of its layers": config.num_roll_layers < config.num_hidden_layers,
        "an output of the target's last layer": config.target_tap_layers[-1] >= config.target_num_hidden_layers,
    }
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, with which the plugin for vLLM does not draft: use it in "
            "generate(), or train one with the defaults of `hsdraft train`"
        )
