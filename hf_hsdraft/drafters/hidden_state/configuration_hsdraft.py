"""Configuration of a hidden-state drafter: what its target must be, and how large its own parts are."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from ...common.checks import LONGEST_NAME, is_code_file, is_integer, is_number, public_name, short
from ...repository.drafter_files import FORMAT_VERSION
from ...target.target_limits import decoder_layers
from ..draft_options import MOST_NODES
from ..special_tokens import AnySpecialTokens

logger = logging.get_logger(__name__)

INJECTORS = ("low_rank", "path", "selector")
HEADS = ("target", "trained")

# The greatest values that make sense; beyond them lie typing errors and files that want to exhaust a machine.
LIMITS = {
    "format_version": 10**6, "vocab_size": 2**22, "target_hidden_size": 2**17, "target_num_hidden_layers": 4096,
    "hidden_size": 2**17, "num_hidden_layers": 64, "num_roll_layers": 64, "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12, "head_dim": 2**13, "intermediate_size": 2**20, "num_draft_steps": 64,
    "num_step_modules": 64, "injector_rank": 2**16,
    "injector_hidden_size": 2**17, "injector_top_k": 2**16, "draft_vocab_size": 2**22, "tree_size": MOST_NODES,
    "beam_width": MOST_NODES,
}  # fmt: skip
_MOST_TAPS, _LONGEST_REFERENCE, _MOST_CODE_FILES = 64, 512, 1024

# What transformers may hand over; all else in a file is left out.
_OF_TRANSFORMERS = {
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "experts_implementation", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id",
    "return_dict", "torch_dtype", "transformers_version",
}  # fmt: skip
_MEANINGLESS = {"model_type", "use_cache", "is_encoder_decoder", "_commit_hash", "tie_word_embeddings"}
# By these a file would make transformers load, replace or run something else than the drafter beside it.
_FORBIDDEN = {"distributed_config", "fusion_config", "kernel_config", "quantization_config", "transformers_weights"}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class HSDraftConfig(PreTrainedConfig):
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
            _check_integer(name, getattr(self, name))  # others are derived from these
        taps = default_tap_layers(target_num_hidden_layers) if target_tap_layers is None else target_tap_layers
        self.target_tap_layers, self.target_name, self.target_revision = _as_list(taps), target_name, target_revision
        self.target_tokenizer_hash, self.target_reference = target_tokenizer_hash, _as_dict(target_reference)
        self.weights_digest, self.code_files = _as_dict(weights_digest), _as_list(code_files)
        self.num_hidden_layers, self.tree_size, self.beam_width = num_hidden_layers, tree_size, beam_width
        self.num_roll_layers = num_hidden_layers if num_roll_layers is None else num_roll_layers
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = self.hidden_size // num_attention_heads if head_dim is None else head_dim
        self.intermediate_size = 4 * self.hidden_size if intermediate_size is None else intermediate_size
        self.num_draft_steps, self.num_step_modules, self.head = num_draft_steps, num_step_modules, head
        self.rms_norm_eps, self.rope_theta, self.initializer_range = rms_norm_eps, rope_theta, initializer_range
        self.injector, self.injector_rank, self.injector_top_k = injector, injector_rank, injector_top_k
        self.injector_hidden_size, self.draft_vocab_ids = injector_hidden_size, _as_list(draft_vocab_ids)
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.check()
        super().__init__(**_with_auto_model(_allowed(kwargs)))

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> HSDraftConfig:
        """Derives the configuration of a drafter from a loaded target.

        Args:
            target: A model of transformers that generates text; of an encoder-decoder, the decoder is meant.
            overrides: Fields to set otherwise, by the names of the constructor.

        Raises:
            ValueError: An override is invalid.
        """
        name = public_name(getattr(target, "name_or_path", ""))
        return cls.for_target_config(target.config, **{"target_name": name, **overrides})

    @classmethod
    def for_target_config(cls, target_config: Any, **overrides: Any) -> HSDraftConfig:
        """As [`for_target`], from the target's configuration alone."""
        config = target_config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        heads = _integer(config, "num_attention_heads") or 1
        key_value_heads = _integer(config, "num_key_value_heads") or heads
        fields: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "target_num_hidden_layers": decoder_layers(config),
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads if heads % key_value_heads == 0 else heads,
            "head_dim": max(config.hidden_size // heads // 2 * 2, 2),  # rotary embeddings need an even number
            "intermediate_size": _integer(config, "intermediate_size"),
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "rope_theta": rope.get("rope_theta") or 10000.0,
            "draft_vocab_size": max(1, config.vocab_size // 4),
            # A pipeline takes an assistant without tokenizers of its own only if these are the target's.
            **{f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")},
        }
        unknown = sorted(overrides.keys() - set(inspect.signature(cls.__init__).parameters) - _OF_TRANSFORMERS)
        if unknown:
            raise ValueError(f"a drafter's configuration has no {', '.join(unknown)}")
        if overrides.get("draft_vocab_ids") is not None and "draft_vocab_size" not in overrides:
            fields["draft_vocab_size"] = len(overrides["draft_vocab_ids"])
        return cls(**{**fields, **overrides})

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Registers nothing: the code of a configuration always travels with a drafter that is saved."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """This configuration; asked for neither part, as by a pipeline that compares, one with any special tokens."""
        return self if decoder or encoder else AnySpecialTokens(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As every configuration; a file that does not name its format is of the first one."""
        return super().from_dict({"format_version": 1, **config_dict}, **kwargs)

    def check(self) -> None:
        """Raises a ValueError that names the first field that is wrong, its value, and what would be right."""
        self._check_format()
        for name in LIMITS:
            _check_integer(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            _demand(is_number(value) and 0.0 < value < 1e12, name, value, "expected a positive number")
        for name, allowed in (("injector", INJECTORS), ("head", HEADS)):
            value = getattr(self, name)
            _demand(isinstance(value, str) and value in allowed, name, value, f"expected one of {', '.join(allowed)}")
        window, steps = self.sliding_window, self.num_draft_steps
        wanted = f"expected None, or an integer above num_draft_steps={steps}"
        _demand(window is None or (is_integer(window) and steps < window < 2**31), "sliding_window", window, wanted)
        self._check_steps()
        self._check_taps()
        self._check_vocabulary()
        self._check_target()
        self._check_files()
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        _demand(heads % groups == 0, "num_key_value_heads", groups, f"it must divide num_attention_heads={heads}")
        _demand(self.head_dim % 2 == 0, "head_dim", self.head_dim, "rotary embeddings need an even number")
        if self.head == "target" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is invalid with head='target': the target's output rows need "
                f"target_hidden_size={self.target_hidden_size}; set them equal or choose head='trained'"
            )
        wanted = f"a tree of depth num_draft_steps={steps} needs at least as many nodes"
        _demand(self.tree_size >= steps, "tree_size", self.tree_size, wanted)

    def _check_steps(self) -> None:
        layers, rolled = self.num_hidden_layers, self.num_roll_layers
        wanted = f"the trunk has only num_hidden_layers={layers}"
        _demand(rolled <= layers, "num_roll_layers", rolled, wanted)
        steps, modules = self.num_draft_steps, self.num_step_modules
        wanted = f"there are only num_draft_steps={steps}, and each set of parameters needs a step"
        _demand(modules <= steps, "num_step_modules", modules, wanted)

    def _check_taps(self) -> None:
        taps, layers = self.target_tap_layers, self.target_num_hidden_layers
        in_range = len(taps) <= _MOST_TAPS and all(is_integer(tap) and 0 <= tap <= layers for tap in taps)
        wanted = f"ascending indices between 0 (embeddings) and target_num_hidden_layers={layers}, each once"
        valid = bool(taps) and in_range and sorted(set(taps)) == taps
        _demand(valid, "target_tap_layers", taps, f"expected {wanted}")

    def _check_vocabulary(self) -> None:
        size = self.draft_vocab_size
        wanted = f"the target has only vocab_size={self.vocab_size} tokens"
        _demand(size <= self.vocab_size, "draft_vocab_size", size, wanted)
        ids = self.draft_vocab_ids
        if ids is None:
            return
        if len(ids) != size:
            raise ValueError(f"draft_vocab_ids holds {len(ids)} ids but draft_vocab_size={size}: they must agree")
        ascending = all(map(is_integer, ids)) and all(low < high for low, high in itertools.pairwise(ids))
        if not ascending or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError(
                f"draft_vocab_ids is invalid: expected ascending, distinct token ids from 0 to {self.vocab_size - 1}"
            )

    def _check_format(self) -> None:
        _check_integer("format_version", self.format_version)
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"this drafter has format_version={self.format_version}, this version of hf_hsdraft reads up to "
                f"{FORMAT_VERSION}: upgrade hf_hsdraft, or load it with AutoModel and trust_remote_code=True, which "
                "brings the code it was saved with"
            )

    def _check_target(self) -> None:
        for name in ("target_name", "target_revision", "target_tokenizer_hash"):
            value = getattr(self, name)
            valid = isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()
            _demand(valid, name, value, f"expected one line of at most {LONGEST_NAME} characters")
        reference, fields = self.target_reference, {"input_ids", "start", "agreed", "drafted"}
        if reference is None:
            return
        valid = isinstance(reference, dict) and reference.keys() == fields
        if valid:
            ids, start, *counts = (reference[name] for name in ("input_ids", "start", "agreed", "drafted"))
            valid = isinstance(ids, list) and 3 <= len(ids) <= _LONGEST_REFERENCE
            valid = valid and all(is_integer(token) and 0 <= token < self.vocab_size for token in ids)
            valid = valid and is_integer(start) and 2 <= start < len(ids)
            valid = valid and all(is_integer(count) and 0 <= count <= len(ids) - start for count in counts)
        wanted = "expected input_ids, start, agreed and drafted as `hsdraft train` writes them"
        _demand(valid, "target_reference", reference, wanted)

    def _check_files(self) -> None:
        digests, names = self.weights_digest, self.code_files
        valid = digests is None or (
            isinstance(digests, dict)
            and all(isinstance(name, str) and re.fullmatch(r"model[\w.-]*\.safetensors", name) for name in digests)
            and all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in digests.values())
        )
        _demand(valid, "weights_digest", digests, "expected SHA-256 digests by names of files of weights")
        valid = names is None or (len(names) <= _MOST_CODE_FILES and all(map(is_code_file, names)))
        wanted = f"expected at most {_MOST_CODE_FILES} names such as modeling_hsdraft.py, without folders"
        _demand(valid, "code_files", names, wanted)


def _demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    if not valid:
        raise ValueError(f"{name}={short(value)} is invalid: {wanted}")


def _with_auto_model(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same fields, with the class of transformers that a pipeline loads a drafter by among the architectures."""
    names = kwargs.get("architectures")
    if isinstance(names, list) and names and "AutoModel" not in names:
        return {**kwargs, "architectures": [*names, "AutoModel"]}
    return kwargs


def _allowed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of fields that are not the drafter's own, those that may be given to transformers."""
    if forbidden := sorted(name for name in _FORBIDDEN if kwargs.get(name) is not None):
        raise ValueError(
            f"a drafter's configuration must not hold {', '.join(forbidden)}: remove it, it has no use here"
        )
    for name in ("dtype", "torch_dtype"):
        value = kwargs.get(name)
        valid = value is None or str(value).removeprefix("torch.") in _DTYPES
        _demand(valid, name, value, f"expected one of {', '.join(_DTYPES)}")
    for name in ("attn_implementation", "experts_implementation"):
        value = kwargs.get(name)  # not the name of a repository
        valid = value is None or (isinstance(value, str) and value.replace("_", "").isalnum())
        _demand(valid, name, value, "a drafter brings no kernels")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = kwargs.get(name)
        tokens = value if isinstance(value, list) else [0 if value is None else value]
        valid = len(tokens) <= LONGEST_NAME and all(is_integer(token) and 0 <= token < 2**31 for token in tokens)
        _demand(valid, name, value, "expected a token id or a few")
    unknown = sorted(kwargs.keys() - _OF_TRANSFORMERS - _MEANINGLESS - _FORBIDDEN)
    if unknown:
        logger.warning(f"fields of a drafter's configuration that mean nothing to it are left out: {short(unknown)}")
    allowed = {name: value for name, value in kwargs.items() if name in _OF_TRANSFORMERS}
    if not isinstance(allowed.get("auto_map", {}), dict):
        del allowed["auto_map"]
    return allowed


def _check_integer(name: str, value: Any) -> None:
    wanted = "1 or more" if not is_integer(value) or value < 1 else f"at most {LIMITS[name]:,}"
    _demand(is_integer(value) and 1 <= value <= LIMITS[name], name, value, f"expected an integer of {wanted}")


def _as_list(value: Any) -> Any:
    """A list that checks can look into, whatever a file holds instead of one; `None` stays."""
    if value is None:
        return None
    return list(value) if isinstance(value, list | tuple | range) else [value]


def _as_dict(value: Any) -> Any:
    """A copy of a mapping as a dict; anything else as it is, for checks to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def _integer(config: Any, name: str) -> int | None:
    """A field where it is one number for all layers."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def default_tap_layers(num_hidden_layers: int) -> list[int]:
    """One low, one middle and one high layer, as indices into `hidden_states` (EAGLE-3, section 3.1)."""
    wanted = (3, num_hidden_layers // 2 + 1, num_hidden_layers - 2)
    return sorted({min(max(layer, 1), num_hidden_layers) for layer in wanted})


__all__ = ["HSDraftConfig"]
