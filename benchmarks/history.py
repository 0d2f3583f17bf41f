"""Measures drafts from past texts, the option `history`: tau and speed where texts resemble earlier ones, and look-ups.

    python benchmarks/history.py --limit 12 --repeats 3 --json history.json
    python benchmarks/history.py --look-ups 1000000,10000000

Three workloads, made of the prompts. Each says in the table how much of its texts was there before, as the part of the
answers' tokens that ends an n-gram of 8 tokens of an earlier prompt or answer of the workload.

- evaluation: each prompt is asked in one template, and then in another one.
- chat: questions about one document, each with all turns before it. Answers are the target's.
- samples: 8 samples of each prompt in one batch, at temperature 1, by two seeds.

Each way begins a workload with an empty history: off, memory, and a folder. In a repeat all ways run in turns, in
changing order, after one pass of each that is not counted. `tokens/s` is relative to off, the median of the repeats;
tau and megabytes are of the last repeat. Greedy texts are those of off in float32, and may diverge at near-ties in
bfloat16. `--look-ups` times look-ups in random and in repeating texts of so many tokens instead, without a target.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

from runner import counts, decoded, in_turns, keep, loaded_target, options, print_table, prompt_texts

WAYS = ("off", "memory", "folder")
TEMPLATES = ("{prompt}", "Answer the following request.\n\nRequest: {prompt}\n\nGive the answer.")
ASKED = (
    "What is this text about?", "Which rules does it give?", "When does an error occur?", "Quote the first rule.",
    "Explain the last paragraph.", "Give an example of it.", "Which terms does it define?", "Repeat the definition.",
    "What follows from it in practice?", "Summarize the text in three sentences.",
)  # fmt: skip
SAMPLES, NGRAM = 8, 8
LOOK_UPS = 2000


@dataclass
class Pass:
    """A workload, run once in one way."""

    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0  # of each row
    megabytes: float = 0.0  # of the history
    texts: list[list[int]] = field(default_factory=list)  # prompts and answers
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.tokens / max(self.forwards, 1)


class Pair:
    """A target, and a drafter that runs workloads with and without a history."""

    def __init__(self, given: Any) -> None:
        from runner import dtype_of

        from hf_hsdraft.cli._shared import drafter_of
        from hf_hsdraft.generate.by_name import load_drafter

        self.given = given
        self.target, self.tokenizer = loaded_target(given)
        name = drafter_of(given.target, given.drafter[0] if given.drafter else None)
        self.drafter = load_drafter(name, dtype_of(given), given.device)
        self.prompts = prompt_texts(given)

    def run(self, workload: Callable[[Pair, Pass], None], way: str) -> Pass:
        """Runs a workload from an empty history."""
        from hf_hsdraft import erase_history, list_history

        found, options = Pass(), self.drafter.generation_config
        with tempfile.TemporaryDirectory() as folder:
            options.history = folder if way == "folder" else way
            erase_history(self.drafter)
            workload(self, found)
            where = {"off": None, "memory": self.drafter, "folder": folder}[way]
            held = list_history(where) if where is not None else []
            found.megabytes = sum(each.bytes for each in held) / 1e6
        options.history = "off"
        return found

    def decode(self, inputs: Mapping[str, Any], found: Pass, **call: Any) -> list[list[int]]:
        """Decodes a prompt or a batch, adds what it took, and returns the new tokens."""
        done = decoded(self.target, inputs, self.given.max_new_tokens, self.drafter, **call)
        found.seconds += done.seconds
        found.tokens += done.statistics.new_tokens
        found.forwards += done.statistics.row_forwards
        for prompt, answer in zip(inputs["input_ids"].tolist(), done.texts, strict=True):
            found.texts.append([*prompt, *answer])
            found.answers.append(answer)
        return done.texts


def evaluation(pair: Pair, found: Pass) -> None:
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt

    for template in TEMPLATES:
        for prompt in pair.prompts:
            pair.decode(encode_prompt(pair.tokenizer, template.format(prompt=prompt)), found)


def chat(pair: Pair, found: Pass) -> None:
    import torch

    document = topics["with"].strip()[: pair.given.document]
    messages: list[dict[str, str]] = []
    for turn in range(pair.given.turns):
        asked = ASKED[turn % len(ASKED)]
        messages.append({"role": "user", "content": f"{document}\n\n{asked}" if turn == 0 else asked})
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([pair.tokenizer(text, add_special_tokens=False)["input_ids"]])
        [answer] = pair.decode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, found)
        messages.append({"role": "assistant", "content": pair.tokenizer.decode(answer, skip_special_tokens=True)})


def samples(pair: Pair, found: Pass) -> None:
    import torch

    from hf_hsdraft.runtime.prompt_inputs import encode_prompt

    for seed in range(2):
        for prompt in pair.prompts:
            inputs = {name: each.repeat(SAMPLES, 1) for name, each in encode_prompt(pair.tokenizer, prompt).items()}
            torch.manual_seed(seed)
            pair.decode(inputs, found, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


WORKLOADS = {"evaluation": evaluation, "chat": chat, "samples": samples}


def repeated(found: Pass) -> float:
    """Returns the part of the answers' tokens that ends an n-gram of an earlier text, or of an earlier place."""
    known: set[tuple[int, ...]] = set()
    again = count = 0
    for text, answer in zip(found.texts, found.answers, strict=True):
        for end in range(1, len(text) + 1):
            ngram = tuple(text[max(end - NGRAM, 0) : end])
            if end > len(text) - len(answer):
                again, count = again + (ngram in known), count + 1
            known.add(ngram)
    return again / max(count, 1)


def rows_of(name: str, passes: Mapping[str, Sequence[Pass]]) -> Iterator[Sequence[Any]]:
    base = passes["off"]
    for way, runs in passes.items():
        pairs = list(zip(runs, base, strict=True))
        speed = statistics.median(own.tokens / own.seconds / (other.tokens / other.seconds) for own, other in pairs)
        same = sum(one == other for own, plain in pairs for one, other in zip(own.answers, plain.answers, strict=True))
        texts = sum(len(own.answers) for own in runs)
        yield name, way, f"{repeated(base[-1]):.0%}", runs[-1].tau, speed, f"{same} of {texts}", runs[-1].megabytes


def look_ups(sizes: Sequence[int], seed: int) -> Iterator[Sequence[Any]]:
    """Yields for each size: seconds to enter so many tokens, megabytes, and microseconds of a look-up and its tree."""
    import numpy as np

    from hf_hsdraft.methods.history.past_texts import HistoryDraft, PastTexts, Record, Trust

    numbers, length = np.random.default_rng(seed), 1000
    for size in sizes:
        for kind in ("random", "repeating"):
            tokens = numbers.zipf(1.3, size).clip(max=49_000).astype(np.int32)  # the frequencies of words
            if kind == "repeating":  # each text eight times
                tokens = np.tile(tokens.reshape(-1, length)[: size // length // 8], (8, 1)).ravel()
            begin = time.perf_counter()
            texts = PastTexts((Record(part) for part in tokens.reshape(-1, length)), 50_000, 2 * size)
            entered, times = time.perf_counter() - begin, []
            for place in numbers.integers(100, len(tokens) - 100, LOOK_UPS).tolist():
                tail = tokens[place - 60 : place].tolist()
                begin = time.perf_counter()
                found = texts.find(tail, 24)
                HistoryDraft(tail[-1], found, Trust()).tree(24, 24)
                times.append(1e6 * (time.perf_counter() - begin))
            middle, high = statistics.median(times), statistics.quantiles(times, n=100)[98]
            yield f"{size:,}", kind, entered, texts.bytes / 1e6, f"{middle:.0f}", f"{high:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(
        __doc__, target=None, drafter=None, prompts=None, limit=12, max_new_tokens=96, repeats=3, dtype="bfloat16",
        device="cpu", seed=0, json=None,
    )  # fmt: skip
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of these; default: all")
    parser.add_argument("--turns", type=int, default=20, help="turns of the chat; default: 20")
    parser.add_argument("--document", type=int, default=4000, help="characters of its document; default: 4000")
    parser.add_argument("--look-ups", type=counts, help="numbers of tokens; times look-ups instead")
    given = parser.parse_args(arguments)
    if given.look_ups:
        columns = ("tokens", "texts", "to enter, s", "MB", "look-up and tree, us", "99 of 100 below, us")
        rows = list(look_ups(given.look_ups, given.seed))
        print_table(columns, rows)
        keep(given.json, {"look-ups": [dict(zip(columns, row, strict=True)) for row in rows]})
        return 0
    names = given.workloads.split(",")
    if unknown := sorted(set(names) - WORKLOADS.keys()):
        parser.error(f"--workloads {', '.join(unknown)}: expected some of {', '.join(WORKLOADS)}")
    pair, kept = Pair(given), []
    columns = ("workload", "history", "seen before", "tau", "tokens/s", "texts as off", "MB")
    for name in names:
        ways = {way: _way(pair, WORKLOADS[name], way) for way in WAYS}
        kept += list(rows_of(name, in_turns(ways, given.repeats)))
        keep(given.json, {"workloads": [dict(zip(columns, row, strict=True)) for row in kept]})
    print_table(columns, kept)
    return 0


def _way(pair: Pair, workload: Callable[[Pair, Pass], None], way: str) -> Callable[[], Pass]:
    return lambda: pair.run(workload, way)


if __name__ == "__main__":
    sys.exit(main())
