"""Files of other projects: found, read field by field, and checked before anything is allocated."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_hsdraft.hub.drafter_files import DamagedFile
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.fields import Fields

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "d2t": torch.arange(4)}


def folder_with(path, config=None, pickled=False):
    (path / "config.json").write_text(json.dumps(config or {}))
    if pickled:
        torch.save(WEIGHTS, path / "pytorch_model.bin")
    else:
        save_file(WEIGHTS, path / "model.safetensors")
    return path


@pytest.mark.parametrize("pickled", [False, True])
def test_shapes_and_tensors_are_read_from_either_kind_of_file(tmp_path, pickled):
    found = AnyCheckpoint.open(folder_with(tmp_path, pickled=pickled))
    assert found.shapes == {"a": (2, 3), "d2t": (4,)}
    for name, tensor in found.tensors():
        assert torch.equal(tensor, WEIGHTS[name])
    found.check_shapes({"a": (2, 3)}, optional={"d2t": (4,)})


@pytest.mark.parametrize("kept", [0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_truncated_file_is_damaged(tmp_path, pickled, kept):
    save_file({"a": torch.zeros(99, 99)}, folder_with(tmp_path) / "model.safetensors")
    if pickled:  # from some size on the end of a truncated archive is looked for before its beginning
        (tmp_path / "model.safetensors").unlink()
        torch.save({"a": torch.zeros(99, 99)}, tmp_path / "pytorch_model.bin")
    path = tmp_path / ("pytorch_model.bin" if pickled else "model.safetensors")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(DamagedFile, match="is damaged"):
        _ = AnyCheckpoint.open(tmp_path).shapes


@pytest.mark.parametrize("pickled", [False, True])
def test_weights_that_are_no_numbers_are_damaged(tmp_path, pickled):
    folder_with(tmp_path, pickled=pickled)
    spoilt = {**WEIGHTS, "a": torch.full((2, 3), torch.nan)}
    if pickled:
        torch.save(spoilt, tmp_path / "pytorch_model.bin")
    else:
        save_file(spoilt, tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match="a holds values that are NaN or infinite"):
        list(AnyCheckpoint.open(tmp_path).tensors())


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    folder_with(tmp_path, pickled=True)
    torch.save({"a": pytest.approx}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DamagedFile, match="is damaged"):
        _ = AnyCheckpoint.open(tmp_path).shapes


def test_a_file_of_torch_before_its_zip_format_is_read(tmp_path):
    folder_with(tmp_path, pickled=True)
    path = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    found = AnyCheckpoint.open(tmp_path)
    assert found.shapes == {"a": (2, 3), "d2t": (4,)}
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in found.tensors())
    torch.save({"a": pytest.approx}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFile, match="is damaged"):
        _ = AnyCheckpoint.open(tmp_path).shapes


def test_tensors_that_do_not_fit_are_named(tmp_path):
    found = AnyCheckpoint.open(folder_with(tmp_path))
    with pytest.raises(ValueError, match=r"missing: b; unknown: d2t; of other shapes: a \[2, 3\] instead of \[3, 2\]"):
        found.check_shapes({"a": (3, 2), "b": (1,)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_that_are_packed_are_refused_before_they_are_read(tmp_path, dtype, pickled):
    weights = {**WEIGHTS, "b": torch.ones(2).to(dtype)}
    if pickled:
        torch.save(weights, folder_with(tmp_path, pickled=True) / "pytorch_model.bin")
    else:
        save_file(weights, folder_with(tmp_path) / "model.safetensors")
    found, shapes = AnyCheckpoint.open(tmp_path), {"a": (2, 3), "b": (2,), "d2t": (4,)}
    with pytest.raises(ValueError, match=r"quantised by an unknown.*\(b\)|no floating-point numbers \(b of "):
        found.check_shapes(shapes)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_prefix_of_all_names_is_left_out(tmp_path, pickled):
    weights = {"model.fc.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
    if pickled:
        torch.save(weights, folder_with(tmp_path, pickled=True) / "pytorch_model.bin")
    else:
        save_file(weights, folder_with(tmp_path) / "model.safetensors")
    found = AnyCheckpoint.open(tmp_path)
    assert found.shapes == {"fc.weight": (2, 2), "norm.weight": (2,), "lm_head.weight": (3,)}
    assert {name for name, _ in found.tensors(["fc.weight", "lm_head.weight"])} == {"fc.weight", "lm_head.weight"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_git_lfs_leaves_for_weights_is_told(name, tmp_path):
    folder_with(tmp_path, pickled=True)
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    with pytest.raises(OSError, match=rf"{name} is a pointer of Git LFS, not the weights: run `git lfs pull` in "):
        _ = AnyCheckpoint.open(tmp_path).shapes


def test_missing_weights_say_what_to_download(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"hydra_lm_head.pt: download the weights beside config.json"):
        _ = AnyCheckpoint.open(tmp_path).shapes
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    listed = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    told = "has no model-00002-of-00002.safetensors: model.safetensors.index.json lists this shard: download it"
    with pytest.raises(OSError, match=told):
        _ = AnyCheckpoint.open(tmp_path).shapes


def test_fields_name_what_is_wrong():
    fields = Fields({"size": 0, "rate": "x", "on": 1, "ids": [1, -2], "kind": "z", "extra": True}, "config.json")
    for read, told in (
        (lambda: fields.integer("size"), r"size=0 in config.json is invalid: expected an integer from 1"),
        (lambda: fields.number("rate"), r"rate='x' in config.json is invalid: expected a number above 0"),
        (lambda: fields.flag("on"), r"on=1 in config.json is invalid: expected true or false"),
        (lambda: fields.integers("ids"), r"ids=\[1, -2\] in config.json is invalid: expected a list of integers"),
        (lambda: fields.choice("kind", ("a", "b")), r"kind='z' in config.json is invalid: expected one of a, b"),
        (lambda: fields.integer("none"), r"config.json has no none: expected an integer"),
        (lambda: fields.table("size"), r"size=0 in config.json is invalid: expected an object"),
        (lambda: fields.expect("kind", "a"), r"kind='z' in config.json is invalid: expected 'a'"),
        (fields.refuse_unread, r"config.json has extra=true: this is not known here"),
    ):
        with pytest.raises(ValueError, match=told):
            read()
    fields.ignore("extra")
    fields.refuse_unread()
    assert fields.integer("none", 3) == 3
