"""Plays the calls of a random configuration on a tiny model, plainly or with drafts."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from hf_hsdraft import (
    BlockDrafter,
    CachebackDrafter,
    CausalLMDrafter,
    EagleConfig,
    EagleDrafter,
    attach,
    detach,
    harmless,
)
from hf_hsdraft.core.cache_name import CACHE, returned_cache
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from hf_hsdraft.methods.mtp.layers import MtpLayers
from hf_hsdraft.runtime.target_limits import text_config
from oracles.format_parity import randomise
from oracles.mtp_targets import LAYERS, counting
from oracles.random_cases import DEPTH, Case, Step, shape, types
from oracles.support import brief as brief
from oracles.support import scripted_drafter
from oracles.tiny import VOCABULARY, tiny_model


@dataclass
class Played:
    """What a step brought; `kept` is a copy of its cache's tensors."""

    output: Any = None
    error: Exception | None = None
    streamed: list[int] = field(default_factory=list)
    random_state: Any = None
    kept: list[tuple[bool, torch.Tensor]] = field(default_factory=list)
    refused: str = ""
    statistics: Any = None
    drafted: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)
    begin: int = 0  # number of tokens that the output has before the new ones
    cache_implementation: str | None = None

    @property
    def texts(self) -> torch.Tensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences

    @property
    def new(self) -> list[list[int]]:
        return self.texts[:, self.begin :].tolist()


class _OwnProcessor(LogitsProcessor):
    """Depends on the text, and on each row alone."""

    row_wise = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] * 7 + input_ids.shape[1]) % scores.shape[1]] += 3.0
        return scores


class _OwnCriterion(StoppingCriteria):
    """Ends the rows of a batch at different places."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 3


class _Collect(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"abcdef": 0, **{chr(97 + index // 10) + str(index % 10): index for index in range(1, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="abcdef"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="abcdef", pad_token="abcdef")


class Run:
    """One of the two runs of a configuration: its model, its drafter, and what the last step returned."""

    def __init__(self, case: Case) -> None:
        self.case, self.drafter, self.last, self.mask = case, None, None, None
        found = next(each for each in types(case.task) if each[0] == case.model_type)
        made, config = shape(case.task, *found) or (None, None)
        if config is None:
            self.model, self._layers = counting(case.model_type, LAYERS[case.model_type], right=len(case.steps) != 2)
        else:
            self.model = tiny_model(made, copy.deepcopy(config))
        if case.attention:
            with suppress(Exception):  # not every type has every implementation
                self.model.set_attn_implementation(case.attention)

    def close(self) -> None:
        with suppress(Exception):
            detach(self.model)
        self.model = self.drafter = self.last = None

    def play(self, step: Step, truth: Sequence[Sequence[int]] | None = None, by_row: bool = False) -> Played:
        """Changes the model and runs one call: with drafts that follow `truth` more or less, or plainly."""
        if truth is not None:
            self._draft_along(truth)
        with suppress(Exception):  # a change that a model does not take; the same in both runs
            self._change(step)
        self._given = Played()
        try:
            self._given.inputs = self._inputs(step, self._given)
        except Exception as error:
            return Played(error=error)
        return self.call(step, truth is not None, by_row)

    def call(self, step: Step, drafting: bool, by_row: bool = False) -> Played:
        """Runs the call of the last step, once more with the same inputs."""
        played = Played(begin=self._given.begin, inputs=self._given.inputs)
        arguments = {**played.inputs, **self._arguments(step)}
        played.cache_implementation = arguments.get("cache_implementation")
        texts = len(next(iter(played.inputs.values()))) * arguments.get("num_return_sequences", 1)
        torch.manual_seed(step.seed)
        with _drawn_by_row() if by_row and texts > 1 else nullcontext():
            try:
                played.output = self._generate(step, arguments, drafting, played)
            except DraftingRefused as refusal:
                played.refused = str(refusal)
            except Exception as error:
                played.error = error
        played.random_state = torch.get_rng_state()
        played.streamed = getattr(arguments.get("streamer"), "tokens", [])
        self.last, played.statistics = played, played.statistics or getattr(played.output, "statistics", None)
        if played.output is not None:
            cache = arguments.get(CACHE) or returned_cache(played.output)
            played.kept = _tensors(cache, played.inputs.get("attention_mask"))
        return played

    def _generate(self, step: Step, arguments: dict[str, Any], drafting: bool, played: Played) -> Any:
        if not drafting or step.way == "plain":
            return self.model.generate(**arguments)
        if step.way == "attached":
            with attach(self.model, self.drafter) as attachment:
                output = self.model.generate(**arguments)
            played.drafted, played.statistics = attachment.statistics.calls > 0, attachment.last
            return output
        played.drafted = step.arguments.get("num_beams", self.model.generation_config.num_beams or 1) == 1
        if step.way == "direct":
            return self.model.generate(**arguments, assistant_model=self.drafter)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(self.model.generate, **arguments, assistant_model=self.drafter) for _ in range(2)]
        outputs = [call.result() for call in calls]
        assert torch.equal(*(Played(output).texts for output in outputs)), "two threads, two texts"
        return outputs[0]

    @torch.no_grad()
    def _change(self, step: Step) -> None:
        model, generator = self.model, torch.Generator().manual_seed(step.seed)
        if step.change in ("weights", "new data"):
            for weight in model.parameters():
                noise = 0.05 * torch.randn(weight.shape, generator=generator)
                weight.data = weight.data + noise if step.change == "new data" else weight.data.add_(noise)
        elif step.change == "train and eval":
            model.train().eval()
        elif step.change == "adapter":
            torch.manual_seed(step.seed)
            model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"), "changed")
        elif step.change == "adapter off":
            model.disable_adapters()
        elif step.change == "hook":
            model.get_output_embeddings().register_forward_hook(
                harmless(lambda module, inputs, output: output + output.sin())
            )
        elif step.change == "eager":
            model.set_attn_implementation("eager")

    def _inputs(self, step: Step, played: Played) -> dict[str, Any]:
        """The prompts, `[rows, length]`, after the text of the step before where its cache is used again."""
        size = min(80, text_config(self.model).vocab_size)
        generator = torch.Generator().manual_seed(step.seed)
        ids = torch.randint(5, size, (step.rows, step.length), generator=generator)
        if step.seed % 3 == 0:  # a text that repeats itself
            ids = ids[:, torch.arange(step.length) % 5 % step.length]
        cache = returned_cache(self.last.output) if self.last is not None else None
        if step.cache in ("returned", "cropped") and cache is not None and self.last.begin:
            texts = self.last.texts
            if step.cache == "cropped" and all(type(layer) is DynamicLayer for layer in cache.layers):
                cache.crop(-2)
                texts = texts[:, :-2]
            ids = torch.cat([texts, ids[:1].expand(len(texts), -1)], dim=1)
            played.begin = ids.shape[1]
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: cache}
        mask = torch.ones_like(ids)
        for row in range(step.rows):
            if (hidden := min(2 * row, step.length - 1)) and step.padding != "none":
                where = slice(hidden) if step.padding == "left" else slice(-hidden, None)
                ids[row, where], mask[row, where] = 0, 0
        inputs = {"input_ids": ids} if step.form == "no mask" else {"input_ids": ids, "attention_mask": mask}
        played.begin = 1 if self.model.config.is_encoder_decoder else step.length
        if step.form == "positions" and not self.model.config.is_encoder_decoder:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if step.form == "embeds" and not self.model.config.is_encoder_decoder:
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids")).detach()
            played.begin = 0
        if step.cache == "own" and not self.model.config.is_encoder_decoder:
            inputs[CACHE] = DynamicCache(config=self.model.config)
        return inputs

    def _arguments(self, step: Step) -> dict[str, Any]:
        call = {"pad_token_id": 0, **step.arguments}
        if "sequence_bias" in call:
            call["sequence_bias"] = {tuple(ids): bias for ids, bias in call["sequence_bias"]}
        if call.pop("own_processor", False):
            call["logits_processor"] = LogitsProcessorList([_OwnProcessor()])
        if call.pop("own_criterion", False):
            call["stopping_criteria"] = StoppingCriteriaList([_OwnCriterion()])
        if call.pop("streamed", 0) and step.rows == 1:
            call["streamer"] = _Collect()
        return call | ({"tokenizer": _tokenizer()} if "stop_strings" in call else {})

    def _draft_along(self, truth: Sequence[Sequence[int]]) -> None:
        """Makes the drafter at the first step; one that knows the text gets that of this step."""
        kind, seed = self.case.drafter, self.case.steps[0].seed
        if kind == "scripted" and self.drafter is not None:
            self.drafter.texts = truth
        if kind != "ngrams" and self.drafter is not None:
            return
        torch.manual_seed(seed)
        options = dict(self.case.options)
        if kind == "ngrams":
            wrong = random.Random(seed)
            texts = [[wrong.randrange(5, 80) if wrong.random() < 0.1 else each for each in row] for row in truth]
            self.drafter = CachebackDrafter([row for row in texts if row])
        else:
            try:
                self.drafter = _made(kind, self.model, truth, seed, getattr(self, "_layers", None))
            except ValueError:  # a model that cannot draft, or sizes that a family does not take
                self.drafter = _made("scripted", self.model, truth, seed, None)
                options = {name: options[name] for name in options if name not in ("tree_builder", "verification")}
        for name, value in options.items():
            if value is not None:
                setattr(self.drafter.generation_config, name, value)


@torch.no_grad()
def _made(kind: str, model: Any, truth: Sequence[Sequence[int]], seed: int, layers: Any) -> Any:
    if kind == "scripted":
        return scripted_drafter(model, truth, seed, DEPTH)
    if kind == "mtp":
        return MtpDrafter(model, MtpLayers(layers))
    if kind == "language model":  # often right and often wrong
        near, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for weight in near.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        drafter: Any = CausalLMDrafter(near)
    elif kind == "block":
        sizes = {"num_hidden_layers": 1, "markov_rank": 8, "mask_token_id": 3, "intermediate_size": 48}
        drafter = BlockDrafter.for_target(model, num_draft_steps=DEPTH, **sizes).eval()
        randomise(drafter)
    elif kind == "eagle":
        drafter = EagleDrafter(EagleConfig.for_target(model, DEPTH)).eval()
        drafter.reset_parameters(std=0.3)
    else:
        return scripted_drafter(model, truth, seed, DEPTH)._drafter
    return drafter


@contextmanager
def _drawn_by_row() -> Any:
    """Lets plain decoding draw each row by a generator of the row, as drafted batches do."""
    generators: list[torch.Generator] = []
    multinomial = torch.multinomial

    def drawn(probabilities: torch.Tensor, num_samples: int, **options: Any) -> torch.Tensor:
        if not generators:
            seeds = torch.randint(2**63 - 1, (len(probabilities),)).tolist()
            generators.extend(torch.Generator().manual_seed(seed) for seed in seeds)
        rows = zip(probabilities, generators, strict=True)
        return torch.stack([multinomial(row, num_samples, generator=each) for row, each in rows])

    with mock.patch.object(torch, "multinomial", drawn):
        yield


def _tensors(cache: Any, mask: torch.Tensor | None) -> list[tuple[bool, torch.Tensor]]:
    """Copies of a cache's tensors, and whether only the last slots are comparable.

    Padding sees nothing, so some models let it attend to all slots of a static cache alike, whose number differs: it
    follows from the longest call so far, and drafts have room of their own. Nothing reads these slots.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    kept = []
    for layer in getattr(cache, "layers", []):
        length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        windowed = bool(getattr(layer, "is_sliding", False))
        for name, value in sorted(vars(layer).items()):
            if isinstance(value, torch.Tensor) and value.dim() >= 3:
                static = name in ("keys", "values") and type(layer).__name__.startswith("Static")
                copied = (value[:, :, :length] if static else value).clone()
                if static and mask is not None and mask.dim() == 2 and mask.shape[1] <= min(length, copied.shape[2]):
                    hidden = mask.repeat_interleave(len(copied) // len(mask), dim=0) == 0
                    copied[:, :, : mask.shape[1]].masked_fill_(hidden[:, None, :, None], 0)
                kept.append((windowed, copied))
    return kept
