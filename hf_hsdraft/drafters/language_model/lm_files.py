"""Checks and loads the folder of a language model that is to draft."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...core.checks import few, printable
from ...hub.checkpoint import Checkpoint
from ...hub.pretrained_drafter import stored_options
from ...runtime.target_loading import marks_of_drafter
from ..base.target_info import Evidence, Fit, TargetInfo
from .lm_ability import what_differs
from .lm_bounds import build, few_modules, read_config

# Separate from the language model's generation_config.json.
DRAFTING_OPTIONS = "drafting_config.json"

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # any of these
_OF_TOKENIZERS = (*_TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")

# Share of the target's parameters up to which a language model is proposed as its drafter: each drafted token runs it.
_MOST_SHARE = 0.5
_MOST_PACKED = 32  # numbers in one of a quantised file
_MOST_PADDING = (
    1024  # rows by which vocabularies of one tokenizer may differ; models of a series are padded differently
)

# Names of tensors that only drafters for a specific target have, whatever architecture they name.
_TENSORS_OF_DRAFTERS = (
    "fc.", "d2t", "t2d", "midlayer.", "mask_hidden", "hidden_norm.", "candidate_selector.", "markov_head.",
)  # fmt: skip


def why_no_causal_lm(checkpoint: Checkpoint) -> str:
    """Returns why a checkpoint is not a causal language model; "" if it is."""
    reason = why_not_by_config(checkpoint.config)
    if reason:
        return reason
    return _told_marks([name for name in sorted(checkpoint.shapes) if name.startswith(_TENSORS_OF_DRAFTERS)])


def why_not_by_config(config: Mapping[str, Any]) -> str:
    """As `why_no_causal_lm`, from config.json only."""
    model_type, named = config.get("model_type"), config.get("architectures")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    architectures = [known] if isinstance(known, str) else list(known or ())
    if not isinstance(named, list) or not any(name in architectures for name in named):
        return f"architectures={printable(named)} with model_type={printable(model_type)} names none of transformers"
    return _told_marks(marks_of_drafter(config))


def _told_marks(marks: Sequence[str]) -> str:
    return f"it has {few(marks)}, as drafters have that read a target's hidden states" if marks else ""


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns what is known of a language model as a drafter."""
    config = checkpoint.config
    options = stored_options(checkpoint.also(DRAFTING_OPTIONS) / DRAFTING_OPTIONS)
    told = {"architecture": printable(config["architectures"]), "reads": "the text alone, no hidden states"}
    sizes = ("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "vocab_size", "dtype", "torch_dtype")
    told |= {name: printable(config[name]) for name in sizes if config.get(name) is not None}
    return told | {printable(name): printable(value) for name, value in options.items() if value is not None}


def empty_model(checkpoint: Checkpoint, **kwargs: Any) -> Any:
    """Builds a checkpoint's model on the meta device, and compares the files' tensors with it.

    `kwargs` are those of `AutoModelForCausalLM.from_pretrained`. Raises a ValueError if they ask for code of the
    repository or for weights that differ from the files, or if shapes of tensors contradict config.json.
    """
    for name in ("trust_remote_code", "ignore_mismatched_sizes"):
        if kwargs.get(name):
            raise ValueError(f"{name}=True is invalid for a drafter: expected a model of transformers as it was saved")
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = read_config(checkpoint.folder)
    model = build(config, checkpoint.folder)
    # With converted or packed weights, files and model hold different tensors.
    packed = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    stored = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    described = sum(weight.numel() for weight in model.parameters())
    if described > stored * (_MOST_PACKED if packed else 1):  # before so much is allocated
        raise _mismatch(checkpoint, model, f"{stored:,} numbers instead of {described:,}")
    if not packed and not get_model_conversion_mapping(model, kwargs.get("key_mapping"), add_legacy=False):
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {name: shape for name, shape in checkpoint.shapes.items() if name in wanted}
        wrong = [
            f"{name} {list(shape)} instead of {list(wanted[name])}"
            for name, shape in sorted(found.items())
            if shape != wanted[name]
        ]
        if wrong:
            raise _mismatch(checkpoint, model, f"of other shapes: {few(wrong)}")
    return model


def load_model(checkpoint: Checkpoint, **kwargs: Any) -> Any:
    """Loads a model, without its code; as `empty_model`. Raises a ValueError for missing or unknown weights."""
    for name in ("trust_remote_code", "ignore_mismatched_sizes"):
        kwargs.pop(name, None)
    model, found = AutoModelForCausalLM.from_pretrained(
        checkpoint.with_weights(), trust_remote_code=False, output_loading_info=True, **kwargs
    )
    wrong = {"missing": found["missing_keys"], "unknown": found["unexpected_keys"]}
    if told := "; ".join(f"{kind}: {few(sorted(names))}" for kind, names in wrong.items() if names):
        raise _mismatch(checkpoint, model, told)
    return model.eval()


def _mismatch(checkpoint: Checkpoint, model: Any, told: str) -> ValueError:
    return ValueError(
        f"the weights of {printable(checkpoint.name)} do not match its config.json ({told}): expected all weights of a "
        f"{type(model).__name__} and no others"
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Loads a checkpoint's tokenizer; None if it has none."""
    folder = checkpoint.also(*_OF_TOKENIZERS)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def fit(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """Returns how well a language model fits as a drafter: it is smaller than the target and has its tokenizer."""
    own = read_config(checkpoint.folder)
    sizes = [config.get_text_config(decoder=True).vocab_size for config in (own, target.config)]
    if abs(sizes[0] - sizes[1]) > _MOST_PADDING or target.tokenizer is None or target.parameters is None:
        return None
    with few_modules():
        small = TargetInfo(own).parameters
    if small is None or small > _MOST_SHARE * target.parameters:
        return None
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None or what_differs(tokenizer, target.tokenizer):
        return None
    told = f"a language model of the same tokenizer with {small / target.parameters:.0%} of the target's parameters"
    if (checkpoint.also(DRAFTING_OPTIONS) / DRAFTING_OPTIONS).is_file() and target.is_named(named):
        return Fit(Evidence.NAMED, f"made for this target: {told}")
    return Fit(Evidence.SMALLER, told)
