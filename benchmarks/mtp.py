"""Compares drafts by a target's own layers for multi-token prediction with transformers' `use_mtp`.

    python benchmarks/mtp.py

It decodes with a tiny random target of every model type that has such layers. The target counts: a token is followed
by the next one. Right layers know that, wrong ones do not. transformers drafts a chain with one token a layer, for
one text. Right and wrong layers bound what a checkpoint's layers can do; tau of real ones lies between.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from runner import keep, options, print_table

NEW_TOKENS = 48


def decoded(target: Any, layers: Any, rows: int, shape: str, do_sample: bool = False) -> tuple[bool, float]:
    """Returns whether a drafted text is plain decoding's, and its tau; `shape` is tree, chain or transformers."""
    import torch
    from oracles.mtp_targets import each_plain, forwards_of
    from oracles.plain_texts import padded

    from hf_hsdraft import MtpDrafter
    from hf_hsdraft.drafters.mtp.layers import MtpLayers

    inputs, call = padded(rows), {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    plain = each_plain(target, inputs, 7, **call)
    torch.manual_seed(7)
    if shape == "transformers":
        with mock.patch("transformers.modeling_layers.MtpModel.from_pretrained", lambda *_, **__: layers):
            texts, forwards = forwards_of(target, lambda: target.generate(**inputs, **call, use_mtp=True))
        return texts.tolist() == plain.tolist(), NEW_TOKENS / forwards
    drafter = MtpDrafter(target, MtpLayers(layers))
    config = drafter.generation_config
    config.tree_sizing, config.tree_size, config.beam_width = "fixed", 64, 1 if shape == "chain" else 4
    config.ngram_length = 0  # texts that repeat themselves would be drafted without the layers
    out = target.generate(**inputs, **call, assistant_model=drafter, return_dict_in_generate=True)
    return out.sequences.tolist() == plain.tolist(), out.statistics.tau


def measure(model_type: str, count: int) -> dict[str, Any]:
    """Returns a row of the table: taus of right and wrong layers, and whether all texts were plain decoding's."""
    from oracles.mtp_targets import counting

    from hf_hsdraft.drafters.mtp.layers import OWN_NAMES

    row: dict[str, Any] = {"type": model_type, "layers": count}
    exact = []
    for shape, rows in (("transformers", 1), ("chain", 1), ("tree", 1), ("chain", 4), ("tree", 4)):
        taus = []
        for right in (True, False):
            if shape == "transformers" and model_type in OWN_NAMES:
                continue
            target, layers = counting(model_type, count, right)
            same, tau = decoded(target, layers, rows, shape)
            taus.append(tau)
            if shape != "transformers":
                drawn, _ = decoded(target, layers, rows, shape, do_sample=True)
                exact += [same, drawn]
        row[f"{shape}, {rows}"] = " / ".join(f"{tau:.2f}" for tau in taus) or "-"
    return {**row, "exact": f"{sum(exact)} of {len(exact)}"}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, json=None).parse_args(arguments)
    from oracles.mtp_targets import LAYERS

    rows = [measure(model_type, count) for model_type, count in LAYERS.items()]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    keep(given.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
