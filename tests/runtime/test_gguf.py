"""GGUF files as targets: whose weights are loaded, and which names are understood."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli import main as cli
from hf_hsdraft.drafters.base import auto_drafter
from hf_hsdraft.runtime import target_loading
from hf_hsdraft.runtime.target_loading import load_target, load_tokenizer

gguf = pytest.importorskip("gguf")
VOCAB, HIDDEN, INNER = 64, 32, 48


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_hsdraft"


def write(path, seed):
    """Writes a tiny Llama and returns its embedding; files of all seeds have the same size."""
    torch.manual_seed(seed)
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, VOCAB))])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights["token_embd"]


def embedding(name):
    return load_target(str(name), torch.float32)[0].get_input_embeddings().weight


def test_files_of_one_name_and_size_have_their_own_weights(tmp_path):
    paths = [tmp_path / folder / "model.gguf" for folder in ("one", "other")]
    written = [write(path, seed) for seed, path in enumerate(paths)]
    assert paths[0].stat().st_size == paths[1].stat().st_size
    for _ in range(2):  # dequantised, and out of the copies
        for path, expected in zip(paths, written, strict=True):
            assert torch.equal(embedding(path), expected)


def test_the_fields_of_a_file_are_parsed_once(tmp_path, monkeypatch):
    parsed, parse, reader = [], gguf.GGUFReader._build_fields, gguf.GGUFReader
    monkeypatch.setattr(reader, "_build_fields", lambda self, *args: parsed.append(1) or parse(self, *args))
    expected = write(tmp_path / "model.gguf", 0)
    assert torch.equal(embedding(tmp_path / "model.gguf"), expected)
    assert len(parsed) == 1 and gguf.GGUFReader is reader


def test_threads_may_dequantise_files_at_once(tmp_path):
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    written = [write(path, seed) for seed, path in enumerate(paths)]
    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(lambda path: target_loading.dequantised(path, torch.float32), paths))) == 3
    for path, expected in zip(paths, written, strict=True):
        assert torch.equal(embedding(path), expected)


def test_a_replaced_file_is_another_one_although_size_mtime_and_inode_are_the_same(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, 0)
    before = path.stat()
    embedding(path)
    expected = write(tmp_path / "new.gguf", 1)
    path.write_bytes((tmp_path / "new.gguf").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert torch.equal(embedding(path), expected)


def test_a_file_is_dequantised_once(tmp_path, copies, monkeypatch):
    path = tmp_path / "model.gguf"
    expected = write(path, 0)
    embedding(path)
    monkeypatch.setattr(target_loading, "_dequantise", lambda *_: pytest.fail("again"))
    assert torch.equal(embedding(path), expected) and len(list(copies.glob("model-*"))) == 1


def test_a_folder_that_holds_only_a_file_means_that_file(tmp_path):
    expected = write(tmp_path / "downloaded" / "model.gguf", 0)
    assert torch.equal(embedding(tmp_path / "downloaded"), expected)
    assert load_tokenizer(str(tmp_path / "downloaded"))("ab")["input_ids"] == [2]
    (tmp_path / "downloaded" / "other.gguf").touch()
    with pytest.raises(ValueError, match=r"model\.gguf, other\.gguf: name the one file"):
        embedding(tmp_path / "downloaded")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="holds no model: expected a folder with config"):
        embedding(tmp_path / "empty")


def test_a_user_is_told_of_the_file_and_not_of_its_copy(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(auto_drafter.logger, "warning", logged.append)
    path = tmp_path / "model.gguf"
    write(path, 0)
    model, tokenizer = load_target(str(path), torch.float32)
    AutoDrafter.for_target(model, tokenizer, local_files_only=True)
    assert "trained for model.gguf is at hand" in logged[-1]
    assert f"`hsdraft train --target {path} --chat-template FILE --out my-drafter` trains a drafter" in logged[-1]


def test_what_drafting_takes_is_estimated_for_a_file(tmp_path):
    write(tmp_path / "downloaded" / "model.gguf", 0)
    for name in ("downloaded", "downloaded/model.gguf"):
        for options in (["training"], ["decoding", "--tau", "2"]):
            outcome = CliRunner().invoke(cli.app, ["estimate", options[0], str(tmp_path / name), *options[1:]])
            assert outcome.exit_code == 0, outcome.exception


def test_a_copy_that_others_can_write_to_is_made_again(tmp_path, copies):
    path = tmp_path / "model.gguf"
    expected = write(path, 0)
    embedding(path)
    [copy] = copies.glob("model-*")
    for harm in ("folder", "file"):
        weights = copy / "model.safetensors"
        weights.write_bytes(b"of another user")
        (copy if harm == "folder" else weights).chmod(0o777)
        assert torch.equal(embedding(path), expected), harm
