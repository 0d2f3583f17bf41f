"""Decodes random schedules of requests that join and leave a running batch, and compares each text with its text alone.

    python benchmarks/schedules.py --count 200
    python benchmarks/schedules.py --count 200 --target HuggingFaceTB/SmolLM2-135M-Instruct --longest 24

A schedule has 12 requests, each with its options (sampling and its warpers, penalties, forbidden words and n-grams,
least lengths, ends, stop strings, scores, processors and criteria that keep a state, streamers), sent and cancelled at
random between rounds, and sizes of batch, parts of prompts, cache and prefix cache. Its number and the seed decide all
of it. Without `--target` it has tiny random targets, and drafters of four kinds in turn, a copy of the target among
them; with one, the target's drafter, for which drafts cost nothing in every other schedule.

A text that differs is a tie where the target's two best scores differ by less than 0.0001 of their size at the first
different token. It exits with 1 if a text is wrong. `--begin` continues an earlier run.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from runner import options, print_table

REQUESTS = 12
TIE = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__, target=None, dtype="float32", seed=0)
    parser.add_argument("--count", type=int, default=200, help="schedules; default: 200")
    parser.add_argument("--begin", type=int, default=0, help="number of the first schedule; default: 0")
    parser.add_argument("--longest", type=int, default=48, help="new tokens of a text; default: 48")
    given = parser.parse_args(arguments)
    found, began, wrong = Counter[str](), time.perf_counter(), list[str]()
    for number in range(given.begin, given.begin + given.count):
        target, drafter, tokenizer = _parts(given, number)
        for index, (result, reason) in enumerate(_compared(given, target, drafter, tokenizer, number)):
            found[result] += 1
            if result in ("WRONG", "tie"):
                wrong.append(f"schedule {number}, request {index}: {result}: {reason}")
                print(wrong[-1], file=sys.stderr, flush=True)
        if (number + 1) % 10 == 0:
            print(f"{number + 1}: {dict(found)}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print_table(("outcome", "texts"), sorted(found.items()))
    return int(bool(found["WRONG"]))


_LOADED: list[Any] = []


def _parts(given: Any, number: int) -> tuple[Any, Any, Any]:
    """The target, its drafter and its tokenizer of a schedule."""
    from hf_hsdraft import AutoDrafter, CachebackDrafter, CausalLMDrafter

    if given.target:
        from runner import loaded_target

        if not _LOADED:
            target, tokenizer = loaded_target(given)
            _LOADED.extend([target, AutoDrafter.for_target(target), tokenizer])
        target, drafter, tokenizer = _LOADED
        for name in ("node_cost", "depth_cost"):
            setattr(drafter.generation_config, name, 0.0 if number % 2 else None)
        return target, drafter, tokenizer
    if not _LOADED:
        target = _tiny_target(0)
        twins = CausalLMDrafter(_tiny_target(0)), CausalLMDrafter(_tiny_target(3))
        _LOADED.extend([target, [twins[0], CachebackDrafter(), _tiny_drafter(target), twins[1]]])
    drafter = _LOADED[1][number % 4]
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    return _LOADED[0], drafter, None


def _tiny_target(seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, eos_token_id=4, initializer_range=0.3, **sizes)
    target = LlamaForCausalLM(config).eval()
    target.generation_config.pad_token_id = 0
    return target


def _tiny_drafter(target: Any) -> Any:
    from hf_hsdraft import HSDraftConfig, HSDrafter

    fields = {"num_draft_steps": 4, "draft_vocab_size": 97, "injector_rank": 8, "initializer_range": 0.3}
    drafter = HSDrafter(HSDraftConfig.for_target(target, **fields)).eval()
    drafter.generation_config.packed_weights = True  # however small
    return drafter


def _requests(rng: random.Random, vocabulary: int, tokenizer: Any, longest: int) -> list[dict[str, Any]]:
    """Arguments of `generate()`, each with a `seed`; three in four prompts begin like another."""
    import torch

    beginnings = [[rng.randrange(6, vocabulary) for _ in range(length)] for length in (0, 9, 30)]
    found = []
    for index in range(REQUESTS):
        own = [rng.randrange(6, vocabulary) for _ in range(rng.choice([1, 2, 7, 20]))]
        ids = torch.tensor([rng.choice([[], *beginnings]) + own + own[: len(own) // 2]])
        call: dict[str, Any] = {"input_ids": ids, "max_new_tokens": rng.randint(1, longest), "seed": index}
        call["do_sample"] = rng.random() < 0.5
        if call["do_sample"]:
            call["temperature"] = rng.choice([0.5, 0.8, 1.0, 1.5])
            call |= rng.choice([{}, {"top_k": 0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.7}])
        further: list[dict[str, Any]] = [
            {"repetition_penalty": rng.choice([0.8, 1.3])},
            {"no_repeat_ngram_size": rng.choice([1, 2, 3])},
            {"bad_words_ids": [[rng.randrange(6, vocabulary)], [rng.randrange(vocabulary), own[0]]]},
            {"suppress_tokens": [rng.randrange(vocabulary) for _ in range(20)]},
            {"begin_suppress_tokens": [rng.randrange(vocabulary) for _ in range(20)]},
            {"sequence_bias": {(rng.randrange(vocabulary),): 3.0}},
            {"min_new_tokens": call["max_new_tokens"] // 2},
            {"eos_token_id": [4, *(rng.randrange(vocabulary) for _ in range(vocabulary // 20))]},
            {"forced_eos_token_id": 4},
            {"exponential_decay_length_penalty": (3, 1.1)},
            {"return_dict_in_generate": True, "output_scores": True},
            {"processor": rng.randint(2, 9)},
            {"criterion": rng.randint(2, 9)},
            {"streamer": None},
        ]
        if tokenizer is not None:
            further.append({"stop_strings": rng.sample([" the", "a", ".", "in"], 2), "tokenizer": tokenizer})
        for more in rng.sample(further, rng.choice([0, 0, 1, 2, 3])):
            call |= more
        found.append(call)
    return found


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments with fresh objects: one that keeps a state serves a single text."""
    import torch
    from transformers import LogitsProcessor, StoppingCriteria
    from transformers.generation.streamers import BaseStreamer

    class Alternates(LogitsProcessor):
        """Raises the score of another token at each of its calls; it keeps no state but the text's length."""

        def __init__(self, step: int) -> None:
            self.step = step

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores = scores.clone()
            scores[:, (7 * input_ids.shape[1]) % scores.shape[1] :: 3 * self.step] += 2.0
            return scores

    class Counts(StoppingCriteria):
        """Ends a text at its so many call."""

        def __init__(self, left: int) -> None:
            self.left = left

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.left -= 1
            return torch.full((len(input_ids),), self.left <= 0)

    class Notes(BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []

        def put(self, value: Any) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ids.append(-1)

    own = dict(call)
    if "processor" in own:
        own["logits_processor"] = [Alternates(own.pop("processor"))]
    if "criterion" in own:
        own["stopping_criteria"] = [Counts(own.pop("criterion"))]
    if "streamer" in own:
        own["streamer"] = Notes()
    return own


def _compared(given: Any, target: Any, drafter: Any, tokenizer: Any, number: int) -> Iterator[tuple[str, str]]:
    """Decodes a schedule; yields the outcome of each text, and a reason."""
    import torch

    from hf_hsdraft.batching.scheduler import ContinuousBatching

    rng = random.Random(f"{given.seed} {number}")
    calls = _requests(rng, target.config.vocab_size, tokenizer, given.longest)
    sizes = rng.choice([1, 2, 3, 5, 8]), rng.choice([4, 16, 512]), rng.choice([None, 400]), rng.choice([0, 60, 4096])
    batching = ContinuousBatching(target, drafter, *sizes)
    waiting, done, streams, unwanted = list(range(REQUESTS)), {}, {}, set(rng.sample(range(REQUESTS), 2))
    while waiting or batching.busy:
        while waiting and (rng.random() < 0.5 or not batching.busy):
            arguments = _arguments(calls[waiting[0]])
            streams[waiting.pop(0)] = arguments.get("streamer")
            batching.submit(arguments, arguments.pop("seed"))
        for index in list(unwanted):
            if index in streams and rng.random() < 0.1:
                batching.cancel(index)
                unwanted.remove(index)
        for each in batching.step():
            done[each.index] = each
    for index, call in enumerate(calls):
        arguments, ended = _arguments(call), done[index]
        torch.manual_seed(arguments.pop("seed"))
        try:
            plain = target.generate(**arguments)
        except Exception as error:
            if ended.cancelled:
                yield "cancelled before it began", ""
                continue
            yield ("both raise" if type(ended.error) is type(error) else "WRONG"), repr((error, ended.error))
            continue
        if ended.error is not None:
            yield "WRONG", repr(ended.error)
        elif ended.cancelled and ended.output is None:
            yield "cancelled before it began", ""
        else:
            yield _outcome(target, call, plain, ended, arguments.get("streamer"), streams[index])


def _outcome(target: Any, call: Any, plain: Any, ended: Any, told: Any, heard: Any) -> tuple[str, str]:
    import torch

    texts = [getattr(each, "sequences", each)[0].tolist() for each in (plain, ended.output)]
    begin = call["input_ids"].shape[1]
    length = len(texts[1]) if ended.cancelled else len(texts[0])
    if texts[1] == texts[0][:length]:
        if told is not None and not ended.cancelled and told.ids != heard.ids:
            return "WRONG", f"streamed {heard.ids} instead of {told.ids}"
        for one, other in zip(*(getattr(each, "scores", None) or () for each in (plain, ended.output)), strict=False):
            if not torch.allclose(one, other, atol=1e-3, rtol=1e-3):
                return "WRONG", "scores"
        return "cancelled" if ended.cancelled else "same", ""
    at = next(
        (place for place, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts))
    )
    scores = target(torch.tensor([texts[0][:at]])).logits[0, -1].double()
    best = scores.topk(2).values
    gap = float((best[0] - best[1]) / best[0].abs())
    options = {name: each for name, each in call.items() if name not in ("input_ids", "tokenizer")}
    said = f"at new token {at - begin}, gap {gap:.2g}: {texts[1][begin:]} instead of {texts[0][begin:]} ({options})"
    return ("tie" if gap < TIE and not call["do_sample"] else "WRONG"), said


if __name__ == "__main__":
    sys.exit(main())
