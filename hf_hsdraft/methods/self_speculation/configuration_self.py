"""Configuration of a drafter by the target's own first layers: how many, and how large the imitation network is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checks import is_integer
from ...drafters.base.draft_options import MOST_NODES
from ...drafters.base.travelling_config import TravellingConfig, as_dict, as_list, demand
from ...hub.drafter_files import FORMAT_VERSION
from .layer_split import weights_of_a_layer

# The greatest values that make sense; beyond them lie typing errors and files that want to exhaust a machine.
LIMITS = {
    "format_version": 10**6, "vocab_size": 2**22, "target_hidden_size": 2**17, "target_num_hidden_layers": 4096,
    "draft_layers": 4096, "num_hidden_layers": 64, "intermediate_size": 2**20, "num_draft_steps": 64,
    "draft_vocab_size": 2**22, "tree_size": MOST_NODES, "beam_width": MOST_NODES,
}  # fmt: skip


class SelfDraftConfig(TravellingConfig):
    """Configuration of a [`SelfDrafter`]. [`SelfDraftConfig.for_target`] derives it from a loaded target.

    Every field is checked when the configuration is built, so a drafter that loads is one that fits together.

    Args:
        vocab_size: Size of the target's vocabulary. `generate()` compares it with the target's own.
        target_hidden_size: Width of the target's hidden states.
        target_num_hidden_layers: Number of decoder layers of the target.
        target_layer_weights: Number of weights of one of these layers, for estimates; 0 if it is not known.
        target_name: Name of the target, for messages and cards.
        target_revision: Commit of the target on the Hub, if it is known.
        target_tokenizer_hash: Digest of the target's tokenizer, if it is known.
        weights_digest: SHA-256 of each file of weights, by name. `save_pretrained` writes it.
        code_files: Names of the `*.py` files that were saved too, so that a later version can replace them.
            `save_pretrained` writes them.
        format_version: Version of the files. Newer ones than this version's are refused, older ones load.
        draft_layers: n, the number of the target's first layers that draft. `None` means a quarter of them.
        num_hidden_layers: Number of blocks of the imitation network.
        intermediate_size: Inner width of its blocks. `None` means four times that of the states.
        num_draft_steps: K, the greatest depth of the draft tree.
        rms_norm_eps: Epsilon of all RMS norms.
        head: `"target"` uses the target's own output rows and stores none, `"trained"` has its own.
        draft_vocab_size: V', the number of tokens the drafter can propose. `None` means all of them.
        draft_vocab_ids: Token ids behind the V' rows, ascending. `None` means the first V'.
        tree_size: Number of nodes of the draft tree, the root not counted.
        beam_width: Number of nodes of one depth that are expanded to the next. 1 drafts a chain.
        initializer_range: Standard deviation of the weight initialisation.

    Raises:
        ValueError: A field is out of range or contradicts another; the message names field, value and remedy.
    """

    model_type = "self_speculation"
    limits = LIMITS

    def __init__(
        self,
        vocab_size: int = 32000,
        target_hidden_size: int = 2048,
        target_num_hidden_layers: int = 24,
        target_layer_weights: int = 0,
        target_name: str = "",
        target_revision: str = "",
        target_tokenizer_hash: str = "",
        weights_digest: Mapping[str, str] | None = None,
        code_files: Sequence[str] | None = None,
        format_version: int = FORMAT_VERSION,
        draft_layers: int | None = None,
        num_hidden_layers: int = 1,
        intermediate_size: int | None = None,
        num_draft_steps: int = 5,
        rms_norm_eps: float = 1e-5,
        head: str = "target",
        draft_vocab_size: int | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        tree_size: int = 16,
        beam_width: int = 4,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.format_version = format_version
        self._check_format()  # before anything that a newer format may have changed
        self.vocab_size = vocab_size
        self.target_hidden_size, self.target_num_hidden_layers = target_hidden_size, target_num_hidden_layers
        for name in ("target_num_hidden_layers", "target_hidden_size"):
            self._check_integer(name)  # others are derived from these
        self.target_layer_weights = target_layer_weights
        self.target_name, self.target_revision = target_name, target_revision
        self.target_tokenizer_hash = target_tokenizer_hash
        self.weights_digest, self.code_files = as_dict(weights_digest), as_list(code_files)
        self.draft_layers = max(1, target_num_hidden_layers // 4) if draft_layers is None else draft_layers
        self.num_hidden_layers, self.tree_size, self.beam_width = num_hidden_layers, tree_size, beam_width
        self.intermediate_size = 4 * target_hidden_size if intermediate_size is None else intermediate_size
        self.num_draft_steps, self.head = num_draft_steps, head
        self.rms_norm_eps, self.initializer_range = rms_norm_eps, initializer_range
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.draft_vocab_ids = as_list(draft_vocab_ids)
        super().__init__(**kwargs)

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> SelfDraftConfig:
        """See [`TravellingConfig.for_target`]."""
        config: SelfDraftConfig = super().for_target(
            target, **{"target_layer_weights": weights_of_a_layer(target), **overrides}
        )
        return config

    @property
    def hidden_size(self) -> int:
        """Width of the imitation network."""
        return self.target_hidden_size

    @property
    def target_tap_layers(self) -> list[int]:
        """The hidden state of the target that training reads."""
        return [self.draft_layers]

    def check(self) -> None:
        layers, count = self.draft_layers, self.target_num_hidden_layers
        # Before the taps, which are derived from it.
        demand(is_integer(layers) and layers >= 1, "draft_layers", layers, "expected an integer of 1 or more")
        demand(layers < count, "draft_layers", layers, f"it must be below target_num_hidden_layers={count}")
        super().check()
        weights = self.target_layer_weights
        valid = is_integer(weights) and 0 <= weights < 2**40
        demand(valid, "target_layer_weights", weights, "expected an integer of 0 or more")

    def check_attention(self) -> None:
        """The drafter has no attention of its own."""


__all__ = ["SelfDraftConfig"]
