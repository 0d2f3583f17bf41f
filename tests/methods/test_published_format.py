"""A format of another project is a table: its names of our fields and tensors, and what it may not say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, as_plain, make_target
from family_helpers import make_eagle
from safetensors.torch import save_file
from session_helpers import padded

from hf_hsdraft.methods.eagle.formats import FORMATS
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.format_table import OURS, taps, told

[EAGLE3] = [form for form in FORMATS if form.name == "EAGLE-3"]
OTHER = replace(
    EAGLE3,
    rows={
        **EAGLE3.rows,
        "vocab_size": told("sizes.tokens", "vocab_size"),
        "draft_vocab_size": told("sizes.drafted", "sizes.tokens"),
        "target_tap_layers": taps({"read_after": 1}),
        "norm_before_residual": told("residual_is_normed", default=OURS),
    },
    tensors={"layers.0.": ("first.", "midlayer.")},
    ignored=(*EAGLE3.ignored, "with_gates"),
    expected={"value_scale": (1, 1.0)},
)
CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIG |= {"sizes": {"tokens": VOCAB}, "read_after": [0, 2, 4], "residual_is_normed": True, "with_gates": True}


@pytest.fixture
def folder(tmp_path):
    target = make_target(num_hidden_layers=6)
    drafter = make_eagle(target, target_tap_layers=(1, 3, 5), norm_before_residual=True)
    state = {name.replace("layers.0.", "first."): tensor for name, tensor in drafter.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    return target, drafter, tmp_path


def opened(folder, **fields) -> AnyCheckpoint:
    sizes = vars(folder[1].config.sizes)
    own = {name: sizes[name] for name in CONFIG.keys() & sizes.keys()}
    (folder[2] / "config.json").write_text(json.dumps({**CONFIG, **own, **fields}))
    return AnyCheckpoint.open(folder[2])


def test_a_table_reads_names_of_fields_and_tensors(folder):
    target, drafter, _ = folder
    loaded = OTHER.drafter.of_format(OTHER, opened(folder))
    assert loaded.taps == (1, 3, 5) and loaded.config.norm_before_residual and loaded.config.vocab_size == VOCAB
    assert all(torch.equal(each, drafter.state_dict()[name]) for name, each in loaded.state_dict().items())
    as_plain(target, loaded, padded(1)["input_ids"], max_new_tokens=12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value_scale": 0.6}, r"value_scale=0.6 in config.json is invalid: expected 1 or 1.0"),
        ({"with_sinks": True}, r"config.json has with_sinks=true: this is not known here"),
        ({"sizes": {"tokens": "many"}}, r"tokens='many' in config.json, sizes is invalid: expected an integer from 1"),
        ({"sizes": None}, r"config.json, sizes has no tokens: expected an integer from 1"),
        ({"read_after": [4, 2]}, r"read_after=\[4, 2\] in config.json is invalid: expected ascending"),
        ({"read_after": []}, r"read_after=\[\] in config.json is invalid: expected a list of integers"),
        ({"residual_is_normed": 1}, r"residual_is_normed=1 in config.json is invalid: expected true or false"),
    ],
)
def test_what_a_table_does_not_allow_is_named(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        OTHER.read(opened(folder, **fields))
    told = OTHER.describe(opened(folder, **fields))
    assert "cannot be loaded" in told
