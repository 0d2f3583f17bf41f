"""Checks and loads the folder of a language model that is to draft; bounds what its config.json may make of it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_optimum_available

from ...core.checks import demand, few, is_integer, printable, short
from ...drafters.base.registry import TREES, Evidence, Fit, TargetInfo
from ...drafters.base.saved_drafter import stored_options
from ...hub.drafter_files import CONFIG, DamagedFile, read_json
from ...runtime.target_loading import marks_of_drafter
from ..published.checkpoint import AnyCheckpoint
from ..published.formats import AT_ONCE, IN_TURN, size_of
from .lm_texts import what_differs

# Numbers of parts, which transformers makes or lists each; the largest models have some hundreds.
_COUNTS = re.compile(r"(^|_)(layers?|depths?|blocks?|experts?|heads?|groups?|labels?|stages?|codebooks?|streams?)$")
_MOST_PARTS, _MOST_OF_OTHERS, _MOST_MODULES = 1024, 2**40, 40_000
# With others, transformers may fetch a kernel from the Hub and run it.
_ATTENTION = ("eager", "sdpa", "flex_attention")
_IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?$")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_FORBIDDEN = ("distributed_config", "fusion_config", "kernel_config", "transformers_weights", "use_kernels")


def read_config(folder: Path) -> Any:
    """Returns transformers' configuration of a language model in a folder.

    Raises an OSError if it is missing, and a DamagedFile if a number is out of bounds, if it names an implementation
    that transformers does not have itself, or if transformers cannot read it.
    """
    path = folder / CONFIG
    _check("", read_json(path), path)
    with _told(path):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def build(config: Any, folder: Path) -> Any:
    """Returns a model on the meta device; a DamagedFile in `folder` if it cannot be built, or is too large."""
    with _told(folder / CONFIG), few_modules(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@contextmanager
def few_modules() -> Iterator[None]:
    """Raises a ValueError within, in this thread, when more modules are made than a drafter can have."""
    thread, made = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES:,} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on the meta device, whatever is raised is due to the configuration
        told = f"{type(error).__name__}: {printable(error)}"
        message = f"{path} is no configuration that transformers builds a language model of ({told})"
        raise DamagedFile(message, path) from error


def _check(name: str, value: Any, path: Path) -> None:
    """Raises a DamagedFile for the first value out of bounds, in nested objects too."""
    if isinstance(value, Mapping):
        for inner, each in value.items():  # implementations may be given by parts of the model
            _check(name if _IMPLEMENTATIONS.match(name) else inner, each, path)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            _check(name, each, path)
    elif wanted := _wanted(name, value):
        raise DamagedFile(f"{printable(name)}={short(value)} in {path} is invalid: expected {wanted}", path)


def _wanted(name: str, value: Any) -> str:
    """What is expected of a field; empty if the value is that."""
    if name in _FORBIDDEN:
        return "" if value in (None, False) else "nothing, as a drafter brings no code and no kernels"
    if _IMPLEMENTATIONS.match(name):
        allowed = _ATTENTION if "attn" in name else _EXPERTS
        return "" if value is None or value in allowed else f"one of {', '.join(allowed)}"
    if isinstance(value, float):
        return "" if abs(value) < float("inf") else "a finite number"
    if not is_integer(value):
        return ""
    most = _MOST_PARTS if _COUNTS.search(name) else _MOST_OF_OTHERS
    return "" if abs(value) <= most else f"at most {most:,}"


# Separate from the language model's generation_config.json.
DRAFTING_OPTIONS = "drafting_config.json"

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # any of these
_OF_TOKENIZERS = (*_TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")

# Share of the target's parameters up to which a language model is proposed as its drafter: each drafted token runs it.
_MOST_SHARE = 0.5
# Numbers that config.json may describe for each one in the files; what is missing is named once it is loaded.
_MOST_LACKING, _MOST_PACKED = 2, 32
_MOST_PADDING = (
    1024  # rows by which vocabularies of one tokenizer may differ; models of a series are padded differently
)

# Names of tensors that only drafters for a specific target have, whatever architecture they name.
_TENSORS_OF_DRAFTERS = (
    "fc.", "d2t", "t2d", "midlayer.", "mask_hidden", "hidden_norm.", "candidate_selector.", "markov_head.",
)  # fmt: skip


def why_no_causal_lm(checkpoint: AnyCheckpoint) -> str:
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


def describe(checkpoint: AnyCheckpoint) -> dict[str, str]:
    """Returns what is known of a language model as a drafter."""
    config = checkpoint.config
    options = stored_options(checkpoint.also(DRAFTING_OPTIONS) / DRAFTING_OPTIONS)
    drafts = f"{TREES}, {AT_ONCE}"
    if config.get("pard_token") is None:
        drafts = f"{TREES}, {IN_TURN}; chains alone where its attention takes no masks, which a trial shows"
    told = {"drafts": drafts, "architecture": printable(config["architectures"])}
    told["reads"] = "the text alone, no hidden states"
    sizes = ("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "vocab_size", "dtype", "torch_dtype")
    packed = config.get("quantization_config")
    if isinstance(packed, dict) and packed.get("quant_method") == "gptq" and not is_optimum_available():
        told["cannot be loaded"] = "transformers loads language models in GPTQ with optimum: pip install optimum"
    told |= {name: printable(config[name]) for name in (*sizes, "pard_token") if config.get(name) is not None}
    return told | {printable(name): printable(value) for name, value in options.items() if value is not None}


def empty_model(checkpoint: AnyCheckpoint, **kwargs: Any) -> Any:
    """Builds a checkpoint's model on the meta device, and compares the files' tensors with it.

    `kwargs` are those of `AutoModelForCausalLM.from_pretrained`. Raises a ValueError if they ask for code of the
    repository or for weights that differ from the files, or if shapes of tensors contradict config.json.
    """
    for name in ("trust_remote_code", "ignore_mismatched_sizes"):
        demand(not kwargs.get(name), name, True, "a drafter is a model of transformers as it was saved")
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = read_config(checkpoint.folder)
    model = build(config, checkpoint.folder)
    # With converted or packed weights, files and model hold different tensors.
    packed = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
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
    stored = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    described = sum(weight.numel() for weight in model.parameters())
    if described > stored * (_MOST_PACKED if packed else _MOST_LACKING):  # before so much is allocated
        raise _mismatch(checkpoint, model, f"{stored:,} numbers instead of {described:,}")
    return model


def load_model(checkpoint: AnyCheckpoint, **kwargs: Any) -> Any:
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


def _mismatch(checkpoint: AnyCheckpoint, model: Any, told: str) -> ValueError:
    return ValueError(
        f"the weights of {printable(checkpoint.name)} do not match its config.json ({told}): expected all weights of a "
        f"{type(model).__name__} and no others"
    )


def load_tokenizer(checkpoint: AnyCheckpoint) -> Any:
    """Loads a checkpoint's tokenizer; None if it has none."""
    folder = checkpoint.also(*_OF_TOKENIZERS)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def fit(checkpoint: AnyCheckpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """Returns how well a language model fits as a drafter: it is smaller than the target and has its tokenizer."""
    own = read_config(checkpoint.folder)
    sizes = [config.get_text_config(decoder=True).vocab_size for config in (own, target.config)]
    if abs(sizes[0] - sizes[1]) > _MOST_PADDING or target.tokenizer is None or (whole := size_of(target)) is None:
        return None
    with few_modules():
        small = size_of(TargetInfo(own))
    if small is None or small > _MOST_SHARE * whole:
        return None
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None or what_differs(tokenizer, target.tokenizer):
        return None
    told = f"a language model of the same tokenizer with {small / whole:.0%} of the target's parameters"
    if (checkpoint.also(DRAFTING_OPTIONS) / DRAFTING_OPTIONS).is_file() and target.is_named(named):
        return Fit(Evidence.NAMED, f"made for this target: {told}")
    return Fit(Evidence.SMALLER, told)
