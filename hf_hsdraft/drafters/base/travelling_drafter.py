"""A drafter run by the code of its repository, where `hf_hsdraft` is not installed.

It drafts chains in transformers' assisted decoding. Calls whose output could differ are decoded plainly, with one
warning. So the output is always that of plain decoding, also when sampling with a seed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from ...core.checks import is_code_file, misfit_of, public_name

logger = logging.get_logger(__name__)

_CACHES = ("cache", "past_key_values")  # the cache's name since transformers 5.24, and before
_INPUTS = {*_CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that can drop rejected tokens
_STATEFUL = {"SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}
_OF_A_PUSH = ("repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description")
_OF_WEIGHTS = re.compile(r"(model|pivot_verifier)\b.*\.safetensors|(figures|training_recipe)\.json|refiner/")
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class TravellingDrafter(PreTrainedModel):
    """Base of drafters that travel with their code."""

    # Name and subfolder of its repository, and how it is fetched; None if it was not loaded
    loaded_from: tuple[str, str, dict[str, Any]] | None = None
    has_network: ClassVar[bool] = True  # whether its network's code is included
    _supports_sdpa = True  # lets this name pass: attention is computed here all the same
    adjust_generation_fn = GenerationMixin.adjust_generation_fn  # loads the drafting options

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that transformers loads and saves the drafting options in `generation_config`."""
        return True

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: saving copies all code."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, from safetensors only."""
        loaded = super().from_pretrained(name, *args, **{**kwargs, "use_safetensors": True})
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded
        hub = {key: kwargs.get(key) for key in ("token", "cache_dir")}
        hub["revision"] = getattr(drafter.config, "_commit_hash", None)
        drafter.loaded_from = os.fspath(name), kwargs.get("subfolder") or "", hub
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Writes the complete repository: weights, configuration, and the files that it was loaded with."""
        hub = {key: kwargs.pop(key) for key in _OF_A_PUSH if key in kwargs}
        folder, config, names = Path(save_directory), self.config, self.config.architectures
        with tempfile.TemporaryDirectory() as stage:  # the folder may hold what is not to be sent
            whole = self.loaded_from is not None and not getattr(self, "_hf_peft_config_loaded", False)
            if self.has_network or not whole:  # of an adapter, that alone
                super().save_pretrained(stage, *args, **kwargs)
                config.architectures = names
            if whole:
                self._add_files(Path(stage))
            for path in (path for path in Path(stage).rglob("*") if path.is_file()):
                place = folder / path.relative_to(stage)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)  # weights there may be mapped
                shutil.copyfile(path, place)
            name = hub.pop("repo_id", None) or folder.resolve().name
            return self._send(Path(stage), name, **hub) if push_to_hub else None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads what `save_pretrained` writes in one commit; unlike `hf_hsdraft`, does not check what is there."""
        with tempfile.TemporaryDirectory() as place:
            return self.save_pretrained(place, push_to_hub=True, repo_id=repo_id, **kwargs)

    def _send(self, folder: Path, repo_id: str, private: Any = None, token: Any = None, **options: Any) -> Any:
        """Sends a staged folder. A card that is there stays."""
        api, adapter = HfApi(token=token), folder / "adapter_config.json"
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise ValueError(f"{repo_id} exists and is public: nothing was sent; choose another name, or hide it first")
        if (revision := options.get("revision")) and not options.get("create_pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there, stale = api.list_repo_files(repo_id, revision=revision), set[str]()
        if adapter.is_file():  # without a path of this machine
            (folder / "generation_config.json").unlink(missing_ok=True)
            fields = json.loads(adapter.read_text(encoding="utf-8"))
            fields["base_model_name_or_path"] = public_name(str(fields.get("base_model_name_or_path") or ""))
            adapter.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        elif "config.json" in there:
            config, _ = PreTrainedConfig.get_config_dict(repo_id, revision=revision, token=token)
            if (found := config.get("model_type")) != self.config.model_type:
                raise ValueError(f"{repo_id} holds a model of type {found!r}, not a drafter: nothing was sent")
            place = str((config.get("auto_map") or {}).get("AutoModel")).rpartition("/")[0]  # "" in earlier versions
            code = {f"{place}/{name}".lstrip("/") for name in filter(is_code_file, config.get("code_files") or ())}
            stale = {each for each in there if each in code or _OF_WEIGHTS.match(each)}
        options["delete_patterns"] = sorted(each for each in stale if not (folder / each).is_file()) or None
        options["ignore_patterns"] = ["README.md"] if "README.md" in there else None
        options.setdefault("commit_message", "Upload drafter")
        return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)

    def _add_files(self, folder: Path) -> None:
        """Copies the repository's other files, except documents about other weights."""
        assert self.loaded_from is not None
        (name, subfolder, hub), config = self.loaded_from, self.config
        weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
        same = not self.has_network or weights == config.weights_digest
        if not os.path.isdir(name):
            name = snapshot_download(name, **hub)
        source = Path(name, subfolder)
        for path in (path for path in source.rglob("*") if path.is_file()):
            place = path.relative_to(source)
            if place.parts[0].startswith(".") or (folder / place).exists() or "__pycache__" in place.parts:
                continue
            if same or path.suffix == ".py" or len(place.parts) > 1:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / place)
        # After loading from the Hub, the entry would include the repository's name.
        config.auto_map = {auto: entry.split("--")[-1] for auto, entry in getattr(config, "auto_map", {}).items()}
        if self.has_network:
            config.weights_digest = weights
            config.save_pretrained(folder)

    def candidates(self, target: Any, generation_config: Any) -> Any:
        """Returns the `CandidateGenerator` of a call; None to decode plainly."""
        return None

    def check_target(self, target: Any) -> None:
        """Raises a ValueError if the target's sizes differ from the configured ones."""
        if misfit := misfit_of(self.config, target):
            raise ValueError(f"{misfit}: it was trained for {self.config.target_name or 'another target'}")


class PlainDraws(LogitsProcessor):
    """Draws tokens in plain decoding's order in transformers' loop, which draws for all candidates at once.

    As the last processor it draws the tokens position by position, until one is not the candidate or ends the sequence.
    It masks all other tokens, so the loop draws the same, and then restores the RNG from the loop's extra draws.
    """

    def __init__(self, device: torch.device, ends: Any) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._ends = set() if ends is None else set(torch.as_tensor(ends).flatten().tolist())
        self._next, self._candidates = -1, torch.empty(1, 0)
        self._state: torch.Tensor | None = None

    def begin(self, candidates: torch.Tensor, length: int) -> None:
        """Starts a round after `length` tokens; `candidates` `[1, n]` are the sequence and its draft."""
        self.end()
        self._next, self._candidates = length, candidates

    def end(self) -> None:
        """Restores the RNG from superfluous draws."""
        if self._state is not None:
            if self._cuda is None:
                torch.set_rng_state(self._state)
            else:
                torch.cuda.set_rng_state(self._state, self._cuda)
        self._state = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1]
        if place != self._next:  # after a rejected token, or the last one
            return scores
        token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
        drawn, drafted = int(token), self._candidates[0, place:].tolist()
        self._next = place + 1 if drafted[:1] == [drawn] and drawn not in self._ends else -1
        if self._next < 0:
            self._state = torch.get_rng_state() if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


def why_plain(target: Any, rows: int, config: Any, processors: Any, criteria: Any, given: dict[str, Any]) -> str:
    """Returns why a call must be decoded plainly; "" if transformers' assisted decoding gives the same output."""
    cache: Any = next((given[name] for name in _CACHES if given.get(name) is not None), None)
    own = {type(each).__name__ for each in processors if type(each).__module__ != logits_process.__name__}
    stateful = own | ({type(each).__name__ for each in processors} & _STATEFUL)
    others = sorted({type(each).__name__ for each in criteria if type(each) not in _CRITERIA})
    unknown = sorted(name for name, value in given.items() if value is not None and name not in _INPUTS)
    reasons = {
        "it has several texts": rows > 1,
        "the target is an encoder-decoder": target.config.is_encoder_decoder,
        "the target is in training mode": target.training,
        "it has no cache that grows and can be cropped": type(cache) is not DynamicCache
        or getattr(target, "_is_stateful", False)
        or not {type(layer).__name__ for layer in cache.layers} <= _LAYERS,
        f"it has logits processors that may keep a state ({', '.join(sorted(stateful))})": bool(stateful),
        f"it has stopping criteria beside lengths and ends ({', '.join(others)})": bool(others),
        f"the target has inputs beside the text ({', '.join(unknown)})": bool(unknown),
        "hidden states or attentions are returned": config.output_hidden_states or config.output_attentions,
        "scores are returned, and tokens are sampled": config.output_scores and config.do_sample,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _decode(original: Any, target: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Decodes a drafter's call by `original`, transformers' assisted decoding, or plainly."""
    drafter = kwargs.get("assistant_model")
    if not isinstance(drafter, TravellingDrafter):
        return original(target, input_ids, *args, **kwargs)
    del kwargs["assistant_model"]
    names = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
    call = {name: kwargs.pop(name) for name in names if name in kwargs}
    for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
        kwargs.pop(name, None)
    config, processors = call["generation_config"], call["logits_processor"]
    reason = why_plain(target, len(input_ids), config, processors, call["stopping_criteria"], kwargs)
    if call.get("synced_gpus"):
        reason = "its forwards are synced with those of other processes"
    candidates = None if reason else drafter.candidates(target, config)
    if candidates is None:
        _warn(reason or "drafters of this family draft by the package only")
        return type(target)._sample(target, input_ids, **call, **kwargs)
    if config.do_sample:
        candidates.draws = PlainDraws(input_ids.device, getattr(config, "_eos_token_tensor", None))
        call["logits_processor"] = LogitsProcessorList([*processors, candidates.draws])
    try:
        return original(target, input_ids, assistant_model=candidates, **call, **kwargs)
    finally:
        if candidates.draws is not None:
            candidates.draws.end()


def _warn(reason: str) -> None:
    logger.warning_once(
        f"a call of generate() is decoded without its drafter: {reason}. Where the package hf_hsdraft is "
        "installed, drafters also draft trees, batches and for other targets"
    )


def install() -> None:
    """Makes `generate(assistant_model=drafter)` work. Idempotent; other assistants pass straight through.

    Each copy of this module wraps what it finds and handles only its drafters, so several versions can coexist.
    """
    if TravellingDrafter in getattr(GenerationMixin._assisted_decoding, "_hsdraft_travelling", ()):
        return
    for name, hook in (
        ("_assisted_decoding", _decode),
        ("_get_candidate_generator", _generator),
        ("_validate_generation_mode", _validate),
        ("_prepare_generation_config", _prepare),
    ):
        original = getattr(GenerationMixin, name)
        method = _wrapped(original, hook)
        method._hsdraft_travelling = (*getattr(original, "_hsdraft_travelling", ()), TravellingDrafter)
        setattr(GenerationMixin, name, method)


def _wrapped(original: Any, hook: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    return method


def _generator(original: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    assistant = kwargs.get("assistant_model")
    return assistant if isinstance(assistant, CandidateGenerator) else original(target, *args, **kwargs)


def _validate(original: Any, target: Any, mode: Any, config: Any, kwargs: Any) -> Any:
    """Checks the target first. Batches and stateful models do not depend on the mode: `_decode` handles them."""
    drafter = kwargs.get("assistant_model")
    if isinstance(drafter, TravellingDrafter):
        if mode == GenerationMode.ASSISTED_GENERATION:
            drafter.check_target(target)
            mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
            kwargs = {name: value for name, value in kwargs.items() if name != "assistant_model"}
        else:
            del kwargs["assistant_model"]
            _warn(f"it decodes by {mode.value.replace('_', ' ')}")
    return original(target, mode, config, kwargs)


def _prepare(original: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Removes the drafter for targets that override `generate` (Whisper) and pass it to this method."""
    config, others = original(target, *args, **kwargs)
    if isinstance(others.get("assistant_model"), TravellingDrafter):
        del others["assistant_model"]
        _warn(f"{type(target).__name__} decodes in its own way")
    return config, others


class PlainDrafter(TravellingDrafter):
    """Decodes all calls plainly, and can be saved again."""

    has_network = False
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"."]  # the weights of the network
    _keys_to_ignore_on_load_missing: ClassVar[list[str]] = [r"."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.place = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # a model has a device and a dtype
        self.post_init()
