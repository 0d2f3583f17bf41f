"""Configuration of an EAGLE-3 drafter, in all published variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.checks import are_ascending, check_fields, demand, integer, is_integer, public_name, setting
from ...runtime.target_limits import decoder_layers, text_config
from ..base.decoder_layer import LayerSizes
from ..base.layer_fields import MOST_LAYERS
from ..base.plain_config import PlainConfig, described
from ..base.published import fresh_rope

_MOST_LAYERS, _MOST_TAPS = 4096, 64
DRAFT_STEPS = 7  # if the files do not say: the depth of the authors' trees


@described
@dataclass(frozen=True)
class EagleConfig(PlainConfig):
    """Configuration of an [`EagleDrafter`] (EAGLE-3, "Scaling up Inference Acceleration via Training-Time Test").

    Fields are checked on construction; a ValueError names one that is out of range or contradicts another.
    """

    model_type: ClassVar[str] = "eagle3"
    target_num_hidden_layers: ClassVar[None] = None  # any number that has the hidden states
    last_tap_is_normed: ClassVar[bool] = False

    layer: LayerSizes = setting("sizes of a layer, and what kind of layer it is")
    vocab_size: int = setting("size of the target's vocabulary", limit=integer(2**22))
    target_hidden_size: int = setting("width of the target's hidden states", limit=integer(2**17))
    draft_vocab_size: int = setting("V', the number of tokens that the drafter can propose", limit=integer(2**22))
    draft_vocab_ids: Sequence[int] | None = setting(
        "token ids behind the V' rows of the head, distinct; `None` for the first V'", None, repr=False
    )
    target_tap_layers: Sequence[int] | None = setting(
        "hidden states of the target that the drafter reads, ascending; 0 means the embeddings, i the output of layer "
        "i. `None` means 2, L // 2 and L - 3 of the L layers that the target turns out to have",
        None,
    )
    num_hidden_layers: int = setting(
        "number of layers. The first one alone reads embeddings too", 1, limit=integer(MOST_LAYERS)
    )
    windows: Sequence[int | None] = setting(
        "number of positions that each layer attends to, the own one included; `None` for all", (None,)
    )
    rope: Mapping[str, Any] = setting(
        "how positions are rotated: `rope_parameters`, or `rope_theta` and `rope_scaling`, and "
        "`max_position_embeddings`. A `rope_theta` that is missing is 10,000",
        default_factory=dict, hash=False
    )  # fmt: skip
    norm_before_residual: bool = setting("whether the first layer's residual is the normed state", False)
    norm_before_fc: bool = setting("whether all hidden states of the target are normed together", False)
    fc_norm: bool = setting("whether each of them is normed by itself", False)
    norm_output: bool = setting("whether the state that the next step reads is the normed one (EAGLE-3.1)", False)
    norm_output_told: bool = setting(
        "whether the files tell that. If not, calls try both, and change `norm_output`", True
    )
    own_embedding: bool = setting("whether the drafter has an embedding of its own", False)
    mask_token_id: int | None = setting(
        "token whose embedding the deeper rows of a parallel drafter read (P-EAGLE); `None` for a drafter that drafts "
        "one depth after the other",
        None,
    )
    num_draft_steps: int = setting("K, the greatest depth of a draft", DRAFT_STEPS, limit=integer(64))
    target_name: str = setting("name of the target, for messages and files", "")
    target_architectures: Sequence[str] = setting("class names of the target, for files", ())

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_taps()
        self._check_vocabulary()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc=True is invalid with fc_norm=True: expected one of them at most")
        if not self.own_embedding and self.layer.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.layer.hidden_size} is invalid without an embedding of the drafter's own: the "
                f"target's has width target_hidden_size={self.target_hidden_size}"
            )
        valid = len(self.windows) == self.num_hidden_layers and all(
            window is None or (is_integer(window) and self.num_draft_steps < window < 2**31) for window in self.windows
        )
        wanted = f"expected for each layer None, or an integer above num_draft_steps={self.num_draft_steps}"
        demand(valid, "windows", self.windows, wanted)

    def _check_taps(self) -> None:
        taps = self.target_tap_layers
        if taps is None:
            return
        valid = 0 < len(taps) <= _MOST_TAPS and are_ascending(taps, 0, _MOST_LAYERS)
        demand(valid, "target_tap_layers", taps, "expected ascending numbers of hidden states, each once")

    def _check_vocabulary(self) -> None:
        size, ids = self.draft_vocab_size, self.draft_vocab_ids
        wanted = f"the target has only vocab_size={self.vocab_size} tokens"
        demand(size <= self.vocab_size, "draft_vocab_size", size, wanted)
        if ids is not None:
            valid = len(ids) == size == len(set(ids)) and min(ids) >= 0 and max(ids) < self.vocab_size
            wanted = f"expected draft_vocab_size={size} distinct token ids from 0 to {self.vocab_size - 1}"
            demand(valid, "draft_vocab_ids", ids, wanted)
            wanted = "of a whole vocabulary the rows stand in the order of the tokens"
            demand(size < self.vocab_size or list(ids) == list(range(size)), "draft_vocab_ids", ids, wanted)
        if self.mask_token_id is not None:
            valid = is_integer(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size
            demand(valid, "mask_token_id", self.mask_token_id, f"expected a token id below {self.vocab_size}")

    @classmethod
    def for_target(
        cls,
        target: Any,
        num_draft_steps: int = DRAFT_STEPS,
        draft_vocab_size: int | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        target_tap_layers: Sequence[int] | None = None,
        **fields: Any,
    ) -> EagleConfig:
        """Derives the configuration of a new drafter from a loaded target: one layer like the target's.

        Args:
            num_draft_steps: K.
            draft_vocab_size: V'; by default the number of `draft_vocab_ids`, or the whole vocabulary.
            draft_vocab_ids: draftable token ids; the first V' by default.
            target_tap_layers: hidden states to read; by default a low, a middle and a high one.
            fields: other fields of the constructor. An invalid one raises a ValueError.
        """
        config = text_config(target)
        head_dim = {"head_dim": config.head_dim} if getattr(config, "head_dim", None) else {}
        layer = LayerSizes.like(config, rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6, **head_dim)
        if draft_vocab_size is None:
            draft_vocab_size = config.vocab_size if draft_vocab_ids is None else len(draft_vocab_ids)
        taps = default_taps(decoder_layers(config)) if target_tap_layers is None else tuple(target_tap_layers)
        known = {
            "layer": layer,
            "rope": fresh_rope(config),
            "target_name": public_name(getattr(target, "name_or_path", "")),
            "target_architectures": (type(target).__name__,),
        }
        return cls(
            vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            draft_vocab_size=draft_vocab_size,
            draft_vocab_ids=None if draft_vocab_ids is None else tuple(map(int, draft_vocab_ids)),
            target_tap_layers=taps,
            num_draft_steps=num_draft_steps,
            **{**known, **fields},
        )

    @property
    def num_taps(self) -> int:
        return 3 if self.target_tap_layers is None else len(self.target_tap_layers)

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that it reads of a target with so many layers."""
        if self.target_tap_layers is not None:
            return tuple(self.target_tap_layers)
        return 2, num_hidden_layers // 2, num_hidden_layers - 3

    @property
    def window(self) -> int | None:
        """The common window of all layers; raises a ValueError if they differ."""
        if len(set(self.windows)) > 1:
            raise ValueError(f"windows={self.windows} is invalid in training: expected the same of each layer")
        return self.windows[0]


def default_taps(num_hidden_layers: int) -> tuple[int, ...]:
    """Returns the authors' 2, L // 2 and L - 3; for a small target, clipped below its last layer."""
    wanted = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    return tuple(sorted({max(min(tap, num_hidden_layers - 1), 0) for tap in wanted}))
