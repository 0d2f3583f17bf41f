"""Random configurations of calls of `generate()`, as plain data."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_hsdraft.runtime.target_limits import text_config, windows
from oracles.mtp_targets import LAYERS, counting
from oracles.support import decodable, model_types
from oracles.tiny import VOCABULARY

_TASKS = {"causal": 72, "seq2seq": 10, "image-text": 11, "mtp": 7}  # shares
_DRAFTERS = {"scripted": 62, "ngrams": 18, "language model": 8, "hidden-state": 6, "block": 3, "eagle": 3}
DRAWN = ("gumbel", "stochastic_beam")  # tree builders that take random numbers: other samples with the same seed
DEPTH = 6  # of drafts
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.4, 0.8, 1.5),
    "top_k": (3, 20),
    "top_p": (0.6, 0.9),
    "min_p": (0.05, 0.2),
    "typical_p": (0.5, 0.9),
    "epsilon_cutoff": (0.02,),
    "eta_cutoff": (0.02,),
}
_PROCESSORS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (0.8, 1.3),
    "encoder_repetition_penalty": (1.3,),
    "no_repeat_ngram_size": (2, 3),
    "bad_words_ids": ([[7], [8, 9], [11, 12, 13]],),
    "suppress_tokens": ([6, 17, 40],),
    "begin_suppress_tokens": ([20, 21, 22],),
    "sequence_bias": ([[[14], 6.0], [[15, 16], -6.0]],),
    "forced_bos_token_id": (33,),
    "forced_eos_token_id": (34,),
    "exponential_decay_length_penalty": ((4, 1.2),),
    "min_new_tokens": (3, 9),
    "min_length": (20,),
    "guidance_scale": (1.5,),
    "renormalize_logits": (True,),
    "remove_invalid_values": (True,),
    "own_processor": (True,),
}
_FLAGS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
_CACHES: dict[str, Any] = {"cache_implementation": ("static", "static", "dynamic"), "use_cache": (False,)}
_CHANGES = ("weights", "new data", "train and eval", "adapter", "adapter off", "hook", "eager")


@dataclass(frozen=True)
class Step:
    """One call of `generate()`, after a change of the model."""

    way: str  # "direct", "attached", "threads" (two calls at once), or "plain" in both runs
    rows: int
    length: int  # of the prompts, or of what follows the earlier text
    form: str  # "mask", "no mask", "positions" or "embeds"
    padding: str  # "left", "right" or "none"
    cache: str  # "default", "own" (given by the caller), "returned" (by the step before) or "cropped" (the same)
    change: str
    seed: int
    arguments: Mapping[str, Any]

    @property
    def by_row(self) -> bool:
        """Whether the rows of a batch draw each by itself when this is drafted."""
        return self.way != "plain" and bool(self.arguments["do_sample"])


@dataclass(frozen=True)
class Case:
    """One configuration, whole: the same seed and number give the same one."""

    task: str
    model_type: str
    attention: str
    drafter: str
    options: Mapping[str, Any]
    steps: Sequence[Step]


@functools.cache
def types(task: str) -> tuple[Any, ...]:
    return tuple((name,) for name in LAYERS) if task == "mtp" else tuple(model_types(task))


@functools.cache
def shape(task: str, model_type: str, *classes: Any) -> tuple[Any, Any] | None:
    """A model's class and its tiny configuration; `None` if plain decoding does not work for it."""
    if task == "mtp":
        return (counting, None)
    model, plain, _ = decodable(*classes)
    takes_ids = plain is not None and model.main_input_name == "input_ids"
    return (type(model), model.config) if takes_ids else None


def case_of(seed: int, number: int) -> Case:
    """Returns a configuration; its numbers come from `seed` and `number` alone."""
    rng = random.Random(f"{seed}/{number}")
    task = _pick(rng, _TASKS)
    found = next(each for each in rng.sample(types(task), len(types(task))) if shape(task, *each) is not None)
    drafter = "mtp" if task == "mtp" else _pick(rng, _DRAFTERS)
    _, config = shape(task, *found) or (None, None)
    longest = 12 if config is None else max(12, *windows(config.get_text_config(decoder=True)), 0)
    attention = rng.choices(("", "eager", "flex_attention"), (74, 25, 1))[0]
    steps = [_step(rng, task, longest, first=True)]
    while rng.random() < 0.55 and len(steps) < 4:
        steps.append(_step(rng, task, longest, first=False))
    return Case(task, found[0], attention, drafter, _options(rng, drafter, steps), tuple(steps))


def _pick(rng: random.Random, shares: Mapping[str, int]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def _some(rng: random.Random, table: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
    return {name: rng.choice(table[name]) for name in rng.sample(list(table), rng.randint(1, most))}


def _step(rng: random.Random, task: str, longest: int, first: bool) -> Step:
    rows = rng.choices((1, 2, 3, 4), (55, 20, 15, 10))[0]
    arguments: dict[str, Any] = {"do_sample": rng.random() < 0.35, "return_dict_in_generate": rng.random() < 0.95}
    arguments["max_new_tokens"] = rng.choice((2, 6, 12, 16, 20, 24, 28, 36))
    if arguments["do_sample"] and rng.random() < 0.8:
        arguments |= _some(rng, _SAMPLING, 2)
    if rng.random() < 0.35:
        arguments |= _some(rng, _PROCESSORS, 2)
    if rng.random() < 0.5:
        arguments["eos_token_id"] = sorted(rng.sample(range(VOCABULARY), rng.choice((1, 4, 10))))
    if "exponential_decay_length_penalty" in arguments:
        arguments.setdefault("eos_token_id", [34])
    arguments |= {"stop_strings": ["5b", "7c", "f2"]} if rng.random() < 0.07 else {}
    arguments |= {"own_criterion": True} if rng.random() < 0.07 else {}
    arguments |= {flag: True for flag in _FLAGS if rng.random() < 0.15}
    arguments |= _some(rng, _CACHES, 1) if rng.random() < 0.08 else {}
    if rng.random() < 0.12:
        arguments["num_return_sequences" if arguments["do_sample"] else "streamed"] = rng.choice((2, 3))
    arguments |= {"num_beams": 2} if rng.random() < 0.015 else {}
    cache = "own" if rng.random() < 0.1 else "default"
    if not first and task != "seq2seq" and rng.random() < 0.6:
        cache = rng.choices(("returned", "cropped"), (75, 25))[0]
    way = rng.choices(("direct", "attached", "threads", "plain"), (50, 34, 4, 0 if first else 12))[0]
    if way == "threads" and (arguments["do_sample"] or "streamed" in arguments or cache != "default"):
        way = "direct"
    step = Step(
        way=way,
        rows=rows,
        length=rng.choice((1, 2, rng.randint(3, 12), rng.randint(3, 12), longest + 4, 2 * longest)),
        form=rng.choices(("mask", "no mask", "positions", "embeds"), (70, 12, 10, 8 if task == "causal" else 0))[0],
        padding=rng.choices(("left", "right", "none"), (70, 8, 22))[0],
        cache="default" if way != "plain" and arguments["do_sample"] and rows > 1 else cache,
        change="" if first or rng.random() < 0.7 else rng.choice(_CHANGES),
        seed=rng.randrange(1 << 30),
        arguments=arguments,
    )
    return step


def _options(rng: random.Random, drafter: str, steps: Sequence[Step]) -> dict[str, Any]:
    options: dict[str, Any] = {"tree_sizing": rng.choice(("fixed", "fixed", "cost"))}
    if options["tree_sizing"] == "cost" and rng.random() < 0.8:
        options["node_cost"] = options["depth_cost"] = rng.choice((0.0, 0.0, 0.01))
    options["tree_size"] = rng.choice((1, 3, 8, 16, 24, 40))
    options["beam_width"] = rng.choice((1, 2, 5, 8))
    options["num_assistant_tokens"] = rng.choice((1, 3, DEPTH // 2, DEPTH)) if drafter != "mtp" else None
    options["packed_weights"] = rng.choice((None, None, True, False))
    options["assistant_confidence_threshold"] = rng.choice((0.0, 0.0, 0.05))
    options["history"] = rng.choice(("off", "off", "off", "memory"))
    if drafter == "ngrams":
        return options | {"ngram_length": rng.choice((1, 2, 4, 8))}
    options["ngram_length"] = rng.choice((0, 2, 4, 4, 8))
    if options["ngram_length"] and rng.random() < 0.25:
        options["ngram_continuation"] = rng.choice((2, 8, 20))
    if drafter == "hidden-state":
        options["reuse"] = rng.choice(("none", "none", "ensemble", "resample"))
        sampled = any(step.arguments["do_sample"] for step in steps)
        if options["reuse"] == "none":
            options["tree_builder"] = rng.choice(
                ("beam", "p_best", *(() if sampled else ("gumbel", "stochastic_beam")))
            )
        if options.get("tree_builder") in ("gumbel", "stochastic_beam") and rng.random() < 0.5:
            options["verification"] = "rejection"
    return options


def group_of(case: Case, model: Any) -> str:
    """What kind of architecture a configuration is about."""
    if case.task != "causal":
        return {"seq2seq": "encoder-decoder", "mtp": "layers for several tokens"}.get(case.task, case.task)
    fields = text_config(model).to_dict()
    kinds = " ".join(map(str, fields.get("layertypes") or ()))
    if getattr(model, "_is_stateful", False) or any(word in kinds for word in ("linear", "mamba", "recurrent", "conv")):
        return "recurrent, hybrid"
    if fields.get("kv_lora_rank"):
        return "latent attention"
    if any("expert" in name for name in fields):
        return "experts"
    if list(windows(text_config(model))):
        return "sliding windows"
    return "dense" if fields.get("rope_parameters") else "absolute positions, ALiBi"
