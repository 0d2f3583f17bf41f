"""Configuration of a SpecFormer drafter: what its target must be, and how large its own parts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...drafters.base.decoder_layer import LayerSizes
from ...drafters.base.draft_options import MOST_NODES
from ...drafters.base.travelling_config import TravellingConfig, as_dict, as_list, demand
from ...hub.drafter_files import FORMAT_VERSION

# The greatest values that make sense; beyond them lie typing errors and files that want to exhaust a machine.
LIMITS = {
    "format_version": 10**6, "vocab_size": 2**22, "target_hidden_size": 2**17, "target_num_hidden_layers": 4096,
    "hidden_size": 2**17, "num_hidden_layers": 64, "num_attention_heads": 2**12, "num_key_value_heads": 2**12,
    "head_dim": 2**13, "intermediate_size": 2**20, "num_draft_steps": 64, "draft_vocab_size": 2**22,
    "tree_size": MOST_NODES, "beam_width": MOST_NODES,
}  # fmt: skip


class SpecFormerConfig(TravellingConfig):
    """Configuration of a [`SpecFormerDrafter`]. [`SpecFormerConfig.for_target`] derives it from a loaded target.

    Every field is checked when the configuration is built, so a drafter that loads is one that fits together.

    Args:
        vocab_size: Size of the target's vocabulary. `generate()` compares it with the target's own.
        target_hidden_size: Width of the target's hidden states.
        target_num_hidden_layers: Number of decoder layers of the target.
        target_tap_layers: Hidden states of the target that the drafter reads, ascending (0 = embeddings, i = output of
            layer i, the last one after the final norm). `None` picks the embeddings, a middle layer, and the last two
            (SpecFormer).
        target_name: Name of the target, for messages and cards.
        target_revision: Commit of the target on the Hub, if it is known.
        target_tokenizer_hash: Digest of the target's tokenizer, if it is known.
        weights_digest: SHA-256 of each file of weights, by name. `save_pretrained` writes it.
        code_files: Names of the `*.py` files that were saved too, so that a later version can replace them.
            `save_pretrained` writes them.
        format_version: Version of the files. Newer ones than this version's are refused, older ones load.
        hidden_size: Width of the slots; `target_hidden_size` unless `head="trained"`.
        num_hidden_layers: Number of layers over the slots; SpecFormer has one.
        num_attention_heads: Number of attention heads, over the text and over the slots.
        num_key_value_heads: Number of key/value heads (grouped-query attention).
        head_dim: Width of one head. `None` means `hidden_size // num_attention_heads`.
        intermediate_size: Inner width of the feed-forward blocks.
        num_draft_steps: K, the number of slots, and so the depth of the draft tree.
        reads_tokens: Whether slots know the last accepted token. SpecFormer's do not, see [`SpecFormerNetwork`].
        ctc: Whether slots are frames of which each may be blank, and are collapsed into a tree, see `collapsed_frames`
            ("CTC drafter"). Such a drafter has learned by `objective="ctc"`.
        sliding_window: Number of positions that the slots attend to, the own one included; `None` for all. A drafter
            that sees all drafts worse beyond the lengths it was trained on.
        rms_norm_eps: Epsilon of all RMS norms.
        rope_theta: Base of the rotary position embedding.
        head: `"target"` uses the target's own output rows and stores none, `"trained"` has its own.
        draft_vocab_size: V', the number of tokens the drafter can propose. `None` means all of them.
        draft_vocab_ids: Token ids behind the V' rows, ascending. `None` means the first V'.
        tree_size: Number of nodes of the draft tree, the root not counted.
        beam_width: Number of nodes of one depth that are expanded to the next. 1 drafts a chain.
        initializer_range: Standard deviation of the weight initialisation.

    Raises:
        ValueError: A field is out of range or contradicts another; the message names field, value and remedy.
    """

    model_type = "specformer"
    limits = LIMITS

    def __init__(
        self,
        vocab_size: int = 32000,
        target_hidden_size: int = 2048,
        target_num_hidden_layers: int = 24,
        target_tap_layers: Sequence[int] | None = None,
        target_name: str = "",
        target_revision: str = "",
        target_tokenizer_hash: str = "",
        weights_digest: Mapping[str, str] | None = None,
        code_files: Sequence[str] | None = None,
        format_version: int = FORMAT_VERSION,
        hidden_size: int | None = None,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        num_draft_steps: int = 8,
        reads_tokens: bool = True,
        ctc: bool = False,
        sliding_window: int | None = None,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        head: str = "target",
        draft_vocab_size: int | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        tree_size: int = 24,
        beam_width: int = 8,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.format_version = format_version
        self._check_format()  # before anything that a newer format may have changed
        self.vocab_size, self.num_attention_heads = vocab_size, num_attention_heads
        self.target_hidden_size, self.target_num_hidden_layers = target_hidden_size, target_num_hidden_layers
        self.hidden_size = target_hidden_size if hidden_size is None else hidden_size
        for name in ("target_num_hidden_layers", "target_hidden_size", "num_attention_heads", "hidden_size"):
            self._check_integer(name)  # others are derived from these
        taps = default_tap_layers(target_num_hidden_layers) if target_tap_layers is None else target_tap_layers
        self.target_tap_layers, self.target_name, self.target_revision = as_list(taps), target_name, target_revision
        self.target_tokenizer_hash = target_tokenizer_hash
        self.weights_digest, self.code_files = as_dict(weights_digest), as_list(code_files)
        self.num_hidden_layers, self.tree_size, self.beam_width = num_hidden_layers, tree_size, beam_width
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = self.hidden_size // num_attention_heads if head_dim is None else head_dim
        self.intermediate_size = 4 * self.hidden_size if intermediate_size is None else intermediate_size
        self.num_draft_steps, self.sliding_window, self.head = num_draft_steps, sliding_window, head
        self.reads_tokens, self.ctc = reads_tokens, ctc
        self.rms_norm_eps, self.rope_theta, self.initializer_range = rms_norm_eps, rope_theta, initializer_range
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.draft_vocab_ids = as_list(draft_vocab_ids)
        super().__init__(**kwargs)

    def check(self) -> None:
        super().check()
        for name in ("reads_tokens", "ctc"):
            demand(isinstance(getattr(self, name), bool), name, getattr(self, name), "expected true or false")

    @property
    def sizes(self) -> LayerSizes:
        """Sizes of the layers."""
        return LayerSizes(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.rms_norm_eps,
        )


def default_tap_layers(num_hidden_layers: int) -> list[int]:
    """The embeddings, a middle layer, and the last two, as indices into `hidden_states` (SpecFormer)."""
    return sorted({0, num_hidden_layers // 2, num_hidden_layers - 1, num_hidden_layers})


__all__ = ["SpecFormerConfig"]
