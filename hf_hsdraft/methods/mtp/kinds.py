"""Types of models with layers for multi-token prediction: how their files name them, and what differs in them.

transformers' `MtpModel` reads the names of DeepSeek's and Qwen's files. A row of `KINDS` says how others are renamed,
and what differs from a layer with full attention between `eh_proj([enorm(embedding), hnorm(state)])` and a norm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_layers import MtpModel

from .blocks import DecoderOf, around_streams, parts_in_turn, place_of_part, several_streams, single_attention

ATTENTION, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
CACHED = ("hybrid", "hybrid_sliding", "minimax_m3_sparse")  # types whose states are kept by text, not by node
WINDOWED = (SLIDING, "hybrid_sliding")
EMBEDDING = "mtp.embed_tokens.weight"


@dataclass(frozen=True)
class Kind:
    """The layers of a model type."""

    source: str  # file of vLLM 0.32, in `vllm/model_executor/models/`, that reads them likewise
    names: tuple[tuple[str, str], ...] = ()  # beginnings of tensors' names within a layer, and what is read instead
    beside: tuple[tuple[str, str], ...] = ()  # the same for tensors beside the layers, which become the first one's
    counted_by: str = "num_nextn_predict_layers"  # field of the configuration that counts them
    uncounted: int = 0  # their number where it has no such field
    attention: str | None = ATTENTION  # None for the types of the model's first layers
    mlp: str = "sparse"  # where some layers of the model are mixtures of experts
    states_first: bool = False  # whether `eh_proj` reads the state before the embedding
    normed: bool = True  # whether a norm follows the layer
    reads_normed: bool = True  # whether the first layer reads the state after the target's final norm or mixer
    hands_on_normed: bool = True  # whether the next layer reads the normed output
    own_heads: bool = False  # whether each layer has its own output head
    own_embedding: bool = False  # whether they read their own embeddings
    untold: tuple[str, ...] = ()  # questions of `published/readings.py`, which its references answer differently
    by_node: bool = True  # whether the states of drafts can be told apart by node
    turns_keys: bool = False  # whether attention takes the rotary embedding of all keys
    masks_padding: bool = False  # whether attention is causal by itself, and takes a mask of padding
    block: Callable[[Any], type[nn.Module]] | None = None  # makes the class of its decoder layer; None for the target's
    around: Callable[[Any, Any], None] | None = None  # replaces the parts around it, given a layer and a decoder
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the layers' configuration


_FINAL = (("final_layernorm.", "shared_head.norm."),)
_HANDED_ON = ("hands_on_normed",)
_QWEN = Kind("qwen3_5_mtp.py", counted_by="mtp_num_hidden_layers", uncounted=1)
KINDS = {
    "qwen3_next": _QWEN, "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN,
    "glm4_moe": Kind("glm4_moe_mtp.py", untold=_HANDED_ON),
    "exaone_moe": Kind("exaone_moe_mtp.py", mlp="dense"),
    "exaone4_5": Kind("exaone4_5_mtp.py", uncounted=1, attention=None),
    "glm4_moe_lite": Kind("glm4_moe_lite_mtp.py", untold=_HANDED_ON),
    "glm_ocr_text": Kind("glm_ocr_mtp.py", untold=_HANDED_ON),
    "deepseek_v32": Kind("deepseek_mtp.py", attention=INDEXED),
    "glm_moe_dsa": Kind("deepseek_mtp.py", attention=INDEXED),
    "hy_v3": Kind("hy_v3_mtp.py", _FINAL),
    "bailing_hybrid": Kind("bailing_moe_mtp.py", _FINAL, counted_by="num_mtp_layers"),
    "mimo": Kind("mimo_mtp.py", (
        ("token_layernorm.", "enorm."), ("hidden_layernorm.", "hnorm."), ("input_proj.", "eh_proj."), *_FINAL,
    ), states_first=True),
    "mimo_v2_flash": Kind("mimo_v2_mtp.py", (
        ("pre_mlp_layernorm.", "post_attention_layernorm."), *_FINAL,
    ), uncounted=3, attention=SLIDING, mlp="dense"),
    "ernie4_5_moe": Kind("ernie_mtp.py", (
        ("mtp_emb_norm.", "enorm."), ("mtp_hidden_norm.", "hnorm."), ("mtp_linear_proj.", "eh_proj."),
    ), normed=False, fields={"moe_layer_start_index": 2**30}),  # no experts
    "hy_v4": Kind("../../models/hy_v4/nvidia/mtp.py", _FINAL, attention=INDEXED, block=single_attention,
                  fields={"indexer_types": ["full"] * 8}),
    "dots3_note_text": Kind("../../models/dots3_note/nvidia/mtp.py", attention=SLIDING, own_embedding=True),
    "longcat_flash": Kind("longcat_flash_mtp.py", (
        ("enorm.m.", "enorm."), ("hnorm.m.", "hnorm."), ("transformer_layer.", ""),
    ), uncounted=1, block=single_attention),
    "nemotron_h": Kind("nemotron_h_mtp.py", _FINAL, block=parts_in_turn),
    "step3p5": Kind("step3p5_mtp.py", (
        ("transformer.", ""), ("shared_head.output.", "shared_head.head."),
    ), mlp="dense", hands_on_normed=False, own_heads=True),
    "inkling_text": Kind("../../models/inkling/nvidia/mtp.py", (
        ("embed_norm.", "enorm."), ("hidden_norm.", "hnorm."), ("input_proj.", "eh_proj."), ("transformer_block.", ""),
    ), counted_by="num_mtp_layers", states_first=True),
    "minimax_m3_vl_text": Kind("../../models/minimax_m3/nvidia/mtp.py", (
        ("transformer_layer.", ""), *_FINAL,
    ), counted_by="num_mtp_modules", attention="minimax_m3_sparse", hands_on_normed=False),
    "qwen4_exp_text": Kind("../../models/qwen4_exp/nvidia/mtp.py", beside=(
        ("fc_", "eh_proj.fc_"), ("hyper_connection_mixer.", "post_norm."),
    ), counted_by="mtp_num_hidden_layers", uncounted=1, attention=INDEXED, reads_normed=False, hands_on_normed=False,
       by_node=False, turns_keys=True, block=several_streams, around=around_streams, fields={"ple_layer_ids": []}),
    "glm5_next_text": Kind("../../models/glm5next/common/mtp.py", attention=INDEXED, by_node=False,
                           masks_padding=True, block=single_attention, fields={"indexer_types": ["full"] * 8}),
}  # fmt: skip

# The package speculators names the parts of all types alike.
OF_SPECULATORS = Kind("speculators", (
    ("token_layernorm.", "enorm."), ("hidden_layernorm.", "hnorm."), ("input_proj.", "eh_proj."), *_FINAL,
), uncounted=1, untold=("last_tap_is_normed",))  # fmt: skip

# Types whose files may hold such layers that draft nothing here.
UNABLE = {
    "deepseek_v4": "this type's cache cannot be put back to the last accepted token, so nothing is drafted for it",
}

OTHERS = Kind("transformers", counted_by="num_mtp_layers")
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
# Not weights, copies of the target's embedding and head, and what a last mixer does not use.
_LEFT_OUT = ("rotary_emb.inv_freq", ".embed_tokens.weight", ".shared_head.weight", ".shared_head.head.weight",
             ".hyper_connection_mixer.block_inject_weight.weight")  # fmt: skip
_OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")  # of a layer's parts
_IN_LAYER = re.compile(r"((?:\w+\.)*?)(layers|mtp_\w+)\.(\d+)\.(.+)")
_BESIDE = re.compile(r"(?:\w+\.)*?mtp\.(.+)")


def kind_of(config: Any) -> Kind:
    """Returns the row of a target's configuration."""
    return KINDS.get(config.model_type) or KINDS.get(config.get_text_config().model_type, OTHERS)


def described(config: Any, count: int | None = None, kind: Kind | None = None) -> Any:
    """Returns a copy of a target's configuration that describes its, or `count`, layers as transformers expects."""
    kind, config = kind or kind_of(config), copy.deepcopy(config)
    text = config.get_text_config()
    if count is None:
        names = ("num_mtp_layers", kind.counted_by)
        told = (getattr(each, name, None) for each in (text, config) for name in names)
        count = int(next((each for each in told if each is not None), kind.uncounted))
    text.num_mtp_layers = count
    if kind is OTHERS:
        return config
    for name, value in (("layer_types", kind.attention), ("mlp_layer_types", kind.mlp)):
        types = getattr(text, name, None)
        if types is not None and len(getattr(text, f"mtp_{name}", None) or ()) != count:
            setattr(text, f"mtp_{name}", list(types[:count]) if value is None else [value] * count)
    sizes, types = text.to_dict().get("per_layer_config"), getattr(text, "layer_types", None) or ()
    if sizes and kind.attention in types:  # of other widths
        at = types.index(kind.attention)
        text.mtp_per_layer_config = dict.fromkeys(range(count), sizes.get(at) or sizes.get(str(at)))
    text.mtp_hidden_states_first = kind.states_first
    if not hasattr(text, "rms_norm_eps"):
        text.rms_norm_eps = text.layer_norm_epsilon
    if not kind.normed:
        text.chain_hidden_post_norm = False
    for name, value in kind.fields.items():
        setattr(text, name, value)
    return config


def layers_in(config: Any) -> int:
    """Returns the number of layers for multi-token prediction that a target's configuration tells of."""
    return int(described(config).get_text_config().num_mtp_layers)


def described_target(target: Any, count: int, kind: Kind | None = None) -> Any:
    """Returns a target as transformers' `MtpModel` takes it, with so many layers."""
    return _Described(target, described(target.config, count, kind), kind or kind_of(target.config))


class _Described:
    """A target with a configuration that describes its layers for multi-token prediction as transformers expects."""

    def __init__(self, target: Any, config: Any, kind: Kind) -> None:
        self._target, self.config, self._kind = target, config, kind
        # Where the decoder is a part of a model with others, the model's conversions name it with a prefix.
        self._weight_conversions = get_model_conversion_mapping(target.get_decoder(), add_legacy=False) or None

    def get_decoder(self) -> Any:
        decoder = self._target.get_decoder()
        block = self._kind.block
        return decoder if block is None else DecoderOf(decoder, self.config.get_mtp_config(), block)

    def model(self) -> MtpModel:
        """Returns its layers, whose weights are still to be loaded."""
        made = MtpModel(self, self.config.get_text_config().num_mtp_layers)
        if self._kind.around is not None:
            for layer in made.layers:
                self._kind.around(layer, self._target.get_decoder())
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def renamed(names: Collection[str], config: Any, apart: bool = False, kind: Kind | None = None) -> dict[str, str]:
    """Returns the tensors of the layers among `names` of a target's checkpoint, and how `MtpModel` knows them.

    Tensors of a layer become `model.layers.N.`, as in DeepSeek's files: N counts on from the target's layers. Those of
    Qwen's files that are beside the layers become `mtp.`. Files that hold these layers `apart` count from 0.
    """
    first, kind, found = config.get_text_config().num_hidden_layers, kind or kind_of(config), {}
    for name in names:
        own = (kind.own_heads and name.endswith(".head.weight")) or (kind.own_embedding and name.endswith(EMBEDDING))
        if name.endswith(_LEFT_OUT) and not own:
            continue
        if (layer := _IN_LAYER.fullmatch(name)) is None:
            if (beside := _BESIDE.fullmatch(name)) is not None:
                rest = _rewritten(beside[1], kind.beside)
                found[name] = f"mtp.{rest}" if rest == beside[1] else f"model.layers.{first}.{rest}"
            continue
        prefix, root, number, rest = layer[1], layer[2], int(layer[3]), layer[4]
        numbered_apart = apart or root != "layers" or "mtp." in prefix
        if not numbered_apart and (number < first or prefix not in _PREFIXES):
            continue
        if root not in ("layers", "mtp_layers", "mtp_block"):
            rest = f"{root}.{rest}"
        if kind.block is parts_in_turn:
            number, rest = place_of_part(config.get_text_config(), number, rest, _OUTSIDE)
        rest = _rewritten(rest, kind.names)
        found[name] = f"model.layers.{number + first if numbered_apart else number}.{rest}"
    return found


def _rewritten(name: str, beginnings: tuple[tuple[str, str], ...]) -> str:
    for beginning, written in beginnings:
        name = written + name.removeprefix(beginning) if name.startswith(beginning) else name
    return name
