"""Loads a drafter of any family, and finds what drafts for a target.

Families are told by the `model_type` in config.json, others by their format. Finding looks into the target's
checkpoint, the cache and the Hub; no weights are loaded or fetched.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from transformers import PreTrainedConfig
from transformers.utils import logging

from ...core.checks import misfit_of, printable
from ...core.methods import Registry
from ...cpu.gguf_blocks import file_of
from ...hub.checkpoint import CachedModel, Checkpoint, cached_models, named_targets, reader, target_of
from ...hub.drafter_files import CONFIG, HUB_ARGUMENTS, DamagedFile, find_folder, loading, read_json
from ...runtime.target_loading import default_drafter
from .registry import FAMILIES, TREES, Evidence, Fit, TargetInfo, fit_of, load_families, recognise
from .saved_drafter import WeightlessDrafter

logger = logging.get_logger(__name__)

# Tags of cards that mark a drafter, and parts of names that do where a card has no such tag.
_TAGS = ("speculative-decoding", "hsdraft", "speculators", "eagle3", "dflash", "dspark")
_PARTS_OF_NAMES = (
    "eagle", "dflash", "dspark", "draft", "specul", "assistant", "nextn", "medusa", "hydra", "accelerator", "pard",
)  # fmt: skip
_MOST_LISTED = 100  # models of one answer of the Hub
_UNUSABLE = (OSError, TypeError, ValueError, AttributeError, LookupError)  # gated, incomplete, damaged, no drafter
_PATIENCE = 10.0  # seconds to wait for its first answer


@dataclass(frozen=True)
class Found:
    """A way to draft for a target."""

    name: str  # Hub name or folder; of others what they are
    kind: str  # class of the drafter, and the format of its files
    why: str  # why it drafts for this target
    bytes: int | None  # size of the weights; None if it is unknown
    use: str  # a line of code that uses it
    trained: bool = True  # whether it was trained for this target, or for one like it
    here: bool = True  # whether it can be used without the network
    loading: Mapping[str, Any] = field(default_factory=dict)  # arguments of `AutoDrafter.from_pretrained`
    made: Callable[[Any], Any] | None = None  # makes a drafter without files for the loaded target
    drafts: str = ""  # whether trees or chains, and in how many forwards
    problem: str = ""  # why it does not draft here, although it was made for the target; empty if it does
    evidence: Evidence = Evidence.SIZES  # why it may fit


Finder = Callable[[TargetInfo, bool], Iterator[Found]]  # takes whether only local files may be read
_finders: Registry[Finder] = Registry("finder")


def register_finder(name: str, finder: Finder) -> None:
    """Registers what finds drafters that have no files: those that were trained come first, the others last."""
    _finders[name] = finder


def find(target: TargetInfo, local_files_only: bool = False) -> tuple[list[Found], str]:
    """Returns what drafts for a target, the best first, and a line on why the Hub was not asked, or an empty one.

    The order: prediction layers of the checkpoint, drafters in the cache, published ones, smaller language models,
    drafters of the target that do not draft here, n-grams; the same by how well they fit.
    """
    load_families()
    cached = list(_cached(target))
    here = {found.name for found in cached if found.here}
    published, note = ([], "") if local_files_only else _published(target, here)
    asked = {found.name for found in published}
    every = [found for found in cached if found.here or found.name not in asked] + published
    every.sort(key=_rank)
    without_files = [found for finder in _finders.values() for found in finder(target, local_files_only)]
    first, last = ([found for found in without_files if found.trained is trained] for trained in (True, False))
    return [*first, *every, *last], note


def _rank(found: Found) -> tuple[bool, bool, bool, Evidence, int]:
    smallest = 0 if found.trained else found.bytes or 0  # of smaller language models, which come last
    return bool(found.problem), not found.trained, not found.here, found.evidence, smallest


def train_command(place: str, tokenizer: Any) -> str:
    """Returns the command that trains a drafter for the target at a place; empty for the default target."""
    target = f"--target {shlex.quote(place)} " if place else ""
    template = "" if tokenizer is None or getattr(tokenizer, "chat_template", None) else "--chat-template FILE "
    return f"hsdraft train {target}{template}--out my-drafter"


# In the cache


def _cached(target: TargetInfo) -> Iterator[Found]:
    """Drafters and smaller models in the cache, and the drafter that comes with a checkout of the package."""
    chosen: dict[str, CachedModel] = {}
    for model in cached_models():  # the latest commit, or that of the main branch
        if model.checkpoint.name not in chosen or "main" in model.refs:
            chosen[model.checkpoint.name] = model
    if (own := default_drafter(None)) is not None:
        yield from _fitting(Checkpoint(own, Path(own), read_json(Path(own) / CONFIG)), target, "")
    for model in chosen.values():
        if model.checkpoint.name != target.name:
            yield from _fitting(model.checkpoint, target, "" if "main" in model.refs else model.commit)


def _fitting(checkpoint: Checkpoint, target: TargetInfo, revision: str) -> Iterator[Found]:
    try:
        found = _examined(checkpoint, target, named_targets(checkpoint.folder), revision)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a file in the cache may hold anything; panics of Rust are no Exceptions
        if not isinstance(error, _UNUSABLE) or isinstance(error, DamagedFile):
            told = printable(error, 300) or "no reason given"
            logger.warning(f"{printable(checkpoint.name)} in the cache is passed over: {type(error).__name__}: {told}")
        return
    if found is not None and found.here:
        yield found
    elif found is not None and found.trained:
        yield replace(found, why=f"{found.why}; its weights are not fetched yet")


def _examined(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str], revision: str = "") -> Found | None:
    """Looks at configuration and headers; None if made for another target. Raises one of `_UNUSABLE` if no drafter."""
    size, drafts, problem = checkpoint.bytes if checkpoint.is_described else None, "", ""
    if not _is_of_family(checkpoint):
        form = recognise(checkpoint)
        kind = f"{form.drafter.__name__} ({form.name})" if form.drafter is not None else form.name
        described = form.describe(checkpoint)
        drafts, problem = described.get("drafts", ""), described.get("cannot be loaded", "")
        if not problem:
            fit = form.fit(checkpoint, target, named)
        else:
            is_named = target.is_named({*named, target_of(checkpoint.config)[0]})
            fit = Fit(Evidence.NAMED, "made for this target") if is_named else None
    else:
        family, config = FAMILIES[checkpoint.config["model_type"]], None
        if issubclass(family.config, PreTrainedConfig):
            config = family.config.from_dict(dict(checkpoint.config))
        elif issubclass(family.drafter, WeightlessDrafter):
            config, size = family.drafter.of_document(checkpoint.config, checkpoint.folder / CONFIG).config, 0
        kind, fit = family.drafter.__name__, None
        if hasattr(config, "target_hidden_size") and not misfit_of(config, target):
            fit, drafts = fit_of(config, target, named), TREES
    if fit is None:
        return None
    use = f"model.generate(**inputs, assistant_model={json.dumps(checkpoint.name)})"
    if revision:
        use = f'attach(model, {json.dumps(checkpoint.name)}, revision="{revision}")'
    if problem:
        use = f"cannot be loaded: {problem}"
    name, evidence, loading = checkpoint.name, fit.evidence, {"revision": revision} if revision else {}
    trained, here = evidence != Evidence.SMALLER, size is not None
    return Found(name, kind, fit.why, size, use, trained, here, loading, None, drafts, problem, evidence)


def _is_of_family(checkpoint: Checkpoint) -> bool:
    """Whether these are files of this package, which tell by the configuration alone what they hold."""
    model_type = checkpoint.config.get("model_type")
    return isinstance(model_type, str) and model_type in FAMILIES


# On the Hub


def _published(target: TargetInfo, known: Collection[str]) -> tuple[list[Found], str]:
    """Published drafters that are not among the `known` names, and a line on why the Hub was not asked."""
    if not target.on_hub:
        return [], "the Hub was not asked: the target has no name there"
    if is_offline_mode():
        return [], "the Hub was not asked: offline mode is on"
    try:
        listed = _listed(target.on_hub)
        found = [each for info in listed if info.id not in known for each in _examined_on_hub(info, target)]
    except RepositoryNotFoundError:
        return [], f"the Hub was not asked: it has no repository {target.on_hub} that may be read"
    except (HfHubHTTPError, HTTPError, OSError) as error:
        return [], f"the Hub cannot be reached ({printable(error) or type(error).__name__})"
    return found, ""


def _listed(base: str) -> list[ModelInfo]:
    """Returns the models whose cards name a model as their base and that may be drafters, by downloads."""
    api = HfApi()
    api.model_info(base, timeout=_PATIENCE)  # which is not tried again and again, as listing is
    relation, found = f"base_model:{base}", {}
    for tag in ("", *_TAGS):
        tags = [relation, tag] if tag else [relation]
        for info in api.list_models(filter=tags, sort="downloads", limit=_MOST_LISTED, full=True):
            named = any(part in info.id.rsplit("/", 1)[-1].lower() for part in _PARTS_OF_NAMES)
            if named or not {*_TAGS}.isdisjoint(info.tags or ()):
                found[info.id] = info
    return sorted(found.values(), key=lambda info: -(info.downloads or 0))


def _examined_on_hub(info: ModelInfo, target: TargetInfo) -> Iterator[Found]:
    """Examines a published drafter by its configuration and the headers of its weights."""
    says = f"its card names {'this target' if target.on_hub == target.name else target.on_hub} as base model"
    try:
        checkpoint = reader().open(info.id)
        if not _is_of_family(checkpoint) and not checkpoint.is_described:
            if any(file.rfilename.endswith((".bin", ".pt")) for file in info.siblings or ()):
                why = f"{says}; its format shows once its pickled weights are fetched"
                use = f"model.generate(**inputs, assistant_model={json.dumps(info.id)})"
                yield Found(info.id, "unknown format", why, None, use, here=False)
            return
        found = _examined(checkpoint, target, {target.on_hub})
    except (*_UNUSABLE, ArithmeticError, MemoryError, RuntimeError):
        return
    if found is not None:
        yield replace(found, here=False, why=says if found.trained else found.why)


class AutoDrafter:
    """Loads drafters of all families. Other projects' drafters load unchanged, without running their code.

    drafter = AutoDrafter.from_pretrained("user/SmolLM2-135M-Instruct-hsdraft")
    drafter = AutoDrafter.for_target(model)  # the best that can be found
    """

    def __init__(self) -> None:
        raise TypeError(
            "AutoDrafter is not made by itself: call AutoDrafter.from_pretrained(name) or AutoDrafter.for_target(model)"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter.

        Args:
            pretrained_model_name_or_path: folder or Hub name.
            args, kwargs: for all families:
                - `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`, `force_download`: for the Hub;
                - `dtype` (or `torch_dtype`): of the weights; by default the dtype of the files;
                - `device_map`: one device, or "auto": a drafter follows its target anyway;
                - `attn_implementation`: for language models; other drafters accept "sdpa" and "eager" and ignore them;
                - drafting options by name.
                Language models also take what `AutoModelForCausalLM.from_pretrained` takes, drafters of `hsdraft train`
                fields of their configuration, and P-EAGLE drafters `mask_token_id` if their files lack it.

        Raises:
            OSError: no such folder or repository, or it has no configuration.
            TypeError: an argument is unknown; the message names it.
            ValueError: the family or format is unknown, or the files contradict each other.
        """
        load_families()
        name, subfolder = pretrained_model_name_or_path, kwargs.get("subfolder") or ""
        hub = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if kwargs.get(argument) is not None}
        with loading(name, offline=bool(hub.get("local_files_only"))):
            config = read_json(find_folder(name, (CONFIG,), subfolder, **hub) / CONFIG)
            model_type = config.get("model_type")
            family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
            if family is None:
                checkpoint = reader().open(name, subfolder, **hub)
                of_hub = {*HUB_ARGUMENTS, "subfolder"}
                others = {argument: value for argument, value in kwargs.items() if argument not in of_hub}
                return _format_of(checkpoint).load(checkpoint, **others)
        return family.drafter.from_pretrained(name, *args, **kwargs)

    @classmethod
    def for_target(cls, model: Any, tokenizer: Any = None, local_files_only: bool = False) -> Any:
        """Returns the best drafter that `hsdraft find` lists for a loaded target, and logs in a line which it is.

        Where nothing else drafts, that is a `CachebackDrafter`, and the line says how to train a drafter. What cannot
        be loaded is logged too. Layers for multi-token prediction in the target's checkpoint come first.

        Args:
            model: the target.
            tokenizer: the target's; by default the one beside its weights.
            local_files_only: whether to look into the cache only, instead of on the Hub too.
        """
        return cls.chosen_for(model, tokenizer, local_files_only)[1]

    @classmethod
    def chosen_for(cls, model: Any, tokenizer: Any = None, local_files_only: bool = False) -> tuple[Found, Any]:
        """Returns what `for_target` does, behind the row of `hsdraft find` that it is."""
        target = TargetInfo.of_model(model, tokenizer, local_files_only)
        (*found, ngrams), note = find(target, local_files_only)
        assert ngrams.made is not None
        for each in found:
            if each.problem or (local_files_only and not each.here):
                continue
            loading = {"dtype": model.dtype, "local_files_only": each.here, **each.loading}
            try:
                made = each.made
                drafter = cls.from_pretrained(each.name, **loading) if made is None else made(model)
                drafter.check(model)
            except Exception as error:  # its files may hold anything
                logger.warning(f"{each.name} is not used, although it fits: {error}")
                continue
            logger.warning(f"drafting with {each.name} ({each.kind}): {each.why}")
            return each, drafter
        file = file_of(model)
        named = printable(target.name if file is None else file.name) or type(model).__name__
        command = train_command(str(file or target.place) or "path/or/name", target.tokenizer)
        logger.warning(
            f"nothing that was trained for {named} is at hand{f' ({note})' if note else ''}: drafting with n-grams; "
            f"`{command}` trains a drafter"
        )
        return ngrams, ngrams.made(model)


def _format_of(checkpoint: Checkpoint) -> Any:
    try:
        return recognise(checkpoint)
    except ValueError as error:
        if "auto_map" not in checkpoint.config:
            raise
        advice = "import the module that registers its family, or use AutoModel and trust_remote_code=True"
        raise ValueError(f"{error}; {advice}") from None
