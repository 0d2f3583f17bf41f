"""Estimates of a training run, against hand arithmetic and against what PyTorch counts when it is really run."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import make_target
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_hsdraft import BlockDrafter, CachebackDrafter, EagleConfig, EagleDrafter, HSDraftConfig, HSDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.estimate.estimates import Device, Drafting, estimate, estimate_decoding
from hf_hsdraft.methods.estimate.reads import reads_of

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
ASKED = {
    "tokens": 1_000_000, "epochs": 2.0, "chains_per_token": 0.2, "rolled_fraction": 0.5,
    "conversations_tokens_per_step": 2048, "cached": True,
}  # fmt: skip


def llama(**sizes) -> LlamaConfig:
    return LlamaConfig(**{"vocab_size": 128_256, **sizes})


def drafter_for(config: LlamaConfig, **overrides) -> HSDraftConfig:
    fields = {
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "target_num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "draft_vocab_size": 32_000,
    }
    return HSDraftConfig(**{**fields, **overrides})


def small(**overrides) -> tuple[LlamaConfig, HSDraftConfig]:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = llama(vocab_size=96, num_key_value_heads=2, **sizes)
    fields = {"draft_vocab_size": 48, "num_draft_steps": 4, "injector_rank": 8, "injector_hidden_size": 16}
    return config, drafter_for(config, **{**fields, **overrides})


VARIANTS = [
    {},
    {"injector": "low_rank"},
    {"injector": "selector"},
    {"num_hidden_layers": 3},
    {"num_hidden_layers": 3, "num_roll_layers": 1},
    {"num_hidden_layers": 3, "num_roll_layers": 2, "num_step_modules": 3},
    {"head": "trained", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
]


def test_hand_arithmetic_on_a_small_drafter():
    config, drafter = small(injector="low_rank")
    taps = len(drafter.target_tap_layers)
    asked = {**ASKED, "tokens": 1000, "conversations_tokens_per_step": 100, "cached": False}
    figures = estimate(config, drafter, **asked, flops_per_second=1e6, world_size=4, sharded=True).figures

    fusion = (taps + 1) * 64 + (taps + 1) * 64 * 64  # norms of taps and token, then the projection
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64  # q, k and v, o, feed-forward, norms
    roll = 64 * 64 + 2 * 64  # projection, its norm, the final norm
    injector = 64 + 64 * 8 + 8 * 48
    own = fusion + layer + roll + injector
    assert figures["drafter parameters"] == own

    # 0.2 chains per position, half of them rolled 3 steps: 0.3 roll steps and 0.5 predictions.
    read = fusion + 2 * 64 * 32 + 0.2 * (layer - 2 * 64 * 32)
    drafting = 6 * read + 6 * 0.3 * (roll + layer + injector) + 4 * 0.5 * 48 * 64 + 2 * 0.5 * 48 * 64
    assert figures["drafter per token"] == pytest.approx(drafting)
    body = 6 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64
    assert figures["operations"] == pytest.approx((2 * body + drafting) * 1000 * 2)
    assert figures["time"] == pytest.approx(figures["operations"] / 4e6)
    assert figures["steps"] == 1000 * 2 / 100 / 4

    rows = 0.2 + 0.3
    memory = (body + 2 * 96 * 64) * 2 / 4  # the target, untied, in 2 bytes, a quarter of it
    memory += own * 16 + 2 * 48 * 64 * 2  # weights, gradients, Adam; rows of both heads
    memory += 100 * 3 * (taps + 1) * 64 * 4
    memory += 100 * rows * (4 * 64 + 2 * 64 + 4 * 32 + 4 * 160) * 4 + 100 * rows * 4 * 100 * 4
    assert figures["memory"] == pytest.approx(memory + 3 * 2**26 * 4)
    assert figures["taps on disk"] == 0


def run_step(drafter: HSDraftConfig, tokens: int, chains: int, rolled: int) -> tuple[float, float]:
    """Operations in weight products, and bytes kept for the backward pass of the trunk, of a real training step."""
    model, kept = HSDrafter(drafter), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    wide = drafter.target_hidden_size
    taps, embeds = torch.randn(tokens, len(drafter.target_tap_layers) * wide), torch.randn(tokens, wide)
    head, documents = torch.randn(drafter.draft_vocab_size, wide), torch.zeros(tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            arguments = (torch.arange(tokens), torch.arange(chains), documents)
            hidden = model(taps, embeds, *arguments, num_rolled=rolled).hidden_states
        size = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
        loss = torch.zeros(())
        for depth, states in enumerate(hidden):
            drafted = model.norm(states)
            logits = drafted @ head.T if model.lm_head is None else model.lm_head(drafted)
            if depth:
                logits = logits + model.injector(states, model.injector.advance(embeds[: len(states)], None))
            torch.randn(len(states), wide) @ head.T  # the teacher
            loss = loss + logits.square().mean()
        loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if "bmm" not in str(name)), size  # attention scores are bmm


@pytest.mark.parametrize("overrides", VARIANTS)
def test_a_real_step_needs_what_was_estimated(overrides):
    config, drafter = small(**overrides)
    asked = {**ASKED, "chains_per_token": 0.5, "conversations_tokens_per_step": 128}
    figures = estimate(config, drafter, **asked).figures
    assert figures["drafter parameters"] == HSDrafter(drafter).num_parameters()
    operations, kept = run_step(drafter, tokens=128, chains=64, rolled=32)
    assert figures["drafter per token"] * 128 == pytest.approx(operations, rel=0.05)
    activations = figures["trunk inputs"] + figures["layer activations"] + figures["attention weights"]
    assert activations == pytest.approx(kept, rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "parameters", "gigabytes"), [(LLAMA_1B, 1_235_814_400, 2.5), (LLAMA_8B, 8_030_261_248, 16.1)]
)
def test_well_known_targets(sizes, parameters, gigabytes):
    """Cached features free the target of memory, and take disk."""
    config = llama(**sizes)
    asked = {**ASKED, "flops_per_second": 4e14}
    found, cached = (
        estimate(config, drafter_for(config), **{**asked, "cached": kind}).figures for kind in (False, True)
    )
    assert found["target parameters"] == parameters
    assert found["target weights"] == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert found["target weights"] < found["memory"] < found["target weights"] + 20e9
    assert 0.02 < found["drafter per token"] / found["target per token"] < 1
    assert 1 < found["time"] < 1000
    assert cached["taps on disk"] == 1_000_000 * 4 * config.hidden_size * 2 and found["taps on disk"] == 0
    assert cached["target weights"] == 0
    assert found["target forwards"] == 2 * cached["target forwards"]  # two epochs against one pass
    embedding = 128_256 * config.hidden_size * 2  # still needed
    assert cached["borrowed rows"] - found["borrowed rows"] == embedding


def result_of(text: str) -> float:
    """Evaluates printed arithmetic: `2 x 3`, `1.5 GB + 20 MB`, `7 / 2`, `384 s (0.1 hours)`."""
    text = re.sub(r" s \(.*", "", text).replace(",", "").replace(" x ", " * ")
    for power, prefix in enumerate(["", "k", "M", "G", "T", "P", "E"]):
        text = re.sub(rf" {prefix}(B|FLOP)\b", f"e{3 * power}", text)
    assert re.fullmatch(r"[\d.e+*/ ]+", text), text
    return eval(text)


@pytest.mark.parametrize(("overrides", "cached"), [({}, False), *((each, True) for each in VARIANTS)])
def test_every_line_shows_arithmetic_that_is_right(overrides, cached):
    config, drafter = small(**overrides)
    found = estimate(config, drafter, **{**ASKED, "cached": cached}, flops_per_second=1e9, world_size=3, sharded=True)
    lines = found.lines
    assert len(lines) == len(found.figures) + 1
    for line, (name, value) in zip(lines[:-1], found.figures.items(), strict=True):
        title, _, text = line.partition(": ")
        assert title == name
        if " = " in text:
            _, numbers, result = text.split(" = ")
            assert result_of(numbers) == pytest.approx(value, rel=0.01)
            assert result_of(result) == pytest.approx(value, rel=0.01)
        else:
            assert value == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 0), ("epochs", float("nan")), ("chains_per_token", 0.0), ("chains_per_token", 1.5),
     ("rolled_fraction", -0.1), ("flops_per_second", 0.0)],
)  # fmt: skip
def test_impossible_numbers_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        estimate(*small(), **{**ASKED, name: value})


def test_what_does_not_fit_is_refused():
    config, _ = small()
    with pytest.raises(ValueError, match="128256"):
        estimate(config, drafter_for(llama(**LLAMA_1B)), **ASKED)
    with pytest.raises(ValueError, match="tau=0 is invalid"):
        estimate_decoding(make_target().config, CachebackDrafter(), Drafting(1, 1, 1, 0), Device(1, 1))


def test_an_estimate_of_decoding_is_the_longer_of_reading_and_multiplying():
    """Against hand arithmetic, on a device that reads slowly and on one that multiplies slowly."""
    target = make_target()
    drafter = HSDrafter(HSDraftConfig.for_target(target, draft_vocab_size=50, num_draft_steps=3))
    plan = Drafting(depth=3, width=4, nodes=10, tau=2.5, length=7)
    read = target.num_parameters() - 97 * 32
    keys = 2 * 3 * 2 * 8 * 7
    for device, rows in ((Device(1e3, 1e12), 0), (Device(1e12, 1e3), 11)):
        figures = estimate_decoding(target.config, drafter, plan, device, bytes_per_weight=4).figures
        assert figures["read by a forward of the target"] == 4 * (read + keys)
        slow = 2 * read * rows / 1e3 if rows else 4 * (read + keys) / 1e3
        assert figures["time of verifying"] == pytest.approx(slow)
        layers = sum(p.numel() for p in drafter.layers.parameters())
        per_layer_pass = 2 * layers / 1e3 if rows else 4 * layers / 1e3
        assert figures["draft: trunk layers"] == pytest.approx(3 * per_layer_pass)
        head = 50 * 32 * (2 * 3 if rows else 4) / 1e3
        assert figures["draft: head"] == pytest.approx(head)
        whole = figures["time of verifying"] + figures["time of a draft"]
        assert figures["speed-up, at most"] == pytest.approx(2.5 * figures["time of a plain step"] / whole)
    own = sum(p.numel() for n, p in drafter.named_parameters() if n.split(".")[0] in ("fuse", "layers", "injector"))
    assert figures["drafter in memory"] == 4 * own
    assert figures["draft: trunk layers"] < figures["time of a draft"] < figures["time of a round"]


def test_the_command_estimates_training_and_decoding(tmp_path):
    make_target().config.save_pretrained(tmp_path)
    shape = ["--num-hidden-layers", "3", "--num-roll-layers", "1", "--num-step-modules", "2"]
    parts = (
        "draft: context layers",
        "draft: trunk layers",
        "draft: step module 1",
        "speed-up, at most: plain steps / ",
    )
    for name, result_of, more, words in (
        ("decoding", "speed-up", ["--tau", "2.5", "--num-draft-steps", "4"], parts),
        (
            "training",
            "operations",
            [],
            ("drafter parameters: fusion + roll + layers + step modules + ", "time: unknown; "),
        ),
    ):
        result = CliRunner().invoke(app, ["estimate", name, str(tmp_path), *shape, *more])
        assert result.exit_code == 0, result.output
        assert result.output.startswith(result_of) and all(word in result.output for word in words)
        assert "assumed: a draft vocabulary of " in result.output
    arguments = ["estimate", "decoding", str(tmp_path), *shape, "--tau", "2.5", "--drafter", "mine"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0 and "mine has its own sizes" in result.output


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_step_reads_its_own_weights(depth):
    """Every layer as often as a draft of that depth runs it: g_0 the trunk, step 1 its own set, the others the last."""
    shape = {"num_hidden_layers": 3, "num_roll_layers": 2, "num_step_modules": 3}
    drafter = HSDrafter(HSDraftConfig.for_target(make_target(), draft_vocab_size=50, **shape))
    reads = {read.part: read for read in reads_of(drafter, depth, 4)}
    layer = sum(p.numel() for p in drafter.layers[0].parameters())
    assert (reads["context layers"].weights, reads["context layers"].times) == (layer, 1)
    assert (reads["trunk layers"].weights, reads["trunk layers"].times) == (2 * layer, 1)
    assert reads["step module 1"].weights == 2 * layer + 32 * 32 + 32
    times = {1: (0, 0), 2: (1, 0), 4: (1, 2)}[depth]
    assert (reads["step module 1"].times, reads["step module 2"].times) == times


@pytest.mark.parametrize(
    "drafter", [BlockDrafter.for_target, lambda target: EagleDrafter(EagleConfig.for_target(target))]
)
def test_the_weights_that_a_draft_reads_are_those_of_the_drafter(drafter):
    """Every matrix of a drafter is among the parts, but for the rows that are looked up and those of the target."""
    target = make_target()
    made = drafter(target)
    parts = {read.part: read for read in reads_of(made, 3, 4)}
    assert parts["fusion"].weights == made.fc.weight.numel()
    assert parts["layers"].weights == sum(p.numel() for p in made.layers.parameters())
    assert parts["head"].weights == 97 * 32
    assert parts["head"].borrowed == (made.lm_head is None)
