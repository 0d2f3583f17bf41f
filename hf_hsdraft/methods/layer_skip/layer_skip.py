"""Self-speculation with some of the target's layers skipped, and the search for these layers; nothing is trained.

Each list of layers is judged on texts that the target wrote, by its agreement a (share of tokens that the remaining
layers would choose too, given the text) and its cost c in forwards of the target. Chains of K drafted tokens emit
(1 - a^(K+1)) / (1 - a) tokens on average and take 1 + K c forwards; the best K counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig

from ...core.checks import are_ascending, demand, is_integer, printable, public_name
from ...core.kept import kept_with
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.plain_config import AnyTarget
from ...drafters.base.protocol import Call
from ...drafters.base.registry import register_drafter
from ...drafters.base.saved_drafter import WeightlessDrafter
from ...runtime.target_limits import decoder_layers, text_config
from ..distillation.layer_subset import layers_of, with_layers
from ..language_model.lm_drafter import CausalLMSession
from ..language_model.lm_texts import ability_of, shared_tokens
from ..published.target_copies import refuse_sharded


@dataclass(frozen=True)
class LayerSkipConfig(AnyTarget):
    """Which layers of which target are skipped; a ValueError if it has no such layers, or none would remain."""

    model_type: ClassVar[str] = "layer_skip"
    target_hidden_size: ClassVar[None] = None  # any

    skipped_layers: tuple[int, ...]  # ascending, from 0
    num_hidden_layers: int  # of the target
    target_name: str = ""  # for messages and cards

    def __post_init__(self) -> None:
        count, skipped = self.num_hidden_layers, self.skipped_layers
        demand(is_integer(count) and 1 <= count <= 4096, "num_hidden_layers", count, "expected 1 to 4096")
        valid = are_ascending(skipped, 0, count - 1) and len(skipped) < count
        wanted = f"expected ascending numbers from 0 to {count - 1}, each once and not all of them"
        demand(valid, "skipped_layers", list(skipped), wanted)

    @property
    def target_num_hidden_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def kept_layers(self) -> list[int]:
        return [number for number in range(self.num_hidden_layers) if number not in self.skipped_layers]


class LayerSkipDrafter(WeightlessDrafter):
    """Self-speculation without training: the target drafts with some of its layers skipped ("Draft & Verify").

    It has no weights, and reads the text with a separate cache, so the target's results do not change.

        drafter = LayerSkipDrafter.for_target(model, skipped_layers=[4, 6, 9])
        out = model.generate(**inputs, assistant_model=drafter)
    """

    config_class = LayerSkipConfig
    shown_fields = ("skipped_layers", "num_hidden_layers", "target_name")
    num_draft_steps = 32
    takes_tree_builders = True

    def __init__(self, config: LayerSkipConfig) -> None:
        self.config = config
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(cls, target: Any, skipped_layers: Sequence[int], target_name: str = "") -> LayerSkipDrafter:
        """Makes a drafter for a target without some layers, ascending from 0; a ValueError for other numbers."""
        name = public_name(target_name or getattr(target, "name_or_path", "") or "")
        return cls(LayerSkipConfig(tuple(skipped_layers), decoder_layers(text_config(target)), name))

    @classmethod
    def of_document(cls, document: Mapping[str, Any], where: Path) -> LayerSkipDrafter:
        skipped, name = document.get("skipped_layers"), document.get("target_name", "")
        if not isinstance(skipped, list) or not isinstance(name, str):
            raise ValueError(f"{where} is damaged: expected a list of numbers as skipped_layers, a name as target_name")
        try:
            return cls(LayerSkipConfig(tuple(skipped), document.get("num_hidden_layers", 0), name))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error

    def document(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in self.shown_fields}

    def default_generation_config(self) -> GenerationConfig:
        return default_options(num_assistant_tokens=5, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        layers = decoder_layers(text_config(target))
        if layers != self.config.num_hidden_layers:
            raise DraftingRefused(
                f"the target has num_hidden_layers={layers}, this drafter leaves out layers of one with "
                f"{self.config.num_hidden_layers} ({printable(self.config.target_name) or 'not named'}). Search a list "
                "for this target by `hsdraft make skip-layers`."
            )
        reason = ability_of(drafting_part(target, self.config)).reason
        if reason:
            raise DraftingRefused(f"the target's layers cannot draft: {reason}")

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        refuse_sharded("some of the layers", all_processes)

    def session(self, call: Call) -> CausalLMSession:
        part = drafting_part(call.target, self.config)
        return CausalLMSession(part, call, shared_tokens(part, call.target), ability_of(part).kinds)


def drafting_part(target: Any, config: LayerSkipConfig) -> Any:
    """Returns the target without its skipped layers, sharing weights, cached; a DraftingRefused if that cannot run."""
    where = target.device, target.dtype, text_config(target)._attn_implementation
    known: dict[Any, Any] = kept_with(target, "parts", dict)
    key = (config.skipped_layers, *where)
    part = known.get(key)
    if part is None:
        try:
            part = with_layers(target, config.kept_layers).eval()
        except ValueError as error:
            raise DraftingRefused(f"the target cannot draft by some of its layers: {error}") from error
        for other in [other for other in list(known) if other[1:] != where]:  # made before the target was moved
            known.pop(other, None)
        known[key] = part
    return part


_MOST_DRAFTED = 8  # longest chain considered


@dataclass(frozen=True)
class Judged:
    """The judgement of a list of skipped layers."""

    skipped: tuple[int, ...]
    agreement: float  # share of the target's tokens that the remaining layers choose too
    cost: float  # of a draft's forward, in forwards of the target, by weights read
    speed: float  # tokens of the best chain per time of a forward of the target; plain decoding has 1
    depth: int  # length of that chain

    def __str__(self) -> str:
        return (
            f"without {list(self.skipped)}: agreement {self.agreement:.3f}, cost {self.cost:.3f} forwards, "
            f"{self.speed:.3f} x plain with chains of {self.depth}"
        )


def speed_of_chains(agreement: float, cost: float, depth: int) -> float:
    """Returns tokens per time of a target's forward with chains of `depth` tokens; `cost` is that of drafting one."""
    return sum(agreement**number for number in range(depth + 1)) / (1.0 + depth * cost)


def check_target(target: Any) -> None:
    """Raises a ValueError for a target that cannot draft with layers skipped. Runs a few short forwards."""
    count = len(layers_of(target)[1])
    if count < 3:
        raise ValueError(f"the target has {count} layers: expected 3 or more, as its first and last ones stay")
    LayerSkipDrafter.for_target(target, [1]).check(target)


@torch.no_grad()
def written_texts(
    target: Any,
    prompts: Sequence[dict[str, torch.Tensor]],
    max_new_tokens: int,
    report: Callable[[str], None] = print,
) -> list[tuple[torch.Tensor, int]]:
    """Returns greedy texts `[1, length]` of the target, each with the length of its prompt."""
    from ...core.progress import Reporter

    texts = []
    with Reporter.of(report).stage("writing texts", "texts", len(prompts)) as stage:
        for done, inputs in enumerate(prompts, 1):
            text = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            texts.append((text, inputs["input_ids"].shape[1]))
            stage.advance(done)
    return texts


@torch.no_grad()
def judged(target: Any, skipped: Sequence[int], texts: Sequence[tuple[torch.Tensor, int]]) -> Judged:
    """Judges a list of layers to skip, on texts of `written_texts`. The target is not changed."""
    layers = layers_of(target)[1]
    kept = [number for number in range(len(layers)) if number not in skipped]
    part, right, total = with_layers(target, kept).eval(), 0, 0
    keeps_few = "logits_to_keep" in inspect.signature(part.forward).parameters
    for text, start in texts:
        count = text.shape[1] - start
        if not count:
            continue
        few = {"logits_to_keep": count} if keeps_few else {}  # logits of the prompt are not needed
        logits = part(input_ids=text[:, :-1], use_cache=False, **few).logits[0, -count:]
        right += int((logits.argmax(dim=-1) == text[0, start:].to(logits.device)).sum())
        total += count
    agreement = right / max(total, 1)
    head = target.get_output_embeddings().weight.numel()
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    cost = (sum(sizes[number] for number in kept) + head) / (sum(sizes) + head)
    best = max(range(1, _MOST_DRAFTED + 1), key=lambda depth: speed_of_chains(agreement, cost, depth))
    return Judged(tuple(sorted(skipped)), agreement, cost, speed_of_chains(agreement, cost, best), best)


def search(
    target: Any,
    texts: Sequence[tuple[torch.Tensor, int]],
    most: int | None = None,
    report: Callable[[str], None] = print,
) -> Judged:
    """Greedily skips one layer at a time, each time the one that leaves the fastest drafts; returns the best list.

    The search continues where drafts become slower, since further layers may pay together. The first and last layers
    stay. `most` limits the number of skipped layers; default: all but two. A ValueError as `check_target`, or without
    a text.
    """
    from ...core.progress import Reporter

    check_target(target)
    count = len(layers_of(target)[1])
    if not any(text.shape[1] > start for text, start in texts):
        raise ValueError("the target wrote nothing: expected prompts that it answers")
    most = count - 2 if most is None else min(most, count - 2)
    demand(most >= 1, "most", most, "expected 1 or more layers to leave out")
    rounds: list[Judged] = []  # the best list of each length
    report, done = Reporter.of(report), 0
    with report.stage("judging lists of layers", "lists", sum(range(count - 1 - most, count - 1))) as stage:
        for _ in range(most):
            now, judgements = rounds[-1].skipped if rounds else (), []
            for number in (number for number in range(1, count - 1) if number not in now):
                judgements.append(judged(target, [*now, number], texts))
                stage.advance(done := done + 1)
            rounds.append(max(judgements, key=lambda each: each.speed))
            report(str(rounds[-1]))
    return max(rounds, key=lambda each: each.speed)


def as_drafter(target: Any, found: Judged, target_name: str = "") -> LayerSkipDrafter:
    """Returns the drafter of a list of layers. It drafts chains of the length judged best, without n-grams."""
    drafter = LayerSkipDrafter.for_target(target, found.skipped, target_name)
    options = drafter.generation_config
    options.num_assistant_tokens = options.tree_size = found.depth
    options.beam_width, options.ngram_length = 1, 0  # n-grams would take nodes from the chain
    return drafter


register_drafter(LayerSkipConfig.model_type, LayerSkipConfig, LayerSkipDrafter)
