"""The support table: every model type that can be made tiny is decoded with and without a drafter.

The types come from transformers' own mappings, not from a list of ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

from hf_hsdraft.drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter
from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from hf_hsdraft.methods.mtp.kinds import KINDS
from hf_hsdraft.methods.mtp.layers import MtpLayers
from hf_hsdraft.runtime.target_limits import decoder_layers, text_config, windows
from oracles.mtp_targets import LAYERS, counting
from oracles.scripted import ScriptedDrafter
from oracles.tiny import NotTiny, tiny_config, tiny_model

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
NEW_TOKENS, _PROMPT = 24, 11
_LONGEST_PROMPT = 220  # tiny models have 256 positions


@dataclass(frozen=True)
class Support:
    """One row of the table.

    `drafts` is `"tree"`, `"chain"` or `"refused"`; `"plain fails"` where `generate()` alone does not work, `"not
    built"` where no tiny model could be made, `"error"` where drafted decoding raised something else. Comparisons are
    `"equal"`, `"differs"`, `"refused"`, an error, or `"-"` where plain decoding does not work.
    """

    task: str  # one of `MAPPINGS`, or "mtp" for drafts with the target's own layers
    model_type: str  # transformers' name of the type
    drafts: str
    equal: bool | None = None  # whether the text of scripted drafts is plain decoding's; `None` if not compared
    batch: str = "-"  # the same for a left-padded batch
    ngrams: str = "-"  # the same for drafts by n-grams
    long: str = "-"  # the same for a prompt longer than every window that the configuration names, by both drafters
    tau: float = 0.0  # tokens per target forward of scripted drafts
    reason: str = ""  # why it is not a tree

    @property
    def differs(self) -> bool:
        """Whether any text was not plain decoding's."""
        return self.equal is False or "differs" in (self.batch, self.ngrams, self.long)


def model_types(task: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the model type, configuration class and model class of all types of a task."""
    for model_type, class_names in getattr(modeling_auto, MAPPINGS[task]).items():
        module = importlib.import_module(
            f"transformers.models.{configuration_auto.model_type_to_module_name(model_type)}"
        )
        for name in [class_names] if isinstance(class_names, str) else class_names:
            model_class = getattr(module, name, None) or getattr(transformers, name)
            yield model_type, model_class.config_class or configuration_auto.CONFIG_MAPPING[model_type], model_class
            break


def types_with_layers() -> Iterator[tuple[str, Any, Any]]:
    """As `model_types`: the generating types whose configuration counts layers for multi-token prediction."""
    found = {model_type: each for task in ("causal", "image-text") for model_type, *each in model_types(task)}
    for model_type, (config_class, model_class) in sorted(found.items()):
        try:
            text = config_class().get_text_config()
        except Exception:  # other people's constructors raise anything
            continue
        if hasattr(text, "num_mtp_layers") or {text.model_type, model_type} & KINDS.keys():
            yield model_type, config_class, model_class


def check_layers(model_type: str) -> Support:
    """Drafts with layers that predict a tiny target's tokens ("counting"), and compares the texts."""
    try:
        target, layers = counting(model_type, LAYERS.get(model_type, 1))
        drafter = MtpDrafter(target, MtpLayers(layers))
    except NotTiny as error:
        return Support("mtp", model_type, "not built", reason=str(error))
    except ValueError as refusal:  # a DraftingRefused, or an error by which transformers refuses the configuration
        return Support("mtp", model_type, "refused", reason=str(refusal))
    except Exception as error:
        return Support("mtp", model_type, "not built", reason=brief(error))
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    try:
        plain, drafted = (_decode(target, 1, each) for each in (None, drafter))
    except Exception as error:
        return Support("mtp", model_type, "error", reason=brief(error))
    statistics, equal = drafted.statistics, torch.equal(plain.sequences, drafted.sequences)
    batch = _compared(target, 3, lambda *_: drafter)
    kind, tau = statistics.draft_kind, round(statistics.tau, 2)
    return Support("mtp", model_type, kind, equal, batch, tau=tau, reason=statistics.reason)


def check_type(task: str, model_type: str, config_class: Any, model_class: Any) -> Support:
    """Builds a tiny model of a type, decodes with and without drafters, and compares the texts."""
    model, plain, problem = decodable(config_class, model_class)
    if plain is None:
        return Support(task, model_type, "not built" if model is None else "plain fails", reason=problem)

    def failed(kind: str, reason: str) -> Support:
        return Support(task, model_type, kind, None, "-", ngrams, long, reason=reason)

    ngrams, beyond = _compared(model, 1, _ngrams), max(_PROMPT, *windows(text_config(model)), 0) + 4
    long = "-"
    assert model is not None
    if beyond <= _LONGEST_PROMPT and model.main_input_name == "input_ids":
        trials = [_compared(model, 1, make, beyond) for make in (scripted_drafter, _ngrams)]
        long = next((each for each in trials if each not in ("equal", "-")), trials[0])
    try:
        drafter = scripted_drafter(model, _new(plain), seed=1)
        drafted = _decode(model, 1, drafter)
    except Exception as error:
        refused = isinstance(error, ValueError) and "cannot be drafted for" in str(error)
        return failed("refused", str(error).partition(": ")[2]) if refused else failed("error", brief(error))
    session, statistics = drafter.last, drafted.statistics
    if statistics is None:  # Whisper's `generate` leaves out of its output what it does not know
        assert session is not None
        kind, reason, tau = "chain" if session.chains else "tree", "", session.tokens / session.forwards
    else:
        kind, reason, tau = statistics.draft_kind, statistics.reason, statistics.tau
    equal = torch.equal(plain.sequences, drafted.sequences)
    batch = _compared(model, 3, scripted_drafter)
    return Support(task, model_type, kind, equal, batch, ngrams, long, round(tau, 2), reason)


def decodable(config_class: Any, model_class: Any) -> tuple[Any, Any, str]:
    """Builds a tiny model that plain decoding works for; returns it, its output, and what went wrong before."""
    model = None
    problem = ""
    for layer_lists in ("anew", "cut", "full"):
        try:
            model = tiny_model(model_class, tiny_config(config_class, layer_lists))
        except Exception as error:  # other people's constructors raise anything
            problem = problem or brief(error)
            continue
        try:
            return model, _decode(model, 1, None), problem
        except Exception as error:
            problem = brief(error)
    return model, None, problem


def _compared(model: Any, rows: int, make_drafter: Any, prompt: int = _PROMPT) -> str:
    """Compares texts with and without a drafter. Returns what `Support.batch` says."""
    try:
        plain = _decode(model, rows, None, prompt)
    except Exception:  # plain decoding does not work
        return "-"
    try:
        drafted = _decode(model, rows, make_drafter(model, _new(plain)), prompt)
    except Exception as error:
        refused = isinstance(error, ValueError) and "cannot be drafted for" in str(error)
        return "refused" if refused else brief(error)
    return "equal" if torch.equal(plain.sequences, drafted.sequences) else "differs"


def _ngrams(model: Any, texts: Sequence[Sequence[int]]) -> CachebackDrafter:
    return CachebackDrafter(texts, tree_sizing="fixed", tree_size=8)


def _new(output: Any) -> list[list[int]]:
    return output.sequences[:, -NEW_TOKENS:].tolist()


def _decode(model: Any, rows: int, drafter: Any, prompt: int = _PROMPT) -> Any:
    options = {} if drafter is None else {"assistant_model": drafter}
    call = {"do_sample": False, "num_beams": 1, "use_cache": True, "return_dict_in_generate": True}
    call |= dict.fromkeys(("max_new_tokens", "min_new_tokens"), NEW_TOKENS)
    return model.generate(**_inputs(model, rows, prompt), **call, **options)


def _inputs(model: Any, rows: int, prompt: int) -> dict[str, torch.Tensor]:
    """Returns token ids `[rows, prompt]`, padded at the left, or the features that a speech model takes."""
    generator = torch.Generator().manual_seed(rows)
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        return {"input_features": torch.randn(rows, model.config.num_mel_bins, frames, generator=generator)}
    ids = torch.randint(5, 80, (rows, prompt), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def scripted_drafter(model: Any, texts: Sequence[Sequence[int]], seed: int = 2, steps: int = 4) -> ScriptedDrafter:
    """Returns a drafter that fits a model and reads its hidden states, but drafts along given texts."""
    config = text_config(model)
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_draft_steps": steps}
    sizes |= {"tree_size": 16, "injector_rank": 4, "injector_hidden_size": 8, "draft_vocab_size": config.vocab_size}
    fitting = {"target_hidden_size": config.hidden_size, "target_num_hidden_layers": decoder_layers(config)}
    made = HSDraftConfig(vocab_size=config.vocab_size, head="trained", target_tap_layers=[1, 2], **sizes, **fitting)
    return ScriptedDrafter(HSDrafter(made).eval(), texts, seed)


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
