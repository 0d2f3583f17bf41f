"""Decodes a tiny random model of every type of transformers with and without drafts, and writes `docs/SUPPORT.md`.

    python benchmarks/support.py --out docs/SUPPORT.md

It exits with 1 if a text differs from plain decoding's or drafting raised an error.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner import names, options

if TYPE_CHECKING:
    from oracles.support import Support

TASKS = ("causal", "seq2seq", "image-text", "speech", "mtp")
_OUTCOMES = {
    "tree": "trees",
    "chain": "chains",
    "refused": "refused",
    "error": "error",
    "plain fails": "unknown: plain `generate()` fails with the tiny model",
    "not built": "unknown: no tiny model was built",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--tasks", type=names, default=TASKS, help=f"default: {','.join(TASKS)}")
    parser.add_argument("--only", type=names, default=[], help="model types; default: all")
    given = parser.parse_args(arguments)
    if not set(given.tasks) <= set(TASKS):
        parser.error(f"--tasks: expected some of {', '.join(TASKS)}")
    from oracles.support import check_layers, check_type, model_types, types_with_layers
    from transformers.utils.logging import disable_progress_bar

    from hf_hsdraft.training.files import write_complete

    disable_progress_bar()
    rows = []
    for task in given.tasks:
        own = task == "mtp"
        for model_type, *classes in types_with_layers() if own else model_types(task):
            if not given.only or model_type in given.only:
                rows.append(row := check_layers(model_type) if own else check_type(task, model_type, *classes))
                print(f"{row.task} {row.model_type}: {row.drafts} {row.reason}", flush=True)
                gc.collect()
    text = as_markdown(rows)
    if given.out is None:
        print(text)
    else:
        write_complete(given.out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        print(f"{len(rows)} types, table written to {given.out}")
    return int(any(row.differs or row.drafts == "error" for row in rows))


def as_markdown(rows: Sequence[Support]) -> str:
    """Returns one table, in which types share a row where they share what happened, and reasons a footnote."""
    import torch
    import transformers
    from oracles.support import NEW_TOKENS

    lines = [
        "# Which targets can be drafted for",
        "",
        "Search this page for the `model_type` in your model's `config.json`. Types without a note decode the text of "
        "plain `generate()`, drafted by a model or n-grams, for one prompt, a padded batch, and a prompt longer than "
        "the target's windows.",
        "",
        "Drafters of [every format that is read](drafters.md#what-loads) draft trees for a prompt or a batch, and "
        "chains where trees are not listed here; `python benchmarks/format_parity.py` compares their drafts with the "
        "authors'.",
        "",
        f"Written by `python benchmarks/support.py`, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: a tiny random model of each type, in float32, {NEW_TOKENS} tokens, with drafts that are "
        "right to a random depth.",
        "",
        _counted(rows),
        "",
        "| task | drafts | types |",
        "|---|---|---|",
    ]
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for row in sorted(rows, key=lambda row: (list(TASKS).index(row.task), list(_OUTCOMES).index(row.drafts))):
        alike.setdefault((row.task, row.drafts, _notes(row)), []).append(row.model_type)
    numbers: dict[str, int] = {}
    for (task, drafts, notes), types in alike.items():
        marks = "".join(f" [{numbers.setdefault(note, len(numbers) + 1)}]" for note in notes)
        lines.append(f"| {task} | {_OUTCOMES[drafts]}{marks} | {', '.join(types)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in numbers.items()), ""])


def _counted(rows: Sequence[Support]) -> str:
    counts = Counter(row.drafts for row in rows)
    decodable = len(rows) - counts["not built"] - counts["plain fails"]
    return (
        f"Of {len(rows)} types {decodable} decode here: {counts['tree']} with trees, {counts['chain']} with chains, "
        f"{counts['refused']} refused, {counts['error']} errors; {sum(row.differs for row in rows)} texts differ."
    )


def _notes(row: Support) -> tuple[str, ...]:
    """What a row of the table is marked with. Errors of a tiny model without drafts say nothing about drafting."""
    if row.drafts in ("not built", "plain fails"):
        return ()
    trials = {"batches": row.batch, "n-grams": row.ngrams, "long prompts": row.long}
    expected = ("-", "equal") if row.drafts != "refused" else ("-", "refused")
    told = [
        f"{name} {'draft' if found == 'equal' else f'are {found}' if found == 'refused' else found}"
        for name, found in trials.items()
        if found not in expected
    ]
    told += ["the text differs"] if row.equal is False else []
    return tuple(note.strip().rstrip(".") for note in (row.reason, *told) if note)


if __name__ == "__main__":
    sys.exit(main())
