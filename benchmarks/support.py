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
    """Returns the table with its counts."""
    import torch
    import transformers
    from oracles.support import NEW_TOKENS

    lines = [
        "# Which targets can be drafted for",
        "",
        f"Written by `python benchmarks/support.py`, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: a tiny random model of every type, decoded in float32 with and without scripted drafts "
        f"(right to a random depth, among wrong branches), {NEW_TOKENS} tokens, one prompt and a left-padded batch "
        "of three. N-grams: one prompt with a CachebackDrafter. Long: both drafters after a prompt longer than every "
        "window that the configuration names. mtp: every type whose configuration counts layers for multi-token "
        "prediction, with an MtpDrafter of layers that predict the target's tokens.",
        "",
    ]
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        counts = Counter(row.drafts for row in mine)
        decodable = [row for row in mine if row.drafts not in ("not built", "plain fails")]
        differ = sum(row.differs for row in mine)
        lines += [
            f"## {task}",
            "",
            f"{len(mine)} types; of {len(decodable)} that plain `generate()` decodes here: {counts['tree']} trees, "
            f"{counts['chain']} chains, {counts['refused']} refused, {counts['error']} errors; {differ} differ.",
            "",
            "| type | drafts | text | batch | n-grams | long | tau | why |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in mine:
            text = {True: "equal", False: "differs", None: "-"}[row.equal]
            reason = row.reason.replace("|", "\\|")
            trials = f"{text} | {row.batch} | {row.ngrams} | {row.long}"
            lines.append(f"| {row.model_type} | {row.drafts} | {trials} | {row.tau or '-'} | {reason} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
