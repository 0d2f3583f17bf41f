"""Measures what learning during decoding gains: tau by thousand tokens of long texts, without and with `adaptation`.

    python benchmarks/adaptation.py --max-new-tokens 2000

Texts are unlike what drafters are usually trained on: code, French, Spanish, a long story, a report. Each is decoded
with the option off and on, in changing order, at each of `--temperatures`; 0 is greedy. A text never ends early. "same
texts" counts the calls whose text is that of the option's other value: all of them in float32.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from runner import decoded, dtype_of, in_turns, keep, loaded_target, names, options, print_table

if TYPE_CHECKING:
    from runner import Decoded

PROMPTS = {
    "code": "Write a complete Python module that manages a library: classes, docstrings, unit tests. Write all of it.",
    "french": "Écris une longue histoire en français sur un marin qui découvre une île inconnue, en dix chapitres.",
    "spanish": "Escribe en español un cuento muy largo sobre un relojero y su hija, con muchos capítulos.",
    "story": "Write a very long story with many chapters about a lighthouse keeper, her brother and a lost ship.",
    "report": "Write a detailed report of many sections about the history of the railway in Europe.",
}
_EACH = 1000  # tokens
_WAYS = {"off": False, "on": True}


def temperatures(text: str) -> list[float]:
    """Reads a comma-separated list of temperatures."""
    try:
        found = [float(part) for part in names(text)]
    except ValueError:
        found = [-1.0]
    if min(found, default=-1.0) < 0.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected temperatures of 0 or more, as in 0,1")
    return found


def tau_by_part(accepted: Sequence[int], each: int = _EACH) -> list[float]:
    """Returns the tokens per round of each part of a text of `each` tokens, by the accepted tokens of its rounds."""
    parts: list[list[int]] = []
    length = 0
    for count in accepted:
        place = length // each
        parts += [[] for _ in range(place + 1 - len(parts))]
        parts[place].append(count + 1)
        length += count + 1
    return [sum(part) / len(part) for part in parts if part]


def with_adaptation(drafter: Any, value: bool, ngram_length: int | None) -> Any:
    """Returns the drafter with other options, and the same weights."""
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    other.generation_config.adaptation = value
    if ngram_length is not None:
        other.generation_config.ngram_length = ngram_length
    return other


def sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def compared(given: argparse.Namespace, target: Any, tokenizer: Any, drafters: Any) -> Iterator[dict[str, Any]]:
    """Yields the figures of each text and temperature."""
    import torch

    from hf_hsdraft.runtime.prompt_inputs import encode_prompts

    tokens = given.max_new_tokens

    def decode(inputs: Any, drafter: Any, call: Any) -> Decoded:
        torch.manual_seed(given.seed)
        return decoded(target, inputs, tokens, drafter, min_new_tokens=tokens, **call)

    chosen = {name: PROMPTS[name] for name in given.texts}
    inputs = encode_prompts(target, tokenizer, list(chosen.values()))
    calls = [(name, one, t) for name, one in zip(chosen, inputs, strict=True) for t in given.temperatures]
    for drafter in drafters.values():
        decoded(target, inputs[0], 64, drafter)
    for turn, (name, one, temperature) in enumerate(calls):
        ways = {way: partial(decode, one, drafter, sampling(temperature)) for way, drafter in drafters.items()}
        done = in_turns(ways, given.repeats, warm_up=0, begin=turn)
        yield {
            "text": name,
            "temperature": temperature,
            "same": all(a.texts == b.texts for a, b in zip(*done.values(), strict=True)),
            "tau": {way: tau_by_part(calls[0].statistics.accepted_lengths) for way, calls in done.items()},
            "seconds": {way: min(each.seconds for each in calls) for way, calls in done.items()},
        }


def gain(on: float, off: float) -> str:
    return f"{100 * (on / off - 1):+.1f}%"


def cells(found: dict[str, Any]) -> list[Any]:
    """Returns a row of the table."""
    off, on = (found["tau"][way] for way in _WAYS)
    taus = [", ".join(f"{tau:.2f}" for tau in part) for part in (off, on)]
    gains = ", ".join(gain(b, a) for a, b in zip(off, on, strict=False))
    seconds = [found["seconds"][way] for way in _WAYS]
    return [found["text"], found["temperature"], *taus, gains, *seconds, gain(*seconds), found["same"]]


_COLUMNS = ("text", "T", "tau, off", "tau, on", "gain", "s, off", "s, on", "speed", "same text")


def main(arguments: Sequence[str] | None = None) -> None:
    shared = {"target": None, "drafter": ..., "max_new_tokens": 2000, "repeats": 1, "dtype": "float32", "device": "cpu"}
    parser = options(__doc__, **shared, seed=1, json=None)
    parser.add_argument("--texts", type=names, default=list(PROMPTS), help=f"default: {','.join(PROMPTS)}")
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 1.0], help="default: 0,1")
    parser.add_argument("--ngram-length", type=int, help="0 for no n-grams; default: the drafter's")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.texts) - PROMPTS.keys()):
        parser.error(f"--texts: unknown {', '.join(unknown)}; expected some of {', '.join(PROMPTS)}")
    from hf_hsdraft.generate.by_name import load_drafter

    target, tokenizer = loaded_target(given)
    figures = []
    for name in given.drafter:
        drafter = load_drafter(name, dtype_of(given), given.device)
        ways = {way: with_adaptation(drafter, value, given.ngram_length) for way, value in _WAYS.items()}
        found = list(compared(given, target, tokenizer, ways))
        figures.append({"drafter": name, "texts": found})
        print(f"{name}, {given.dtype}, {given.max_new_tokens} tokens, taus by {_EACH} tokens\n")
        print_table(_COLUMNS, map(cells, found))
    keep(given.json, {"adaptation": figures})


if __name__ == "__main__":
    main()
