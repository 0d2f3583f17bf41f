"""The card of a training run: what was trained on what, what was measured, and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..configuration_hsdraft import HSDraftConfig
from .files import write_complete


def write_card(
    folder: Path,
    config: HSDraftConfig,
    recipe: Mapping[str, Any],
    history: Sequence[Mapping[str, float]],
    pictures: Sequence[Path],
    adapts: str | None = None,
) -> None:
    """Writes `README.md` beside a trained drafter, unless there is one that somebody wrote.

    Args:
        recipe: lines of the training table, by name.
        history: the trainer's log; its last evaluation gives the figures.
        pictures: PNG files in `folder`.
        adapts: name of the drafter that this is a LoRA adapter of.
    """
    path = folder / "README.md"
    if path.exists() and _MARK not in path.read_text(encoding="utf-8"):
        return
    text = render_card(folder.resolve().name, config, recipe, history, pictures, adapts)
    write_complete(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


_MARK = "<!-- written by hsdraft train -->"
_TITLES = {
    "learning_curves": "Loss and tau over the steps",
    "acceptance": "Training accuracy and acceptance while decoding, by depth",
    "calibration": "How often a first choice is right, by how sure the drafter is of it",
}


def render_card(
    name: str,
    config: HSDraftConfig,
    recipe: Mapping[str, Any],
    history: Sequence[Mapping[str, float]],
    pictures: Sequence[Path],
    adapts: str | None = None,
) -> str:
    """The text of the card; see `write_card`."""
    last: Mapping[str, float] = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    target = config.target_name or "its target"
    base = f"base_model: {config.target_name}\n" if config.target_name.count("/") == 1 else ""
    training = "\n".join(f"| {title} | {value} |" for title, value in recipe.items())
    depths = range(1, config.num_draft_steps + 1)
    table = "\n".join(
        f"| {depth} | {_figure(last, f'eval_accuracy_{depth}')} | {_figure(last, f'eval_acceptance_{depth}')} |"
        for depth in depths
    )
    load = f'drafter = HSDrafter.from_pretrained("{name if adapts is None else adapts}")'
    load += "" if adapts is None else f'\ndrafter.load_adapter("{name}")'
    shown = "\n\n".join(f"![{_TITLES.get(path.stem, path.stem)}]({path.name})" for path in pictures)
    return f"""---
{base}library_name: transformers
tags:
- speculative-decoding
- hsdraft
---
{_MARK}

# {name}

A hidden-state drafter for `{target}`: with it, `generate()` emits the same tokens in fewer forwards of the target.

```python
from hf_hsdraft import HSDrafter

{load}
out = model.generate(**inputs, assistant_model=drafter)
```

## Training

| | |
|---|---|
{training}

## Measured on held-out conversations

tau {_figure(last, "eval_tau")} (tokens emitted per target forward, bonus included, greedy, by generating); loss
{_figure(last, "eval_loss")} nats; training and decoding agree to {_figure(last, "eval_parity")} (total variation, worst
depth). Held out from this run; a drafter that this one started from may have seen them.

| depth | first choice right, true tokens given | accepted while decoding, of the rounds that got there |
|---|---|---|
{table}

{shown}
"""


def _figure(entry: Mapping[str, float], name: str) -> str:
    value = entry.get(name)
    return "not measured" if value is None or value != value else f"{value:.4g}"
