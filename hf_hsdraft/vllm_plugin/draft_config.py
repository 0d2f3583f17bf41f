"""The configuration of a hidden-state drafter for vLLM."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from .speculation import check, state_width


class HSDraftVllmConfig(SpeculatorsConfig):
    """What vLLM reads from a drafter's configuration; raises a ValueError if the plugin does not support the drafter.

    vLLM passes one vector per position, of width `hidden_size`, from each forward of a draft model to the next. Here it
    holds more than the drafted hidden state, see `state_width`.
    """

    model_type = "hsdraft"

    def __init__(self, **fields: Any) -> None:
        if "target_tap_layers" not in fields:  # transformers creates an empty one for comparison
            super().__init__(**fields)
            return
        own = fields.get("drafter") or fields
        config = HSDraftConfig.from_dict(own)
        check(config)
        super().__init__(
            architectures=["HSDraftForVllm"],
            drafter=own,
            dtype=fields.get("dtype"),
            draft_vocab_size=config.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=list(config.target_tap_layers),
            head_dim=config.head_dim,
            hidden_size=state_width(config),
            max_position_embeddings=2**31 - 1,  # its positions are the target's, without a limit
            num_attention_heads=config.num_attention_heads,
            num_hidden_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            target_hidden_size=config.target_hidden_size,
            target_tap_layers=list(config.target_tap_layers),
            vocab_size=config.vocab_size,
        )
