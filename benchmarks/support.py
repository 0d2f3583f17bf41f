"""Decodes a tiny random model of every type of transformers with and without drafts, and writes `docs/SUPPORT.md`.

    python benchmarks/support.py --out docs/SUPPORT.md

It ends with 1 if a text differs from plain decoding's or drafting raised an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner import names, options

TASKS = ("causal", "seq2seq", "image-text", "speech")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--tasks", type=names, default=TASKS, help=f"default: {','.join(TASKS)}")
    parser.add_argument("--only", type=names, default=[], help="model types; default: all")
    given = parser.parse_args(arguments)
    if not set(given.tasks) <= set(TASKS):
        parser.error(f"--tasks: expected some of {', '.join(TASKS)}")
    from oracles.support import as_markdown, check_all
    from transformers.utils.logging import disable_progress_bar

    from hf_hsdraft.training.files import write_complete

    disable_progress_bar()
    rows = []
    for row in check_all(given.tasks, given.only):
        rows.append(row)
        print(f"{row.task} {row.model_type}: {row.drafts} {row.reason}", flush=True)
    text = as_markdown(rows)
    if given.out is None:
        print(text)
    else:
        write_complete(given.out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        print(f"{len(rows)} types, table written to {given.out}")
    return int(any(row.differs or row.drafts == "error" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
