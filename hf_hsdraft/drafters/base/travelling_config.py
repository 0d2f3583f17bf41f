"""Configuration of a drafter that travels with its code."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from ...core.checks import (
    FORMAT_VERSION,
    LONGEST_NAME,
    MOST_NODES,
    POSITIVE,
    Limit,
    are_ascending,
    check_field,
    check_fields,
    choice,
    demand,
    integer,
    is_code_file,
    is_integer,
    public_name,
    setting,
    settings,
    short,
)

logger = logging.get_logger(__name__)

_MOST_TAPS, _MOST_CODE_FILES = 64, 1024
# Fields that transformers may pass; others in a file are ignored.
_OF_TRANSFORMERS = {
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "experts_implementation", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id",
    "return_dict", "torch_dtype", "transformers_version",
}  # fmt: skip
_MEANINGLESS = {"model_type", "use_cache", "is_encoder_decoder", "_commit_hash", "tie_word_embeddings"}
# With these a file could make transformers load or run something other than the drafter beside it.
_FORBIDDEN = {"distributed_config", "fusion_config", "kernel_config", "quantization_config", "transformers_weights"}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def as_list(value: Any) -> Any:
    """A list for checks to inspect, whatever the file holds; None stays."""
    if value is None:
        return None
    return list(value) if isinstance(value, list | tuple | range) else [value]


def as_dict(value: Any) -> Any:
    """Copies a mapping to a dict; other values pass unchanged, for checks to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def default_tap_layers(num_hidden_layers: int) -> list[int]:
    """A low, a middle and a high layer, as indices into `hidden_states` (EAGLE-3, section 3.1)."""
    wanted = (3, num_hidden_layers // 2 + 1, num_hidden_layers - 2)
    return sorted({min(max(layer, 1), num_hidden_layers) for layer in wanted})


def _are_digests(value: Any) -> bool:
    digest = r"model[\w.-]*\.safetensors=[0-9a-f]{64}"
    return isinstance(value, dict) and all(re.fullmatch(digest, f"{name}={each}") for name, each in value.items())


_LINE = Limit(
    lambda value: isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable(),
    f"one line of at most {LONGEST_NAME} characters",
)
_DIGESTS = Limit(_are_digests, "SHA-256 digests by names of files of weights")
_CODE = Limit(
    lambda value: len(value) <= _MOST_CODE_FILES and all(map(is_code_file, value)),
    f"at most {_MOST_CODE_FILES} names such as modeling_hsdraft.py, without folders",
)


class TravellingConfig(PreTrainedConfig):
    """Base of drafter configurations. Each field is declared once, by `setting`.

    Fields are checked on construction; a ValueError names field, value and remedy.
    """

    vocab_size: int = setting("Size of the target's vocabulary, which `generate()` compares", 32000, integer(2**22))
    target_hidden_size: int = setting("Width of the target's hidden states", 2048, integer(2**17))
    target_num_hidden_layers: int = setting("Number of decoder layers of the target", 24, integer(4096))
    target_name: str = setting("Name of the target, for messages and cards", "", _LINE)
    target_revision: str = setting("Commit of the target on the Hub, if it is known", "", _LINE)
    target_tokenizer_hash: str = setting("Digest of the target's tokenizer, if it is known", "", _LINE)
    weights_digest: Mapping[str, str] | None = setting(
        "SHA-256 of each file of weights, by name. `save_pretrained` writes it",
        None, _DIGESTS, optional=True, convert=as_dict
    )  # fmt: skip
    code_files: Sequence[str] | None = setting(
        "Names of the `*.py` files that were saved too, for a later version to replace. `save_pretrained` writes them",
        None, _CODE, optional=True, convert=as_list
    )  # fmt: skip
    format_version: int = setting("Version of the files: older ones load, newer do not", FORMAT_VERSION, integer(10**6))
    rms_norm_eps: float = setting("Epsilon of all RMS norms", 1e-5, POSITIVE)
    head: str = setting(
        '`"target"` uses the target\'s own output rows and stores none, `"trained"` has its own',
        "target", choice("target", "trained")
    )  # fmt: skip
    draft_vocab_size: int = setting(
        "V', the number of tokens the drafter can propose. `None` means all of them",
        None, integer(2**22), derived=lambda config: config.vocab_size
    )  # fmt: skip
    draft_vocab_ids: Sequence[int] | None = setting(
        "Token ids behind the V' rows, ascending. `None` means the first V'", None, convert=as_list
    )
    tree_size: int = setting("Number of nodes of the draft tree, the root not counted", 24, integer(MOST_NODES))
    beam_width: int = setting("Nodes of a depth that are expanded to the next; 1 is a chain", 8, integer(MOST_NODES))
    initializer_range: float = setting("Standard deviation of the weight initialisation", 0.02, POSITIVE)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = vars(cls).get("__init__")
        super().__init_subclass__(**kwargs)  # makes it a dataclass
        if own is None:
            cls.__init__ = lambda self, **kwargs: self._set(**kwargs)  # type: ignore[method-assign]

    def _set(self, **kwargs: Any) -> None:
        self.format_version = kwargs.get("format_version", FORMAT_VERSION)
        self._check_format()  # first, since a newer format may change anything
        for each in settings(self):
            value, derived = kwargs.pop(each.name, each.default), each.metadata["derived"]
            value = derived(self) if value is None and derived is not None else value
            value = value if each.metadata["convert"] is None else each.metadata["convert"](value)
            check_field(each, value)  # later fields derive from it
            setattr(self, each.name, value)
        self.check()
        PreTrainedConfig.__init__(self, **_with_auto_model(_allowed(kwargs)))

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> Any:
        """Derives the configuration from a loaded target, or its decoder; a wrong override raises a ValueError."""
        name = public_name(getattr(target, "name_or_path", ""))
        return cls.for_target_config(target.config, **{"target_name": name, **overrides})

    @classmethod
    def for_target_config(cls, target_config: Any, **overrides: Any) -> Any:
        """As [`for_target`], from the target's configuration."""
        config = target_config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        fields: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "target_num_hidden_layers": own_integer(config, "num_decoder_layers") or config.num_hidden_layers,
            **heads_of(config),
            "intermediate_size": own_integer(config, "intermediate_size"),
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "rope_theta": rope.get("rope_theta") or 10000.0,
            "draft_vocab_size": max(1, config.vocab_size // 4),
            # Pipelines accept an assistant without a tokenizer only if these equal the target's.
            **{f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")},
        }
        own = {each.name for each in settings(cls)} | set(inspect.signature(cls.__init__).parameters) | _OF_TRANSFORMERS
        unknown = sorted(overrides.keys() - own)
        if unknown:
            raise ValueError(f"a drafter's configuration has no {', '.join(unknown)}")
        if overrides.get("draft_vocab_ids") is not None and "draft_vocab_size" not in overrides:
            fields["draft_vocab_size"] = len(overrides["draft_vocab_ids"])
        return cls(**{name: value for name, value in fields.items() if name in own} | overrides)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Does nothing: a saved drafter always includes the configuration's code."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """This configuration; without arguments, as pipelines compare it, one that equals any special tokens."""
        return self if decoder or encoder else any_special_tokens(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Files that do not name their format have the first one."""
        return super().from_dict({"format_version": 1, **config_dict}, **kwargs)

    def check(self) -> None:
        """Raises a ValueError for the first invalid field, with its value and the allowed ones."""
        self._check_format()
        check_fields(self)
        self._check_taps()
        self._check_vocabulary()
        if self.head == "target" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is invalid with head='target': the target's output rows need "
                f"target_hidden_size={self.target_hidden_size}; set them equal or choose head='trained'"
            )
        wanted = f"a tree of depth num_draft_steps={self.num_draft_steps} needs at least as many nodes"
        demand(self.tree_size >= self.num_draft_steps, "tree_size", self.tree_size, wanted)

    def _check_taps(self) -> None:
        taps, layers = self.target_tap_layers, self.target_num_hidden_layers
        wanted = f"ascending indices between 0 (embeddings) and target_num_hidden_layers={layers}, each once"
        valid = 0 < len(taps) <= _MOST_TAPS and are_ascending(taps, 0, layers)
        demand(valid, "target_tap_layers", taps, f"expected {wanted}")

    def _check_vocabulary(self) -> None:
        size = self.draft_vocab_size
        wanted = f"the target has only vocab_size={self.vocab_size} tokens"
        demand(size <= self.vocab_size, "draft_vocab_size", size, wanted)
        ids = self.draft_vocab_ids
        if ids is None:
            return
        if len(ids) != size:
            raise ValueError(f"draft_vocab_ids holds {len(ids)} ids but draft_vocab_size={size}: they must agree")
        if not are_ascending(ids, 0, self.vocab_size - 1):
            raise ValueError(
                f"draft_vocab_ids is invalid: expected ascending, distinct token ids from 0 to {self.vocab_size - 1}"
            )

    def _check_format(self) -> None:
        if is_integer(self.format_version) and self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"this drafter has format_version={self.format_version}, this version of hf_hsdraft reads up to "
                f"{FORMAT_VERSION}: upgrade hf_hsdraft, or load it with AutoModel and trust_remote_code=True, which "
                "brings the code it was saved with"
            )


class AttendingConfig(TravellingConfig):
    """Base of configurations of drafters with attention layers."""

    target_tap_layers: Sequence[int] = setting(
        "Hidden states of the target that the drafter reads, ascending (0 = embeddings, i = output of layer i). `None` "
        "picks one low, one middle and one high layer (EAGLE-3, section 3.1)",
        None, convert=as_list, derived=lambda config: default_tap_layers(config.target_num_hidden_layers)
    )  # fmt: skip
    hidden_size: int = setting(
        'Width of the drafted states; `target_hidden_size` unless `head="trained"`',
        None, integer(2**17), derived=lambda config: config.target_hidden_size
    )  # fmt: skip
    num_attention_heads: int = setting("Number of attention heads of a layer", 16, integer(2**12))
    num_key_value_heads: int = setting(
        "Number of key/value heads of a layer (grouped-query attention)",
        None, integer(2**12), derived=lambda config: config.num_attention_heads
    )  # fmt: skip
    head_dim: int = setting(
        "Width of one head. `None` means `hidden_size // num_attention_heads`",
        None, integer(2**13), derived=lambda config: config.hidden_size // config.num_attention_heads
    )  # fmt: skip
    intermediate_size: int = setting(
        "Inner width of the feed-forward blocks. `None` means four times that of the states",
        None, integer(2**20), derived=lambda config: 4 * config.hidden_size
    )  # fmt: skip
    sliding_window: int | None = setting(
        "Number of positions that the drafter attends to, the own one included; `None` for all. One that sees all "
        "drafts worse beyond the lengths it was trained on",
        None,
    )
    rope_theta: float = setting("Base of the rotary position embedding", 10000.0, POSITIVE)

    def check(self) -> None:
        super().check()
        window, steps = self.sliding_window, self.num_draft_steps
        wanted = f"expected None, or an integer above num_draft_steps={steps}"
        demand(window is None or (is_integer(window) and steps < window < 2**31), "sliding_window", window, wanted)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        demand(heads % groups == 0, "num_key_value_heads", groups, f"it must divide num_attention_heads={heads}")
        demand(self.head_dim % 2 == 0, "head_dim", self.head_dim, "rotary embeddings need an even number")


def _with_auto_model(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Adds to the architectures the class by which a pipeline loads a drafter."""
    names = kwargs.get("architectures")
    if isinstance(names, list) and names and "AutoModel" not in names:
        return {**kwargs, "architectures": [*names, "AutoModel"]}
    return kwargs


def _allowed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Selects the fields that transformers may get; raises a ValueError for forbidden or invalid ones."""
    if forbidden := sorted(name for name in _FORBIDDEN if kwargs.get(name) is not None):
        raise ValueError(
            f"a drafter's configuration must not hold {', '.join(forbidden)}: remove it, it has no use here"
        )
    for name in ("dtype", "torch_dtype"):
        value = kwargs.get(name)
        valid = value is None or str(value).removeprefix("torch.") in _DTYPES
        demand(valid, name, value, f"expected one of {', '.join(_DTYPES)}")
    for name in ("attn_implementation", "experts_implementation"):
        value = kwargs.get(name)
        valid = value is None or (isinstance(value, str) and value.replace("_", "").isalnum())
        demand(valid, name, value, "a drafter brings no kernels")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = kwargs.get(name)
        tokens = value if isinstance(value, list) else [0 if value is None else value]
        valid = len(tokens) <= LONGEST_NAME and all(is_integer(token) and 0 <= token < 2**31 for token in tokens)
        demand(valid, name, value, "expected a token id or a few")
    unknown = sorted(kwargs.keys() - _OF_TRANSFORMERS - _MEANINGLESS - _FORBIDDEN)
    if unknown:
        logger.warning(f"fields of a drafter's configuration that mean nothing to it are left out: {short(unknown)}")
    allowed = {name: value for name, value in kwargs.items() if name in _OF_TRANSFORMERS}
    if not isinstance(allowed.get("auto_map", {}), dict):
        del allowed["auto_map"]
    return allowed


def own_integer(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def heads_of(config: Any) -> dict[str, int]:
    """Returns numbers and width of attention heads like a target's, as drafters can have them."""
    heads = own_integer(config, "num_attention_heads") or 1
    groups = own_integer(config, "num_key_value_heads") or heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else heads,
        "head_dim": max(config.hidden_size // heads // 2 * 2, 2),  # rotary embeddings need an even number
    }


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "any"


ANY = _Any()


def any_special_tokens(config: Any, *further: str) -> Any:
    """A copy of a configuration that equals any target's in special tokens and in `further` fields.

    Pipelines accept an assistant without a tokenizer only if both configurations have the same special tokens. A
    drafter generates none, and the target alone decides what ends a sequence.
    """
    twin = copy.copy(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", *further):
        object.__setattr__(twin, name, ANY)  # may be frozen
    return twin
