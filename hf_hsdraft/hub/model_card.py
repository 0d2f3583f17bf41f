"""A drafter's card, made of the files beside it. What was not measured is a visible gap, never a number."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..core.checks import public_name
from ..core.methods import offered
from ..verify.registry import is_lossy, rules_learned_in
from .card_figures import code, figures_section, is_chain, read_document, read_figures, table
from .code_files import stands_alone
from .drafter_files import CARD, CONFIG, OPTIONS, PICTURES, RECIPE, header, weight_files
from .speculators_format import target_of

MARK = "<!-- written by hsdraft from the files beside it; remove this line to keep changes of your own -->"
_OLD_MARK = "<!-- written by hsdraft train -->"
PAPER = "2602.21224"  # arXiv
_GROUPS = {"average": "make", "prune": "make", "overlap": "data", "coverage": "data"}  # of commands, by earlier names
_EARLIER = re.compile(rf"hsdraft ({'|'.join(_GROUPS)})\b")
_CAPTIONS = {
    "speed_up.png": "Speed-up and tau by category",
    "learning_curves.png": "Loss and tau by training step",
    "acceptance.png": "Accuracy in training and acceptance in decoding, by depth",
    "calibration.png": "Accuracy of the first choice by the drafter's confidence",
}


def read_recipe(folder: Path) -> dict[str, Any]:
    """How the drafter in a folder was trained; malformed parts are left out."""
    recipe = read_document(folder / RECIPE)
    lists = {name: recipe.get(name) for name in ("limits", "notes", "commands", "language", "datasets")}
    names = "license", "adapts", "adapter_name", "target"
    texts = {name: recipe[name] for name in names if isinstance(recipe.get(name), str)}
    training = recipe.get("training")
    return {
        **{name: [value] if isinstance(value, str) else value for name, value in lists.items() if _are_texts(value)},
        **texts,
        "training": training if isinstance(training, dict) else {},
        "changed_since": bool(recipe.get("changed_since")),
    }


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def write_card(folder: Path, name: str) -> None:
    """Writes `README.md` into a drafter's or adapter's folder, unless there is a hand-written one.

    `name` is the name by which the card's examples load the drafter.
    """
    path = folder / CARD
    if path.is_file() and not is_generated(path):
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(render_card(folder, name), encoding="utf-8")
    partial.replace(path)


def render_card(folder: Path, name: str) -> str:
    config, recipe, figures = read_document(folder / CONFIG), read_recipe(folder), read_figures(folder)
    benchmarks = figures["benchmarks"]
    base = read_document(folder / "adapter_config.json").get("base_model_name_or_path")
    adapts = None if config else recipe.get("adapts") or public_name(str(base or "its drafter"))
    target = config.get("target_name") or recipe.get("target") or target_of(config)[0]
    of_paper = adapts is not None or "injector" in config
    told = bool(config.get("reads_states")) or "speculators_model_type" in config
    told = told or not config.keys().isdisjoint(("target_tap_layers", "draft_layers"))
    reads_states = of_paper or told or any((folder / name).is_file() for name in offered("reader of states"))
    metadata = _metadata(name, target, adapts, recipe, benchmarks)
    if not of_paper:
        metadata.tags = ["speculative-decoding"]
    lossy = _lossy(folder)
    limits = _limits(target, of_paper, bool(lossy))[0 if reads_states else 1 :]
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        MARK,
        f"# {name.rsplit('/', 1)[-1]}",
        _what_it_is(folder, config, target, adapts) if of_paper else _briefly(config, reads_states),
        _use(name, target, adapts, config.get("auto_map"), recipe.get("adapter_name")),
        "## Figures\n\n" + figures_section(figures["training"], benchmarks, name, _is_from_scratch(recipe)),
        *(f"![{_CAPTIONS[picture]}]({picture})" for picture in PICTURES if (folder / picture).is_file()),
        "## Training\n\n" + _training(recipe),
        lossy,
        "## Limits\n\n" + "\n".join(f"- {line}" for line in [*limits, *recipe.get("limits", [])]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(
    name: str, target: str, adapts: str | None, recipe: Mapping[str, Any], benchmarks: Sequence[Any]
) -> ModelCardData:
    """The Hub's metadata. No `pipeline_tag`, and an own library: a drafter alone generates no text."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=settings.get("prompts") or "prompts",
            dataset_name=settings.get("prompts") or "prompts",
            metric_type=metric,
            metric_name=f"{metric} ({', '.join([variant, *circumstances(settings)])})",
            metric_value=round(row[metric], 3),
        )
        for benchmark in benchmarks
        for settings in [benchmark["settings"]]
        for variant, row in benchmark["summary"].items()
        if variant in benchmark["ours"]
        for metric in (("acceptance_length",) if is_chain(variant) else ("tau", "speed_up"))
        if row.get(metric) is not None
    ]
    bases = [each for each in (adapts, target) if each is not None and each.count("/") == 1]  # names of the Hub
    return ModelCardData(
        base_model=bases[0] if bases else None,
        library_name="hf_hsdraft",
        license=recipe.get("license"),
        language=recipe.get("language"),
        datasets=recipe.get("datasets"),
        tags=["speculative-decoding", "hsdraft", f"arxiv:{PAPER}"],
        model_name=name.rsplit("/", 1)[-1] if results else None,
        eval_results=results or None,
        ignore_metadata_errors=False,
    )


def circumstances(settings: Mapping[str, Any]) -> list[str]:
    """What distinguishes measurements of one variant."""
    drawn = [f"temperature {settings['temperature']}"] if settings.get("temperature") else []
    drawn += [f"top-k {top_k}"] if drawn and (top_k := settings.get("top_k")) is not None else []
    return [settings["dtype"], f"{settings['max_new_tokens']} tokens", *drawn]


def _what_it_is(folder: Path, config: Mapping[str, Any], target: str, adapts: str | None) -> str:
    shown = code(target) if target else "a target that is not named"
    if adapts is not None:
        return f"An adapter (LoRA) of the drafter {code(adapts)}, for {shown}."
    text = (
        f"A hidden-state drafter for {shown}, for speculative decoding. Pass it to `generate()`, and the model emits "
        "the same tokens in fewer forwards. The drafter reads hidden states of the model, rolls its state forward "
        "without tokens, and proposes a tree of continuations. One forward of the model verifies the tree, and rejects "
        "what the model would not emit."
    )
    paper = (
        f"The method is [Make Every Draft Count](https://arxiv.org/abs/{PAPER}) (arXiv:{PAPER}), with one "
        "change: the drafter also reads the accepted tokens."
    )
    parameters, size = parameters_and_bytes(folder)
    window = config.get("sliding_window")
    options = {**config, **read_document(folder / OPTIONS)}
    depth = options.get("num_assistant_tokens") or config.get("num_draft_steps")
    rows = {
        "parameters": f"{parameters / 1e6:.1f}M, {size / 1e6:.1f} MB",
        "target": " at revision ".join(filter(None, [shown, config.get("target_revision", "")])),
        "its hidden size, layers, vocabulary": ", ".join(
            f"{config.get(field, '?'):,}" if isinstance(config.get(field), int) else "?"
            for field in ("target_hidden_size", "target_num_hidden_layers", "vocab_size")
        ),
        "digest of its tokenizer": config.get("target_tokenizer_hash") or "not recorded",
        "reads hidden states": ", ".join(map(str, config.get("target_tap_layers", []))),
        "trunk": trunk_in_words(config),
        "attends to": f"the last {window:,} positions" if isinstance(window, int) else "all positions",
        "draft": f"{depth} deep, {options.get('tree_size')} nodes",
        "draft vocabulary": f"{config.get('draft_vocab_size', 0):,} tokens",
        "format": f"{config.get('format_version', 1)}",
    }
    return "\n\n".join([text, paper, table(["", ""], rows.items())])


def trunk_in_words(config: Mapping[str, Any]) -> str:
    """Returns how many layers of a hidden-state drafter read the text and roll out, and what alternates by step.

    Fields of `config` from earlier versions may be missing.
    """
    layers, modules = config.get("num_hidden_layers", 1), config.get("num_step_modules", 1)
    rolled = config.get("num_roll_layers") or layers
    text = f"{layers} layers for the text, {rolled} for the roll-out" if rolled != layers else f"layers: {layers}"
    return text if modules == 1 else f"{text}; sets of parameters by step: {modules}"


def _briefly(config: Mapping[str, Any], reads_states: bool) -> str:
    """Describes a drafter of another family."""
    reads = "It reads hidden states of the model. " if reads_states else ""
    family = config.get("speculators_model_type") or config.get("model_type")
    return (
        f"A drafter of the family {code(str(family))}, for speculative decoding. Pass it to `generate()`, and the "
        f"model emits the same tokens in fewer forwards. {reads}Drafted tokens that the model "
        "would not emit are rejected."
    )


def _use(name: str, target: str, adapts: str | None, auto_map: Any, adapter: str | None) -> str:
    """How to load a drafter, or an adapter in the folder `adapter`; also by code, where `auto_map` names some."""
    quoted, of_target, base = (json.dumps(text) for text in (name, target or "target", adapts or name))
    model = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({of_target})
model = AutoModelForCausalLM.from_pretrained({of_target})
inputs = tokenizer("Once upon a time", return_tensors="pt")
```"""
    installation = "pip install .  # in a checkout of the package hf_hsdraft"
    package = f"from hf_hsdraft import AutoDrafter\n\ndrafter = AutoDrafter.from_pretrained({base}, dtype=model.dtype)"
    call = "out = model.generate(**inputs, assistant_model=drafter)"
    if adapts is not None:
        named = f", adapter_name={json.dumps(adapter)}" if adapter else ""
        adapted = _python(package, f"drafter.load_adapter({quoted}{named})", call)
        return f"## Use\n\n{_bash(installation)}\n\n{model}\n\n{adapted}"
    installed, alone = "Where the package `hf_hsdraft` is installed", stands_alone(auto_map)
    parts = [
        "## Use",
        model,
        installed
        + ("" if alone or not auto_map else " and the module that registers this family is imported")
        + " (no code of this repository is run):",
        _bash(installation),
        _python(package, call),
    ]
    if not auto_map:
        return "\n\n".join(parts)
    load = f"drafter = AutoModel.from_pretrained({quoted}, dtype=model.dtype, trust_remote_code=True)"
    recipe = f"out = model.generate(**inputs, custom_generate={quoted}, trust_remote_code=True)"
    parts += [
        "Without it, with transformers and torch alone, by the code in this repository:"
        if alone
        else "Without that import, by the code in this repository and `hf_hsdraft`:",
        _python("from transformers import AutoModel\n", load, call),
        "The same in one call:",
        _python(recipe),
        "`trust_remote_code=True` runs the code of this repository: read it, and name the commit you have read by "
        "`revision=`.",
    ]
    return "\n\n".join(parts)


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _bash(*lines: str) -> str:
    return "\n".join(["```bash", *lines, "```"])


def _is_from_scratch(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe says how the drafter was trained, and names no drafter that training started from."""
    started = any(title.endswith("started from") for title in recipe["training"])
    started = started or any("--init-from" in command for command in recipe.get("commands", []))
    return bool(recipe["training"]) and not started


def _renamed(text: str) -> str:
    """Replaces names of commands in recipes of earlier versions."""
    return _EARLIER.sub(lambda match: f"hsdraft {_GROUPS[match[1]]} {match[1]}", text)


def _training(recipe: Mapping[str, Any]) -> str:
    if not recipe.get("training"):
        return "No recipe is recorded."
    changed = "The weights were changed after this training." if recipe["changed_since"] else ""
    blocks = [changed] * bool(changed) + [table(["", ""], recipe["training"].items())]
    if recipe.get("commands"):
        blocks.append(_bash(*map(_renamed, recipe["commands"])))
    blocks += map(_renamed, recipe.get("notes", []))
    return "\n\n".join(blocks)


def _lossy(folder: Path) -> str:
    """The section on what the folder holds for lossy verification, or an empty string."""
    rule, parts = read_document(folder / OPTIONS).get("verification"), []
    if is_lossy(rule):
        parts.append(
            f"The saved options ask for `verification={rule!r}`, which may change the text. A loaded drafter verifies "
            f"exactly until you set `drafter.generation_config.verification = {rule!r}`."
        )
    parts += [paragraph for each in rules_learned_in(folder) for paragraph in each.described(folder)]
    return "\n\n".join(["## Lossy verification", *parts]) if parts else ""


def _limits(target: str, warns: bool, lossy: bool) -> list[str]:
    warning = ", and `generate()` warns with what it measured" if warns else ""
    unless = ", unless a lossy rule of verification is set" if lossy else ""
    return [
        f"It was trained for the weights of {code(target) if target else 'its target'}. A fine-tuned model accepts "
        f"fewer drafts{warning}; the text is still the model's own{unless}.",
        "In half precision, a forward over a tree rounds differently from one over a single token. Where the model's "
        "top two tokens nearly tie, the outputs can diverge. In float32 they are the same.",
    ]


def parameters_and_bytes(folder: Path) -> tuple[int, int]:
    """Numbers of parameters and bytes of the weights in a folder. Raises an OSError if there are none."""
    files = weight_files(folder)
    parameters = sum(math.prod(shape) for path in files for shape, _ in header(path).values())
    return parameters, sum(path.stat().st_size for path in files)


def is_generated(card: Path) -> bool:
    """Whether a card was generated, and may be generated again."""
    text = card.read_text(encoding="utf-8", errors="replace")
    return MARK in text or _OLD_MARK in text
