"""Configuration of a hidden-state drafter: what its target must be, and how large its own parts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checks import FORMAT_VERSION, MOST_NODES
from ..base.travelling_config import TravellingConfig, as_dict, as_list, default_tap_layers, demand

INJECTORS = ("low_rank", "path", "selector")

# The greatest values that make sense; beyond them lie typing errors and files that want to exhaust a machine.
LIMITS = {
    "format_version": 10**6, "vocab_size": 2**22, "target_hidden_size": 2**17, "target_num_hidden_layers": 4096,
    "hidden_size": 2**17, "num_hidden_layers": 64, "num_roll_layers": 64, "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12, "head_dim": 2**13, "intermediate_size": 2**20, "num_draft_steps": 64,
    "num_step_modules": 64, "injector_rank": 2**16,
    "injector_hidden_size": 2**17, "injector_top_k": 2**16, "draft_vocab_size": 2**22, "tree_size": MOST_NODES,
    "beam_width": MOST_NODES,
}  # fmt: skip


class HSDraftConfig(TravellingConfig):
    """Configuration of an [`HSDrafter`]. [`HSDraftConfig.for_target`] derives it from a loaded target.

    Every field is checked when the configuration is built, so a drafter that loads is one that fits together.

    Args:
        vocab_size: Size of the target's vocabulary. `generate()` compares it with the target's own.
        target_hidden_size: Width of the target's hidden states.
        target_num_hidden_layers: Number of decoder layers of the target.
        target_tap_layers: Hidden states of the target that the drafter reads, ascending (0 = embeddings, i = output of
            layer i). `None` picks one low, one middle and one high layer (EAGLE-3, section 3.1).
        target_name: Name of the target, for messages and cards.
        target_revision: Commit of the target on the Hub, if it is known.
        target_tokenizer_hash: What `target_match.tokenizer_hash` makes of the target's tokenizer.
        target_reference: A text by which the target is recognised, see `target_match`: its token ids `input_ids`, and
            the position `start` from which on the target wrote it. Of those tokens the target chooses `agreed` again,
            and the drafter's first choice hits `drafted`.
        weights_digest: SHA-256 of each file of weights, by name. `save_pretrained` writes it.
        code_files: Names of the `*.py` files that were saved too, so that a later version can replace them.
            `save_pretrained` writes them.
        format_version: Version of the files. Newer ones than this version's are refused, older ones load.
        hidden_size: Width of the drafted hidden states; `target_hidden_size` unless `head="trained"`.
        num_hidden_layers: Number of layers of the trunk. All of them read the accepted text; g_0 comes of the last one.
        num_roll_layers: Number of layers that a roll-out step goes through, which are the last ones; `None` means all.
            Fewer make the text's part deeper than the roll-out, which is what drafts cost.
        num_step_modules: M, the number of parameter sets that take turns by step (PRISM, processing modules). The first
            one reads the text and gives g_0. Step k has set k, and all steps from M - 1 on have the last one. A set is
            the projection of the state before and the `num_roll_layers` layers. They share keys and values.
        num_attention_heads: Number of attention heads of a trunk layer.
        num_key_value_heads: Number of key/value heads of a trunk layer (grouped-query attention).
        head_dim: Width of one head. `None` means `hidden_size // num_attention_heads`.
        intermediate_size: Inner width of the trunk's feed-forward blocks.
        num_draft_steps: K, the number of hidden states rolled out per round, and so the depth of the draft tree.
        sliding_window: Number of positions that the trunk attends to, the own one included; `None` for all. A trunk
            that sees all drafts worse beyond the lengths it was trained on.
        rms_norm_eps: Epsilon of all RMS norms.
        rope_theta: Base of the rotary position embedding.
        injector: How token information joins the hidden states. `"low_rank"` is the paper's bias W2 W1 e(parent);
            `"path"` is a gated network on hidden state, parent and the path from the root. `"selector"` scores pairs of
            the parent and each of the best candidates of a depth (DFlash2).
        injector_rank: r, the rank through which token information reaches the logits.
        injector_hidden_size: Inner width of the path injector.
        injector_top_k: Number of candidates of a depth that the selector scores.
        head: `"target"` uses the target's own output rows and stores none, `"trained"` has its own.
        draft_vocab_size: V', the number of tokens the drafter can propose. `None` means all of them.
        draft_vocab_ids: Token ids behind the V' rows, ascending. `None` means the first V'.
        tree_size: Number of nodes of the draft tree, the root not counted.
        beam_width: Number of nodes of one depth that are expanded to the next. 1 drafts a chain.
        initializer_range: Standard deviation of the weight initialisation.

    Raises:
        ValueError: A field is out of range or contradicts another; the message names field, value and remedy.
    """

    model_type = "hsdraft"
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
        target_reference: Mapping[str, Any] | None = None,
        weights_digest: Mapping[str, str] | None = None,
        code_files: Sequence[str] | None = None,
        format_version: int = FORMAT_VERSION,
        hidden_size: int | None = None,
        num_hidden_layers: int = 1,
        num_roll_layers: int | None = None,
        num_step_modules: int = 1,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        num_draft_steps: int = 6,
        sliding_window: int | None = None,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        injector: str = "path",
        injector_rank: int = 128,
        injector_hidden_size: int = 256,
        injector_top_k: int = 16,
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
        self.vocab_size, self.num_attention_heads, self.sliding_window = vocab_size, num_attention_heads, sliding_window
        self.target_hidden_size, self.target_num_hidden_layers = target_hidden_size, target_num_hidden_layers
        self.hidden_size = target_hidden_size if hidden_size is None else hidden_size
        for name in ("target_num_hidden_layers", "target_hidden_size", "num_attention_heads", "hidden_size"):
            self._check_integer(name)  # others are derived from these
        taps = default_tap_layers(target_num_hidden_layers) if target_tap_layers is None else target_tap_layers
        self.target_tap_layers, self.target_name, self.target_revision = as_list(taps), target_name, target_revision
        self.target_tokenizer_hash, self.target_reference = target_tokenizer_hash, as_dict(target_reference)
        self.weights_digest, self.code_files = as_dict(weights_digest), as_list(code_files)
        self.num_hidden_layers, self.tree_size, self.beam_width = num_hidden_layers, tree_size, beam_width
        self.num_roll_layers = num_hidden_layers if num_roll_layers is None else num_roll_layers
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = self.hidden_size // num_attention_heads if head_dim is None else head_dim
        self.intermediate_size = 4 * self.hidden_size if intermediate_size is None else intermediate_size
        self.num_draft_steps, self.num_step_modules, self.head = num_draft_steps, num_step_modules, head
        self.rms_norm_eps, self.rope_theta, self.initializer_range = rms_norm_eps, rope_theta, initializer_range
        self.injector, self.injector_rank, self.injector_top_k = injector, injector_rank, injector_top_k
        self.injector_hidden_size, self.draft_vocab_ids = injector_hidden_size, as_list(draft_vocab_ids)
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        super().__init__(**kwargs)

    def check(self) -> None:
        super().check()
        self._check_choice("injector", INJECTORS)
        self._check_steps()

    def _check_steps(self) -> None:
        layers, rolled = self.num_hidden_layers, self.num_roll_layers
        demand(rolled <= layers, "num_roll_layers", rolled, f"the trunk has only num_hidden_layers={layers}")
        steps, modules = self.num_draft_steps, self.num_step_modules
        wanted = f"there are only num_draft_steps={steps}, and each set of parameters needs a step"
        demand(modules <= steps, "num_step_modules", modules, wanted)


__all__ = ["HSDraftConfig"]
