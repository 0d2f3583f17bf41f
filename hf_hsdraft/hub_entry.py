"""The entry of a drafter's code where it travels with the weights: `auto_map` in config.json names this module.

Whoever loads a drafter by `AutoModel` and `trust_remote_code=True` gets the class from here, and with it the hook that
lets `generate(assistant_model=drafter)` take it.
"""

from __future__ import annotations

from .drafters.hidden_state.modeling_hsdraft import HSDrafter
from .generate_hook import install

install()

__all__ = ["HSDrafter"]
