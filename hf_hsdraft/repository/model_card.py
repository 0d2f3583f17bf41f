"""The card of a drafter, made of the files beside it. What was not measured is a visible gap, never a number."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from safetensors import safe_open

from ..common.checks import public_name
from .drafter_files import CARD, CONFIG, FIGURES, OPTIONS, PICTURES, RECIPE, read_json, weight_files
from .publication import MARK, is_generated

GAP = "not measured"
_CAPTIONS = {
    "speed_up.png": "Speed-up and tau by category",
    "learning_curves.png": "Loss and tau over the steps of training",
    "acceptance.png": "Training accuracy and acceptance while decoding, by depth",
    "calibration.png": "How often a first choice is right, by how sure the drafter is of it",
}


def read_recipe(folder: Path) -> dict[str, Any]:
    """How a drafter was trained, by its folder; what is malformed is left out."""
    recipe = _read(folder / RECIPE)
    lists = {name: recipe.get(name) for name in ("limits", "notes", "commands", "language", "datasets")}
    texts = {name: recipe[name] for name in ("license", "adapts", "target") if isinstance(recipe.get(name), str)}
    training = recipe.get("training")
    return {
        **{name: [value] if isinstance(value, str) else value for name, value in lists.items() if _are_texts(value)},
        **texts,
        "training": training if isinstance(training, dict) else {},
        "changed_since": bool(recipe.get("changed_since")),
    }


def read_figures(folder: Path) -> dict[str, Any]:
    """What was measured of a drafter, by its folder; what is malformed counts as not measured."""
    figures = _read(folder / FIGURES)
    if "history" in figures:  # as format 1 has it
        figures = {"training": figures}
    benchmarks, training = figures.get("benchmarks"), figures.get("training")
    history = training.get("history") if isinstance(training, dict) else None
    whole = isinstance(history, list) and all(isinstance(entry, dict) for entry in history)
    return {
        "benchmarks": [each for each in benchmarks if is_benchmark(each)] if isinstance(benchmarks, list) else [],
        "training": training if whole else None,
    }


def is_benchmark(entry: Any) -> bool:
    """Whether an entry of `figures.json` has all that a card shows of it."""
    try:
        settings, rows = entry["settings"], entry["summary"]
        groups = [entry["by_category"].get(name, {}) for name in rows]
        numbers = [row[metric] for row in rows.values() for metric in ("tau", "speed_up", "tokens_per_second")]
        numbers += [row[metric] for group in groups for row in group.values() for metric in ("tau", "speed_up")]
        texts = [settings[name] for name in ("dtype", "device", "torch", "transformers", "processor", "command")]
        counts = [settings[name] for name in ("questions", "max_new_tokens", "threads")]
        counts += [row["identical"] for row in rows.values() if row["identical"] is not None]
        ours = entry["ours"]
        return (
            all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(count, int) for count in counts)
            and all(isinstance(settings.get(name, ""), str) for name in ("prompts", "target"))
            and isinstance(ours, list)
            and bool(ours)
            and all(name in rows for name in ours)
        )
    except (KeyError, TypeError, AttributeError, OverflowError):
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def write_card(folder: Path, name: str) -> None:
    """Writes `README.md` into a drafter's folder (or an adapter's), unless there is one that somebody wrote.

    Args:
        name: Name of the drafter, as the card's examples load it.
    """
    path = folder / CARD
    if path.is_file() and not is_generated(path):
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(render_card(folder, name), encoding="utf-8")
    partial.replace(path)


def render_card(folder: Path, name: str) -> str:
    """The text of the card; see `write_card`."""
    config, recipe, figures = _read(folder / CONFIG), read_recipe(folder), read_figures(folder)
    benchmarks = figures["benchmarks"]
    base = _read(folder / "adapter_config.json").get("base_model_name_or_path")
    adapts = None if config else recipe.get("adapts") or public_name(str(base or "its drafter"))
    target = config.get("target_name") or recipe.get("target") or ""
    parts = [
        f"---\n{_metadata(name, target, recipe, benchmarks).to_yaml()}\n---",
        MARK,
        f"# {name.rsplit('/', 1)[-1]}",
        _what_it_is(folder, config, target, adapts),
        _use(name, target, adapts),
        "## Figures\n\n" + _figures(figures["training"], benchmarks, name),
        *(f"![{_CAPTIONS[picture]}]({picture})" for picture in PICTURES if (folder / picture).is_file()),
        "## Training\n\n" + _training(recipe),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in [*_limits(target), *recipe.get("limits", [])]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(name: str, target: str, recipe: Mapping[str, Any], benchmarks: Sequence[Any]) -> ModelCardData:
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=settings.get("prompts") or "prompts",
            dataset_name=settings.get("prompts") or "prompts",
            metric_type=metric,
            metric_name=f"{metric} ({variant}, {settings['dtype']}, {settings['max_new_tokens']} tokens)",
            metric_value=round(row[metric], 3),
        )
        for benchmark in benchmarks
        for settings in [benchmark["settings"]]
        for variant, row in benchmark["summary"].items()
        if variant in benchmark["ours"]
        for metric in ("tau", "speed_up")
    ]
    on_the_hub = target.count("/") == 1
    return ModelCardData(
        base_model=target if on_the_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=recipe.get("license"),
        language=recipe.get("language"),
        datasets=recipe.get("datasets"),
        tags=["speculative-decoding", "hsdraft"],
        model_name=name.rsplit("/", 1)[-1] if results else None,
        eval_results=results or None,
        ignore_metadata_errors=False,
    )


def _what_it_is(folder: Path, config: Mapping[str, Any], target: str, adapts: str | None) -> str:
    shown = _code(target) if target else "a target that is not named"
    if adapts is not None:
        return f"An adapter (LoRA) of the drafter {_code(adapts)}, for {shown}."
    text = (
        f"A hidden-state drafter for {shown}, for speculative decoding: given to `generate()`, it lets the model emit "
        "the same tokens in fewer forwards. It reads hidden states of the model, rolls its own forward without "
        "tokens, and proposes a tree of continuations that one forward of the model verifies; what the model would "
        "not have said is not emitted."
    )
    parameters, size = parameters_and_bytes(folder)
    window = config.get("sliding_window")
    options = {**config, **_read(folder / OPTIONS)}
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
        "attends to": f"the last {window:,} positions" if isinstance(window, int) else "all positions",
        "draft": f"{depth} deep, {options.get('tree_size')} nodes",
        "draft vocabulary": f"{config.get('draft_vocab_size', 0):,} tokens",
        "format": f"{config.get('format_version', 1)}",
    }
    return text + "\n\n" + _table(["", ""], rows.items())


def _use(name: str, target: str, adapts: str | None) -> str:
    quoted, of_target, base = (json.dumps(text) for text in (name, target or "target", adapts or name))
    model = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({of_target})
model = AutoModelForCausalLM.from_pretrained({of_target})
inputs = tokenizer("Once upon a time", return_tensors="pt")
```"""
    package = f"drafter = HSDrafter.from_pretrained({base}, dtype=model.dtype)"
    if adapts is not None:
        load = f"{package}\ndrafter.load_adapter({quoted})"
        return f"## Use\n\n{model}\n\n{_python(_IMPORT, load, _CALL)}"
    remote = f"drafter = AutoModel.from_pretrained({quoted}, dtype=model.dtype, trust_remote_code=True)"
    recipe = f"out = model.generate(**inputs, custom_generate={quoted}, trust_remote_code=True)"
    return "\n\n".join(
        [
            "## Use",
            model,
            "Where the package `hf_hsdraft` is installed (no code of this repository is run):",
            _python(_IMPORT, package, _CALL),
            "Without it, with transformers and torch alone, by the code in this repository:",
            _python("from transformers import AutoModel", remote, _CALL),
            "The same in one call:",
            _python(recipe),
            "`trust_remote_code=True` runs the code of this repository: read it, and name the commit you have read by "
            "`revision=`.",
        ]
    )


_IMPORT = "from hf_hsdraft import HSDrafter"
_CALL = "out = model.generate(**inputs, assistant_model=drafter)"


def _python(*lines: str) -> str:
    imports = [line for line in lines if line.startswith("from ")]
    return "\n".join(["```python", *imports, *([""] if imports else []), *lines[len(imports) :], "```"])


def _code(text: str) -> str:
    return f"`{_cell(text).replace('`', '')}`"


def _figures(training: Mapping[str, Any] | None, benchmarks: Sequence[Mapping[str, Any]], name: str) -> str:
    blocks = [
        "tau: tokens emitted per target forward, bonus included (plain decoding: 1). speed-up: tokens/s over plain "
        "`generate()`, same settings and process, alternating. identical: texts equal to those of plain `generate()`."
    ]
    blocks += [_benchmark(benchmark, name) for benchmark in benchmarks] or [f"Speed: {GAP}."]
    if training is not None:
        blocks.append(_held_out(training))
    return "\n\n".join(blocks)


def _benchmark(benchmark: Mapping[str, Any], drafter: str) -> str:
    settings, ours = benchmark["settings"], benchmark["ours"]
    rows = [
        [
            _shape(name, settings) if name in ours else f"{name} (for comparison)",
            f"{row['tau']:.2f}",
            f"{row['speed_up']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            "no comparison" if row["identical"] is None else f"{row['identical']} of {settings['questions']}",
        ]
        for name, row in benchmark["summary"].items()
    ]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"
    how = (
        f"**{settings['dtype']}, {settings['max_new_tokens']} new tokens.** {settings['questions']} prompts of "
        f"{_cell(settings.get('prompts') or 'a file that is not named')}, {_drawn(settings)}, "
        f"target {_cell(settings.get('target') or 'not named')}; {_cell(settings['processor'])}, "
        f"{threads}, device {settings['device']}; torch {settings['torch']}, transformers {settings['transformers']}."
    )
    table = _table(["", "tau", "speed-up", "tokens/s", "identical"], rows)
    best = benchmark["by_category"].get(ours[0], {})
    shown = ", ".join(f"{name or 'none'} {row['tau']:.2f} ({row['speed_up']:.2f})" for name, row in best.items())
    by_category = f"\n\ntau (speed-up) of {_code(ours[0])} by category: {_cell(shown)}." if shown else ""
    return f"{how}\n\n{table}{by_category}\n\n```bash\n{_cell(settings['command'])} --drafter {drafter}\n```"


def _drawn(settings: Mapping[str, Any]) -> str:
    if not settings.get("do_sample"):
        return "greedy decoding (which draws nothing, so there is no seed)"
    return f"sampling at temperature {_cell(settings.get('temperature'))}, seed {_cell(settings.get('seed'))}"


def _shape(variant: str, settings: Mapping[str, Any]) -> str:
    """A variant's name with what it stands for."""
    try:
        options = settings["variants"][variant]
        nodes, depth, width = (options[name] for name in ("tree_size", "num_assistant_tokens", "beam_width"))
    except (KeyError, TypeError):
        return variant
    return f"{variant} ({depth} deep)" if width == 1 else f"{variant} ({nodes} nodes, {depth} deep)"


def _held_out(training: Mapping[str, Any]) -> str:
    history = training["history"]
    last: Mapping[str, Any] = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    depths = sorted(int(key.rpartition("_")[2]) for key in last if re.fullmatch(r"eval_accuracy_\d{1,3}", key))
    table = _table(
        ["depth", "first choice right, true tokens given", "some node of the tree accepted, where all above were"],
        [
            (f"{depth}", _figure(last, f"eval_accuracy_{depth}"), _figure(last, f"eval_acceptance_{depth}"))
            for depth in depths
        ],
    )
    sizes = training.get("held_out")
    size = f" ({_cell(sizes)})" if isinstance(sizes, str) else ""
    return (
        f"**Held-out conversations of the training run{size}.** tau {_figure(last, 'eval_tau')} (greedy, by "
        f"generating); loss {_figure(last, 'eval_loss')} nats. What training computes and what decoding uses differ by "
        f"{_figure(last, 'eval_parity')} at most (total variation of the distributions, 0 is none). A drafter that "
        f"this run started from may have seen them.\n\n{table}"
    )


def _training(recipe: Mapping[str, Any]) -> str:
    if not recipe.get("training"):
        return "No recipe is recorded."
    changed = "The weights were changed after this." if recipe["changed_since"] else ""
    blocks = [changed] * bool(changed) + [_table(["", ""], recipe["training"].items())]
    if recipe.get("commands"):
        blocks.append("```bash\n" + "\n".join(recipe["commands"]) + "\n```")
    blocks += recipe.get("notes", [])
    return "\n\n".join(blocks)


def _limits(target: str) -> list[str]:
    return [
        f"It belongs to the weights of {_code(target) if target else 'its target'}. For a fine-tuned one it drafts "
        "less, and `generate()` warns with what it measured; the text is always the model's own.",
        "In half precision a forward over a tree rounds otherwise than one over a token; where the model's two best "
        "tokens are closer than that, texts can part. In float32 they are the same.",
    ]


def parameters_and_bytes(folder: Path) -> tuple[int, int]:
    """Parameters and bytes of the weights in a folder.

    Raises:
        OSError: There are none.
    """
    files, parameters = weight_files(folder), 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return parameters, sum(path.stat().st_size for path in files)


def _figure(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) and abs(value) < 1e300 else GAP  # nor if it is no number


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
