"""A drafter's card, made of the files beside it. What was not measured is a visible gap, never a number."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..core.checks import public_name
from ..core.methods import offered
from ..verify.registry import is_lossy, rules_learned_in
from .checkpoint import target_of
from .code_files import stands_alone
from .drafter_files import CARD, CONFIG, FIGURES, OPTIONS, PICTURES, RECIPE, header, read_document, weight_files

GAP = "not measured"
MARK = "<!-- written by hsdraft from the files beside it; remove this line to keep changes of your own -->"
_OLD_MARK = "<!-- written by hsdraft train -->"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
PAPER = "2602.21224"  # arXiv
_GROUPS = {"average": "make", "prune": "make", "overlap": "data", "coverage": "data"}  # of commands, by earlier names
_EARLIER = re.compile(rf"hsdraft ({'|'.join(_GROUPS)})\b")
_CAPTIONS = {
    "speed_up.png": "Speed-up and tau by category",
    "learning_curves.png": "Loss and tau by training step",
    "acceptance.png": "Accuracy in training and acceptance in decoding, by depth",
    "calibration.png": "Accuracy of the first choice by the drafter's confidence",
}


def is_chain(variant: str) -> bool:
    """Whether a variant of `hsdraft bench` drafts only chains of a fixed length."""
    return chain_length(variant) > 0


def chain_length(variant: str) -> int:
    """The length of the chains that a variant drafts; 0 if it drafts anything else."""
    match = re.fullmatch(r"(?:.*: )?chain(\d{1,2})", variant)
    return int(match[1]) if match else 0


def read_figures(folder: Path) -> dict[str, Any]:
    """Measurements of the drafter in a folder; malformed ones count as not measured."""
    figures = read_document(folder / FIGURES)
    if "history" in figures:  # format 1
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
        numbers += [row["acceptance_length"] for row in rows.values() if row.get("acceptance_length") is not None]
        numbers += [row[metric] for group in groups for row in group.values() for metric in ("tau", "speed_up")]
        texts = [settings[name] for name in ("dtype", "device", "torch", "transformers", "processor", "command")]
        counts = [settings[name] for name in ("questions", "max_new_tokens", "threads")]
        counts += [row["identical"] for row in rows.values() if row["identical"] is not None]
        rounds = [row.values() for row in entry.get("round", {}).values()]
        numbers += [number for row in rounds for number in row]
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


def shown_benchmark(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """What a card shows of an entry of `figures.json`: its settings, and rows of speed and of chains."""
    settings, ours, summary = benchmark["settings"], benchmark["ours"], benchmark["summary"]
    trees = [variant for variant in ours if not is_chain(variant)]
    chains = sorted((variant for variant in ours if is_chain(variant)), key=chain_length)
    shown: dict[str, Any] = {"settings": settings, "trees": trees, "chains": chains}
    if trees:
        best = benchmark["by_category"].get(trees[0], {})
        shown["speed"] = [
            (
                _shape(name, settings) if name in ours else f"{name} (for comparison)",
                f"{row['tau']:.2f}",
                f"{row['speed_up']:.2f}",
                f"{row['tokens_per_second']:.1f}",
                "no comparison" if row["identical"] is None else f"{row['identical']} of {settings['questions']}",
            )
            for name, row in summary.items()
            if not is_chain(name)
        ]
        # Of a speed-up greater than tau, drafting can give at most tau.
        shares = {name: (summary[name]["tau"], summary[name]["speed_up"]) for name in trees}
        shown["shares"] = [
            f"{code(name)} at most {tau:.2f} of {up:.2f}" for name, (tau, up) in shares.items() if up > tau
        ]
        shown["by_category"] = [
            f"{name or 'none'} {row['tau']:.2f} ({row['speed_up']:.2f})" for name, row in best.items()
        ]
    if chains:
        shown |= {"lengths": _lengths(benchmark, chains), "depths": _depths(benchmark, chains[-1])}
    return shown


def _lengths(benchmark: Mapping[str, Any], chains: Sequence[str]) -> list[list[str]]:
    """Acceptance lengths of chains, shortest first, by category, below a line of titles."""
    groups = benchmark["by_category"]
    rows = [("all prompts", [benchmark["summary"][name] for name in chains])]
    categories = list(groups.get(chains[0], {}))
    if len(categories) > 1:
        rows += [(each or "none", [groups.get(name, {}).get(each, {}) for name in chains]) for each in categories]
    titles = ["acceptance length", *(f"k = {chain_length(name)}" for name in chains)]
    return [
        titles,
        *([title, *(shown_figure(row, "acceptance_length", ".2f") for row in found)] for title, found in rows),
    ]


def _depths(benchmark: Mapping[str, Any], chain: str) -> list[list[str]]:
    """The acceptance of each depth of a chain, below a line of titles."""
    shares, depths = benchmark["round"].get(chain, {}), range(1, chain_length(chain) + 1)
    reached = [shares.get(f"depth_{depth}", 0.0) for depth in depths]  # never accepted: absent
    after = [f"{one / before:.2f}" if before else GAP for before, one in itertools.pairwise([1.0, *reached])]
    return [
        ["drafted token", *map(str, depths)],
        ["accepted, share of all rounds", *(f"{each:.2f}" for each in reached)],
        ["accepted, if all before were", *after],
    ]


def _shape(variant: str, settings: Mapping[str, Any]) -> str:
    try:
        options = settings["variants"][variant]
        nodes, depth, width = (options[name] for name in ("tree_size", "num_assistant_tokens", "beam_width"))
    except (KeyError, TypeError):
        return variant
    lossy = ", lossy" if is_lossy(options.get("verification")) else ""
    return f"{variant} ({depth} deep{lossy})" if width == 1 else f"{variant} ({nodes} nodes, {depth} deep{lossy})"


def held_out(training: Mapping[str, Any]) -> dict[str, Any]:
    """What a card shows of the last evaluation on held-out conversations."""
    last: Mapping[str, Any] = next((entry for entry in reversed(training["history"]) if "eval_loss" in entry), {})
    depths = sorted(int(key.rpartition("_")[2]) for key in last if re.fullmatch(r"eval_accuracy_\d{1,3}", key))
    size = training.get("held_out")
    return {
        "size": size if isinstance(size, str) else "",
        "depths": [
            (f"{depth}", shown_figure(last, f"eval_accuracy_{depth}"), shown_figure(last, f"eval_acceptance_{depth}"))
            for depth in depths
        ],
        **{name: shown_figure(last, f"eval_{name}") for name in ("tau", "loss", "parity")},
    }


def shown_figure(entry: Mapping[str, Any], name: str, digits: str = ".4g") -> str:
    """The figure in this format, or that it was not measured."""
    value = entry.get(name)
    return f"{value:{digits}}" if isinstance(value, int | float) and abs(value) < 1e300 else GAP


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(each) for each in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value on one line, as it may stand in a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"


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
    """Writes `README.md` into a folder, unless there is a hand-written one; its examples load the drafter by `name`."""
    path = folder / CARD
    if path.is_file() and not is_generated(path):
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(render_card(folder, name), encoding="utf-8")
    partial.replace(path)


def render_card(folder: Path, name: str) -> str:
    """Returns the card of a drafter's or adapter's folder, by the template beside this file."""
    config, recipe, figures = read_document(folder / CONFIG), read_recipe(folder), read_figures(folder)
    benchmarks, training = figures["benchmarks"], figures["training"]
    base = read_document(folder / "adapter_config.json").get("base_model_name_or_path")
    adapts = None if config else recipe.get("adapts") or public_name(str(base or "its drafter"))
    target = config.get("target_name") or recipe.get("target") or target_of(config)[0]
    shown_target = code(target) if target else "a target that is not named"
    of_paper = adapts is not None or "injector" in config
    reads_states = of_paper or bool(config.get("reads_states")) or "speculators_model_type" in config
    reads_states = reads_states or not config.keys().isdisjoint(("target_tap_layers", "draft_layers"))
    reads_states = reads_states or any((folder / name).is_file() for name in offered("reader of states"))
    metadata = _metadata(name, target, adapts, recipe, benchmarks)
    if not of_paper:
        metadata.tags = ["speculative-decoding"]
    rule = read_document(folder / OPTIONS).get("verification")
    measured = [variant for benchmark in benchmarks for variant in benchmark["ours"]]
    shown_facts: dict[str, str] = {}
    if of_paper and adapts is None:
        parameters, size = parameters_and_bytes(folder)
        shown_facts = {"parameters": f"{parameters / 1e6:.1f}M, {size / 1e6:.1f} MB"}
        shown_facts |= facts(folder, {**config, "target_name": shown_target})
    of_text: dict[str, Any] = {
        "table": table, "cell": cell, "code": code, "quoted": json.dumps, "gap": GAP, "paper": PAPER, "mark": MARK,
        "name": name, "title": name.rsplit("/", 1)[-1], "target": target, "shown_target": shown_target,
        "adapts": adapts, "adapter_name": recipe.get("adapter_name"), "of_paper": of_paper,
    }  # fmt: skip
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        **of_text,
        reads_states=reads_states,
        family=str(config.get("speculators_model_type") or config.get("model_type")),
        facts=shown_facts,
        has_code=bool(config.get("auto_map")),
        alone=stands_alone(config.get("auto_map")),
        benchmarks=[shown_benchmark(each) for each in benchmarks],
        has_speed=not all(map(is_chain, measured)),
        has_chains=any(map(is_chain, measured)),
        held_out=None if training is None else held_out(training),
        from_scratch=_is_from_scratch(recipe),
        pictures={picture: _CAPTIONS[picture] for picture in PICTURES if (folder / picture).is_file()},
        recipe=recipe | {part: list(map(_renamed, recipe.get(part, []))) for part in ("commands", "notes")},
        lossy_rule=repr(rule) if is_lossy(rule) else "",
        lossy_parts=[paragraph for each in rules_learned_in(folder) for paragraph in each.described(folder)],
    )
    return str(card).rstrip("\n") + "\n"


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


def facts(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Facts of a hidden-state drafter and its target, by title, from its configuration and options."""
    window = config.get("sliding_window")
    options = {**config, **read_document(folder / OPTIONS)}
    depth = options.get("num_assistant_tokens") or config.get("num_draft_steps")
    return {
        "target": " at revision ".join(
            filter(None, [config.get("target_name") or "not named", config.get("target_revision")])
        ),
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


def trunk_in_words(config: Mapping[str, Any]) -> str:
    """Returns how many layers read the text and roll out, and what alternates by step; old fields may be missing."""
    layers, modules = config.get("num_hidden_layers", 1), config.get("num_step_modules", 1)
    rolled = config.get("num_roll_layers") or layers
    text = f"{layers} layers for the text, {rolled} for the roll-out" if rolled != layers else f"layers: {layers}"
    return text if modules == 1 else f"{text}; sets of parameters by step: {modules}"


def _is_from_scratch(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe says how the drafter was trained, and names no drafter that training started from."""
    started = any(title.endswith("started from") for title in recipe["training"])
    started = started or any("--init-from" in command for command in recipe.get("commands", []))
    return bool(recipe["training"]) and not started


def _renamed(text: str) -> str:
    """Replaces names of commands in recipes of earlier versions."""
    return _EARLIER.sub(lambda match: f"hsdraft {_GROUPS[match[1]]} {match[1]}", text)


def parameters_and_bytes(folder: Path) -> tuple[int, int]:
    """Numbers of parameters and bytes of the weights in a folder. Raises an OSError if there are none."""
    files = weight_files(folder)
    parameters = sum(math.prod(shape) for path in files for shape, _ in header(path).values())
    return parameters, sum(path.stat().st_size for path in files)


def is_generated(card: Path) -> bool:
    """Whether a card was generated, and may be generated again."""
    text = card.read_text(encoding="utf-8", errors="replace")
    return MARK in text or _OLD_MARK in text
