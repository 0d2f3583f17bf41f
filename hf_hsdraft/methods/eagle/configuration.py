"""Configuration and decoder layers of EAGLE drafters, with the parameter names of published files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.checks import demand, integer, is_integer, setting
from ...core.tensors import RMSNorm
from ...drafters.base.plain_config import described
from ...runtime.target_limits import decoder_layers, text_config
from ..published.decoder_layer import Attend, Attention, DecoderLayer, LayerSizes, Rope, rotate
from ..published.network import PublishedConfig, fields_of_target
from ..published.target_sizes import FLAG, number

_MOST_PADDING = 1024  # rows of an embedding beyond the last token
DRAFT_STEPS = 7  # if the files do not say: the depth of the authors' trees


@described
@dataclass(frozen=True, kw_only=True)
class EagleConfig(PublishedConfig):
    """Configuration of an [`EagleDrafter`] (EAGLE-3, "Scaling up Inference Acceleration via Training-Time Test").

    With `fuses_embedding` it is an EAGLE-1 or EAGLE-2 drafter ("Rethinking Feature Uncertainty"). Fields are checked on
    construction; a ValueError names one that is out of range or contradicts another. Without `mask_token_id` it drafts
    one depth after the other, with it all at once (P-EAGLE).
    """

    model_type: ClassVar[str] = "eagle3"

    draft_vocab_ids: Sequence[int] | None = setting(
        "token ids behind the V' rows of the head, distinct; `None` for the first V'", None, repr=False
    )
    windows: Sequence[int | None] = setting(
        "number of positions that each layer attends to, the own one included; `None` for all", (None,)
    )
    norm_before_residual: bool = setting("whether the first layer's residual is the normed state", False, FLAG)
    norms_state_twice: bool = setting(
        "whether the norm of embeddings is that of the first layer's state too, before its own", False, FLAG
    )
    norm_before_fc: bool = setting("whether all hidden states of the target are normed together", False, FLAG)
    fc_norm: bool = setting("whether each of them is normed by itself", False, FLAG)
    norm_output: bool = setting("whether the state that the next step reads is the normed one (EAGLE-3.1)", False, FLAG)
    own_embedding: bool = setting("whether the drafter has its own embedding", False, FLAG)
    own_head: bool = setting("whether it has its own output rows instead of the target's", True, FLAG)
    logit_scale: float = setting("factor of the logits", 1.0, number())
    final_logit_softcapping: float = setting("cap of the logits; 0 for none", 0.0, number())
    fuses_embedding: bool = setting(
        "whether `fc` reads the token's embedding and one hidden state, and no layer reads the former (EAGLE-1)",
        False, FLAG
    )  # fmt: skip
    has_fc: bool = setting("whether there is `fc`; without it one hidden state is read as it is", True, FLAG)
    fc_bias: bool = setting("whether `fc` has a bias", False, FLAG)
    all_read_embeddings: bool = setting("whether all layers read the embedding, not only the first", False, FLAG)
    num_draft_steps: int = setting("K, the greatest depth of a draft", DRAFT_STEPS, limit=integer(64))

    def __post_init__(self) -> None:
        super().__post_init__()
        size, ids = self.draft_vocab_size, self.draft_vocab_ids
        if ids is not None:
            valid = len(ids) == size == len(set(ids)) and min(ids) >= 0 and max(ids) < (self.vocab_size or 0)
            wanted = f"expected draft_vocab_size={size} distinct token ids from 0 to {(self.vocab_size or 0) - 1}"
            demand(valid, "draft_vocab_ids", ids, wanted)
            wanted = "of a whole vocabulary the rows stand in the order of the tokens"
            demand(self.is_reduced or list(ids) == list(range(len(ids))), "draft_vocab_ids", ids, wanted)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc=True is invalid with fc_norm=True: expected one of them at most")
        width = self.sizes.hidden_size
        wanted = f"the target has target_hidden_size={self.target_hidden_size}, whose embedding, state or head is used"
        fuses_several, taps = self.has_fc and not self.fuses_embedding, self.num_taps
        is_free = self.own_embedding and self.own_head and fuses_several
        demand(is_free or width == self.target_hidden_size, "hidden_size", width, wanted)
        demand(fuses_several or taps == 1, "target_tap_layers", taps, "expected one, as fc does not fuse several")
        valid = len(self.windows) == self.num_hidden_layers and all(
            window is None or (is_integer(window) and self.num_draft_steps < window < 2**31) for window in self.windows
        )
        wanted = f"expected for each layer None, or an integer above num_draft_steps={self.num_draft_steps}"
        demand(valid, "windows", self.windows, wanted)

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
        known = fields_of_target(target)
        known["sizes"] = LayerSizes.like(config, rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6, **head_dim)
        taps = default_taps(decoder_layers(config)) if target_tap_layers is None else tuple(target_tap_layers)
        known |= {"target_tap_layers": taps, "num_draft_steps": num_draft_steps}
        if draft_vocab_ids is not None:
            known |= {"draft_vocab_ids": tuple(map(int, draft_vocab_ids)), "draft_vocab_size": len(draft_vocab_ids)}
        if draft_vocab_size is not None:
            known["draft_vocab_size"] = draft_vocab_size
        return cls(**{**known, **fields})

    @property
    def padding(self) -> int:
        if self.draft_vocab_size is None or self.vocab_size is None:
            return 0
        needed = [0] if self.mask_token_id is None or self.own_embedding else [self.mask_token_id + 1]
        if self.is_reduced:  # else the rows beyond are left out
            needed.append(self.draft_vocab_size if self.draft_vocab_ids is None else max(self.draft_vocab_ids) + 1)
        return min(self.vocab_size - max(needed), _MOST_PADDING)

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


@dataclass(frozen=True, kw_only=True)
class LatentSizes(LayerSizes):
    """Sizes of a layer whose keys and values are made of one narrow state (MLA of DeepSeek-V2, section 2.1).

    `head_dim` is the width of queries and keys; the last `rotary_dim` of it are rotated.
    """

    q_lora_rank: int | None = setting(
        "width of the state that queries are made of", None, integer(2**17), optional=True
    )
    kv_lora_rank: int = setting("width of the state that keys and values are made of", limit=integer(2**17))
    rotary_dim: int = setting("width of the part of a head that is rotated", limit=integer(2**13))
    v_head_dim: int = setting("width of a head's values", limit=integer(2**13))
    score_scale: float = setting("factor of the scores, beside that by the width of heads", 1.0, number())


class LatentAttention(nn.Module):
    """MLA; the arguments are those of `Attention`. Stores whole keys and values."""

    def __init__(self, sizes: LatentSizes, input_size: int | None = None) -> None:
        super().__init__()
        inputs, heads, eps = input_size or sizes.hidden_size, sizes.num_attention_heads, sizes.rms_norm_eps
        self._sizes, rank = sizes, sizes.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(inputs, heads * sizes.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(inputs, rank, bias=sizes.attention_bias)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = nn.Linear(rank, heads * sizes.head_dim, bias=False)
        rotated, rank = sizes.rotary_dim, sizes.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(inputs, rank + rotated, bias=sizes.attention_bias)
        self.kv_a_layernorm = RMSNorm(rank, eps)
        self.kv_b_proj = nn.Linear(rank, heads * (sizes.head_dim - rotated + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, sizes.hidden_size, bias=sizes.output_bias)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Maps inputs `[..., n, input_size]` to `[..., n, D]`; with `rows`, for these rows only."""
        sizes, heads = self._sizes, (self._sizes.num_attention_heads, -1)
        state, shared = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.rotary_dim], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(state)).unflatten(-1, heads)
        keys, values = made.split([sizes.head_dim - sizes.rotary_dim, sizes.v_head_dim], dim=-1)
        turned = _turned(shared[..., None, :], rope).expand(*keys.shape[:-1], -1)
        if rows is not None:
            x, rope = x[rows], (rope[0][rows], rope[1][rows])
        made = self.q_proj(x) if sizes.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, rotated = made.unflatten(-1, heads).split([keys.shape[-1], sizes.rotary_dim], dim=-1)
        queries = torch.cat([plain, _turned(rotated, rope)], dim=-1) * sizes.score_scale
        return self.o_proj(attend(queries, torch.cat([keys, turned], dim=-1), values, rows))


def _turned(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates pairs of neighbours; the result is in another order, the same for queries and keys."""
    return rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2), rope)


class EagleLayer(DecoderLayer):
    """A decoder layer. In EAGLE-3 the first one also reads an embedding, which `input_layernorm` norms."""

    def __init__(self, config: EagleConfig, first: bool) -> None:
        size, eps = config.sizes.hidden_size, config.sizes.rms_norm_eps
        reads_embedding = (first or config.all_read_embeddings) and not config.fuses_embedding
        attention: Any = LatentAttention if isinstance(config.sizes, LatentSizes) else Attention
        super().__init__(config.sizes, 2 * size if reads_embedding else size, attention)
        self.norm_before_residual = config.norm_before_residual
        self.norms_state_twice = first and config.norms_state_twice
        self.hidden_norm = RMSNorm(size, eps) if reads_embedding else None
        if first and config.fuses_embedding:  # reads what fc gives, not normed
            self.input_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None, embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `DecoderLayer`, with embeddings `[..., n, D]` of the tokens."""
        if self.hidden_norm is None:
            return super().forward(x, rope, attend, rows)
        normed = self.hidden_norm(self.input_layernorm(x) if self.norms_state_twice else x)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.joined(normed if self.norm_before_residual else x, inputs, rope, attend, rows)
