"""The card of a drafter, made of the files beside it. What was not measured is a visible gap, never a number."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from safetensors import safe_open

from .drafter_files import read_json, weight_files

RECIPE, FIGURES = "training_recipe.json", "figures.json"
GAP = "not measured"
_MARK = "<!-- written by hsdraft from the files beside it; remove this line to keep changes of your own -->"
_OLD_MARK = "<!-- written by hsdraft train -->"
_CAPTIONS = {
    "speed_up": "Speed-up and tau by category",
    "learning_curves": "Loss and tau over the steps of training",
    "acceptance": "Training accuracy and acceptance while decoding, by depth",
    "calibration": "How often a first choice is right, by how sure the drafter is of it",
}


def is_generated(path: Path) -> bool:
    """Whether a card was written by this module, and may be written anew."""
    text = path.read_text(encoding="utf-8")
    return _MARK in text or _OLD_MARK in text


def write_card(folder: Path, name: str) -> None:
    """Writes `README.md` into a drafter's folder (or an adapter's), unless there is one that somebody wrote.

    Args:
        name: of the drafter, as the card's examples shall load it.
    """
    path = folder / "README.md"
    if path.is_file() and not is_generated(path):
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(render_card(folder, name), encoding="utf-8")
    partial.replace(path)


def render_card(folder: Path, name: str) -> str:
    """The text of the card; see `write_card`."""
    config, recipe, figures = (
        read_json(folder / file) if (folder / file).is_file() else {} for file in ("config.json", RECIPE, FIGURES)
    )
    benchmarks = figures.get("benchmarks", [])
    adapts = recipe.get("adapts")
    target = config.get("target_name") or recipe.get("target") or ""
    parts = [
        f"---\n{_metadata(name, target, recipe, benchmarks).to_yaml()}\n---",
        _MARK,
        f"# {name.rsplit('/', 1)[-1]}",
        _what_it_is(folder, config, target, adapts),
        _use(name, target, adapts),
        "## Figures\n\n" + _figures(figures, config, benchmarks),
        *(f"![{_CAPTIONS[path.stem]}]({path.name})" for path in _pictures(folder)),
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
    shown = f"`{target}`" if target else "a target that is not named"
    if adapts is not None:
        return f"An adapter (LoRA) of the drafter `{adapts}`, for {shown}."
    text = (
        f"A hidden-state drafter for {shown}: with it, `generate()` emits the same tokens in fewer forwards of the "
        "model. It reads hidden states of the model, rolls its own forward without tokens, and proposes a tree of "
        "continuations that one forward of the model verifies; what the model would not have said is not emitted."
    )
    parameters, size = parameters_and_bytes(folder)
    rows = {
        "parameters": f"{parameters / 1e6:.1f}M, {size / 1e6:.1f} MB",
        "target": " at revision ".join(filter(None, [shown, config.get("target_revision", "")])),
        "its hidden size, layers, vocabulary": ", ".join(
            f"{config.get(field, '?'):,}" if isinstance(config.get(field), int) else "?"
            for field in ("target_hidden_size", "target_num_hidden_layers", "vocab_size")
        ),
        "digest of its tokenizer": config.get("target_tokenizer_hash") or "not recorded",
        "reads hidden states": ", ".join(map(str, config.get("target_tap_layers", []))),
        "draft": f"{config.get('num_draft_steps')} deep, {config.get('tree_size')} nodes",
        "draft vocabulary": f"{config.get('draft_vocab_size', 0):,} tokens",
        "format": f"{config.get('format_version', 1)}",
    }
    return text + "\n\n" + _table(["", ""], rows.items())


def _use(name: str, target: str, adapts: str | None) -> str:
    model = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target or "target"}")
model = AutoModelForCausalLM.from_pretrained("{target or "target"}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
```"""
    package = f'drafter = HSDrafter.from_pretrained("{adapts or name}", dtype=model.dtype)'
    if adapts is not None:
        load = f'{package}\ndrafter.load_adapter("{name}")'
        return f"## Use\n\n{model}\n\n{_python(_IMPORT, load, _CALL)}"
    remote = f'drafter = AutoModel.from_pretrained("{name}", dtype=model.dtype, trust_remote_code=True)'
    recipe = f'out = model.generate(**inputs, custom_generate="{name}", trust_remote_code=True)'
    return "\n\n".join(
        [
            "## Use",
            model,
            "With the package (no code of this repository is run):",
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


def _figures(figures: Mapping[str, Any], config: Mapping[str, Any], benchmarks: Sequence[Mapping[str, Any]]) -> str:
    blocks = [
        "tau: tokens emitted per target forward, bonus included (plain decoding: 1). speed-up: tokens/s over plain "
        "`generate()`, same settings and process, alternating. identical: texts equal to those of plain `generate()`."
    ]
    blocks += [_benchmark(benchmark) for benchmark in benchmarks]
    if not benchmarks:
        blocks.append(f"Speed: {GAP}. `hsdraft bench --json bench.json` measures it, `hsdraft card` enters it here.")
    training = figures.get("training")
    if training is not None:
        blocks.append(_held_out(training, config))
    return "\n\n".join(blocks)


def _benchmark(benchmark: Mapping[str, Any]) -> str:
    settings, ours = benchmark["settings"], benchmark["ours"]
    rows = [
        [
            name if name in ours else f"{name} (for comparison)",
            f"{row['tau']:.2f}",
            f"{row['speed_up']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['identical']} of {settings['questions']}",
        ]
        for name, row in benchmark["summary"].items()
    ]
    how = (
        f"**{settings['dtype']}, {settings['max_new_tokens']} new tokens.** {settings['questions']} prompts of "
        f"{settings.get('prompts') or 'a file that is not named'}, greedy decoding (no seed), target "
        f"{settings.get('target') or 'not named'}; {settings.get('processor')}, {settings.get('threads')} threads, "
        f"device {settings['device']}; torch {settings['torch']}, transformers {settings['transformers']}."
    )
    table = _table(["", "tau", "speed-up", "tokens/s", "identical"], rows)
    best = benchmark["by_category"].get(ours[0], {})
    shown = ", ".join(f"{name or 'none'} {row['tau']:.2f} ({row['speed_up']:.2f})" for name, row in best.items())
    by_category = f"\n\ntau (speed-up) of `{ours[0]}` by category: {shown}." if shown else ""
    return f"{how}\n\n{table}{by_category}\n\n```bash\n{settings['command']}\n```"


def _held_out(training: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    history = training.get("history", [])
    last: Mapping[str, Any] = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    depths = range(1, config.get("num_draft_steps", 0) + 1)
    table = _table(
        ["depth", "first choice right, true tokens given", "accepted while decoding, of the rounds that got there"],
        [
            (f"{depth}", _figure(last, f"eval_accuracy_{depth}"), _figure(last, f"eval_acceptance_{depth}"))
            for depth in depths
        ],
    )
    return (
        f"**Held-out conversations of the training run.** tau {_figure(last, 'eval_tau')} (greedy, by generating); "
        f"loss {_figure(last, 'eval_loss')} nats; training and decoding agree to {_figure(last, 'eval_parity')} (total "
        f"variation, worst depth). A drafter that this run started from may have seen them.\n\n{table}"
    )


def _training(recipe: Mapping[str, Any]) -> str:
    if not recipe.get("training"):
        return "No recipe is recorded."
    blocks = [_table(["", ""], recipe["training"].items())]
    if recipe.get("commands"):
        blocks.append("```bash\n" + "\n".join(recipe["commands"]) + "\n```")
    blocks += recipe.get("notes", [])
    return "\n\n".join(blocks)


def _limits(target: str) -> list[str]:
    return [
        f"It belongs to the weights of {f'`{target}`' if target else 'its target'}. For a fine-tuned one it drafts "
        "less, and `generate()` warns with what it measured; the text is always the model's own.",
        "In half precision a forward over a tree rounds otherwise than one over a token; where the model's two best "
        "tokens are closer than that, texts can part. In float32 they are the same.",
    ]


def parameters_and_bytes(folder: Path) -> tuple[int, int]:
    """Parameters and bytes of the weights in a folder.

    Raises:
        OSError: there are none.
    """
    files, parameters = weight_files(folder), 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return parameters, sum(path.stat().st_size for path in files)


def _pictures(folder: Path) -> list[Path]:
    return [folder / f"{name}.png" for name in _CAPTIONS if (folder / f"{name}.png").is_file()]


def _figure(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return GAP if not isinstance(value, int | float) or math.isnan(value) else f"{value:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
