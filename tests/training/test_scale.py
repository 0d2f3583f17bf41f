"""Several processes, sharded and offloaded targets, and runs that are killed: always what one undisturbed run makes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, write_prompts
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_hsdraft import HSDrafter, harmless
from hf_hsdraft.cli.main import app
from hf_hsdraft.runtime.target_loading import load_target
from hf_hsdraft.training.loop import trainer
from hf_hsdraft.training.loop.run_folder import steps_done
from hf_hsdraft.training.loop.trainer import DrafterTrainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, EVERY = 8, 2  # 20 conversations in batches of 4: the second epoch begins after step 5


@pytest.fixture(scope="module")
def home(chatty, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    chatty.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_prompts(folder / "prompts.jsonl", 24)
    return folder


def arguments(home: Path, out: str, batch: int = 4, **more: object) -> list[str]:
    options = {
        "target": home / "target", "prompts": home / "prompts.jsonl", "out": home / out, "max-steps": STEPS,
        "eval-steps": EVERY, "logging-steps": 1, "eval-conversations": 4, "eval-prompts": 2, "max-new-tokens": 12,
        "answer-batch-size": 4, "temperature": 0, "num-draft-steps": 3, "tree-size": 6, "draft-vocab-size": 40,
        "eval-new-tokens": 6, "per-device-train-batch-size": batch, "disable-tqdm": True, "device": "cpu",
        "dtype": "float32",
    }  # fmt: skip
    options |= {name.replace("_", "-"): value for name, value in more.items()}
    given = (str(part) for name, value in options.items() for part in (f"--{name}", value))
    return ["train", "--no-cache-taps", *given]  # taps on disk are rounded to bfloat16


def train(home: Path, out: str, **more: object) -> Path:
    result = CliRunner().invoke(app, arguments(home, out, **more), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return home / out


@pytest.fixture(scope="module")
def alone(home) -> Path:
    """The run that all others are compared with: one process, nobody kills it."""
    return train(home, "alone")


def parts(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "data" / "data").glob("*.parquet"))


def rows(out: Path) -> dict[str, list]:
    """Messages by key; every row is there once."""
    found = [row for part in parts(out) for row in parquet.read_table(out / "data" / "data" / part).to_pylist()]
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["messages"] for row in found}


def history(out: Path) -> list[dict]:
    state = out / "checkpoints" / f"checkpoint-{STEPS}" / "trainer_state.json"
    return json.loads(state.read_text())["log_history"]


def assert_same_run(out: Path, expected: Path, tolerance: float) -> None:
    assert rows(out) == rows(expected) and len(rows(out)) == 24
    for name in ("loss", "eval_loss", "eval_tau"):
        curve, goal = (
            {entry["step"]: entry[name] for entry in history(run) if name in entry} for run in (out, expected)
        )
        assert curve == pytest.approx(goal, abs=tolerance)
    assert [entry["step"] for entry in history(out) if "loss" in entry] == list(range(1, STEPS + 1))
    weights, goals = (
        load_file(run / "checkpoints" / f"checkpoint-{STEPS}" / "model.safetensors") for run in (out, expected)
    )
    assert weights.keys() == goals.keys()
    furthest = max(float((value - goals[name]).abs().max()) for name, value in weights.items())
    assert furthest < tolerance
    assert HSDrafter.from_pretrained(out).config.draft_vocab_size == 40


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--multi_gpu"], id="replicated"),  # accelerate's name for several processes of one machine
        pytest.param(["--config_file", str(EXAMPLES / "accelerate_fsdp.yaml")], id="fsdp"),
        pytest.param(
            ["--config_file", str(EXAMPLES / "accelerate_deepspeed.yaml")],
            id="deepspeed",
            marks=pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is missing"),
        ),
    ],
)
def test_two_processes_learn_what_one_learns_of_twice_the_batch(home, alone, options, request):
    sharded = "--config_file" in options
    out = home / request.node.callspec.id
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", str(port), "-m", "hf_hsdraft.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*launch, *arguments(home, out.name, batch=2)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("target sharded over 2 processes" in done.stdout) == sharded
    assert {name[:8] for name in parts(out)} == ({"part-000"} if sharded else {"part-000", "part-001"})
    assert_same_run(out, alone, tolerance=1e-5)


def command(options: list[str], log: Path) -> None:
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        app(options)


def test_killed_at_any_moment_a_run_goes_on(home, alone, monkeypatch):
    """`kill -9` while answers are made and while training; each time the same command goes on."""
    out = home / "killed"
    # Processes forked from one that has everything imported start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_hsdraft.cli", "hf_hsdraft.training.loop.run", "datasets"])
    moments = random.Random(0)
    for reached in ("data/data/part-000-00001.parquet", "data/data/part-000-00003.parquet", "checkpoints/checkpoint-2",
                    "checkpoints/checkpoint-4"):  # fmt: skip
        process = context.Process(target=command, args=(arguments(home, out.name), home / "killed.log"))
        process.start()
        while process.is_alive() and not (out / reached).exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (home / "killed.log").read_text()
        assert not (out / "model.safetensors").exists()
    steps = []
    compute = DrafterTrainer.compute_loss
    monkeypatch.setattr(
        DrafterTrainer,
        "compute_loss",
        lambda self, *a, **k: steps.append(self.state.global_step) or compute(self, *a, **k),
    )
    done = steps_done(out)
    assert_same_run(train(home, out.name), alone, tolerance=1e-5)
    assert done and steps == list(range(done, STEPS))


def test_targets_in_memory_and_on_disk(home, alone, monkeypatch):
    """What `device_map="auto"` makes of a target that is too large for its devices, the head being offloaded too."""
    places = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
              "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    target, _ = load_target(str(home / "target"), torch.float32, places)
    assert target.model.layers[1].mlp.up_proj.weight.is_meta and target.device.type == "cpu"
    whole = AutoModelForCausalLM.from_pretrained(home / "target")
    assert torch.equal(target.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    monkeypatch.setattr(
        "hf_hsdraft.runtime.target_loading.load_target", lambda name, dtype, _: load_target(name, dtype, places)
    )
    assert_same_run(train(home, "offloaded"), alone, tolerance=1e-5)


def test_recomputing_layers_changes_nothing_but_memory(home, alone, monkeypatch):
    recomputed = []
    checkpoint = trainer.checkpoint
    monkeypatch.setattr(trainer, "checkpoint", lambda *a, **k: recomputed.append(a[0].__name__) or checkpoint(*a, **k))
    assert_same_run(train(home, "recomputed", gradient_checkpointing=True), alone, tolerance=1e-5)
    assert set(recomputed) == {"forward"}


def test_device_maps_are_for_one_process(home, monkeypatch):
    target, _ = load_target(str(home / "target"), torch.float32, "auto")
    assert not target.get_output_embeddings().weight.is_meta
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start one process"):
        load_target(str(home / "target"), torch.float32, "auto")


def _synced(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    target = make_target()
    drafter = make_drafter(target)
    ids = torch.randint(5, VOCAB, (1 + rank, 10), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    if rank:
        mask[1, :4] = 0  # another kind of call than the other process makes
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6 + 12 * rank}
    plain = target.generate(ids, **kwargs)
    counted: list[int] = []
    handle = target.register_forward_hook(harmless(lambda *_: counted.append(1)))
    drafted = target.generate(ids, **kwargs, assistant_model=drafter, synced_gpus=True)
    handle.remove()
    torch.save((torch.equal(plain, drafted), len(counted)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_synced_processes_run_equally_many_forwards(tmp_path):
    """As sharded targets need it; texts of other lengths, one of them padded, one of them a batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_synced, (port, str(tmp_path)), nprocs=2)
    (same, forwards), (same_too, forwards_too) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert same and same_too
    assert forwards == forwards_too
