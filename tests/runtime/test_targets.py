"""Targets by what they can do: trees, chains, or a clear error; the text is always the target's own."""

import contextlib
import functools
import gc
import sys
import weakref
from unittest.mock import ANY

import pytest
import torch
from conftest import LLAMA, SIZES, VOCAB, make_drafter, make_target, model_of, scripted
from oracles.support import check_type, model_types
from rounded_target import rounded_target
from test_contract import NEW, Steps, batch_of, compare, make_windowed
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    DynamicCache,
)

from hf_hsdraft import CachebackDrafter, attach, harmless
from hf_hsdraft.core.cache_name import given_cache
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.hidden_state.draft_session import HSDraftSession
from hf_hsdraft.engine.drafting import Drafting
from hf_hsdraft.runtime import target_limits
from hf_hsdraft.runtime.misreading import rounds_inputs


def text(target, rows: int = 1, drafter=None, inputs=None, **call):
    """A greedy text, plain or drafted."""
    call = {"do_sample": False, "max_new_tokens": NEW, **call}
    return target.generate(**(batch_of(rows) if inputs is None else inputs), **call, assistant_model=drafter)


def agree(target, rows: int = 1, drafter=None, **call) -> None:
    plain = text(target, rows, **call)
    assert text(target, rows, drafter or make_drafter(target), **call).tolist() == plain.tolist()


def check(target, expected: str, rows: int = 1, **kwargs):
    plain, drafted = compare(target, make_drafter(target), batch_of(rows), **kwargs)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.statistics.draft_kind == expected, drafted.statistics.reason
    assert drafted.statistics.tau > 1.0
    return drafted.statistics


TREES = {
    "windows in all layers": ("mistral", {**LLAMA, "sliding_window": 8, "head_dim": 8}),
    "windows beside full attention": (
        "qwen2",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "learned positions": (
        "opt",
        {"ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 32, "init_std": 0.3},
    ),
    "experts": ("mixtral", {**LLAMA, "num_local_experts": 4}),
    "latent attention": (
        "deepseek_v3",
        {**LLAMA, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        | {"qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "chunked attention by position": (
        "llama4_text",
        {**LLAMA, "attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
        | {"num_experts_per_tok": 1, "no_rope_layers": [1, 1, 0], "moe_layers": [1]}
        | {"layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
    ),
}
CHAINS = {
    "ALiBi": ("bloom", {"n_layer": 3, "n_head": 4, "initializer_range": 0.3}, "no position_ids"),
    "ALiBi with positions": (
        "falcon", {"alibi": True, "num_hidden_layers": 3, "num_attention_heads": 4}, "cache slots",
    ),
    "local attention by slot": (
        "gpt_neo", {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4}, "locally",
    ),
    "recurrent layers": (
        "qwen3_next",
        {**LLAMA, "num_hidden_layers": 4, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "recurrent layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_trees(name, rows):
    model_type, fields = TREES[name]
    check(model_of(model_type, **fields), "tree", rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_where_a_tree_cannot_be(name, rows):
    model_type, fields, reason = CHAINS[name]
    assert reason in check(model_of(model_type, **fields), "chain", rows, max_new_tokens=24).reason


def test_a_bare_cache_of_the_caller():
    """It does not know which layers have windows; the masks do."""
    check(make_windowed(), "tree", past_key_values=None)
    target = make_windowed()
    drafted = text(target, drafter=make_drafter(target), past_key_values=DynamicCache())
    assert drafted.tolist() == text(target).tolist()


BART = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "init_std": 0.3, "max_position_embeddings": 128, "forced_eos_token_id": None}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "initializer_factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "fields", "layers", "rows"),
    [
        ("bart", {**BART, "encoder_layers": 1, "decoder_layers": 3}, 3, 1),
        ("bart", {**BART, "encoder_layers": 4, "decoder_layers": 2}, 2, 2),
        ("t5", {**T5, "num_layers": 3}, 3, 2),
        ("t5", {**T5, "num_layers": 4, "num_decoder_layers": 2}, 2, 1),
    ],
)
def test_encoder_decoders(model_type, fields, layers, rows):
    """transformers counts the encoder's layers where it selects hidden states, and in the configuration of T5."""
    target = model_of(model_type, AutoModelForSeq2SeqLM, decoder_start_token_id=1, **fields)
    drafter, states = make_drafter(target), {"return_dict_in_generate": True, "output_hidden_states": True}
    assert drafter.config.target_num_hidden_layers == layers
    plain = text(target, rows, **states)
    drafted = text(target, rows, scripted(drafter, plain.sequences[:, 1:]), **states)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert text(target, rows, drafter, max_new_tokens=12).tolist() == plain.sequences[:, :13].tolist()
    assert drafted.statistics.tau > 1.1 and len(drafted.encoder_hidden_states) == len(plain.encoder_hidden_states)
    for ours, theirs in zip(drafted.decoder_hidden_states, plain.decoder_hidden_states, strict=True):
        assert [state.shape for state in ours] == [state.shape for state in theirs]


def test_an_encoder_decoder_with_beams_decodes_without_the_drafter():
    target = model_of("t5", AutoModelForSeq2SeqLM, **T5, num_layers=2, decoder_start_token_id=0)
    call = {"input_ids": torch.arange(2, 8)[None], "num_beams": 2, "max_new_tokens": 8}
    assert target.generate(**call, assistant_model="ngrams").equal(target.generate(**call))


def test_static_caches_of_encoder_decoders_are_refused():
    target = model_of("t5", AutoModelForSeq2SeqLM, **T5, num_layers=2, decoder_start_token_id=0)
    prompt = torch.randint(5, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    call = {"do_sample": False, "max_new_tokens": 12, "cache_implementation": "static"}
    plain = target.generate(prompt, **call)
    drafter = CachebackDrafter([plain[0, 1:].tolist()])
    with pytest.raises(DraftingRefused, match="static cache"):
        target.generate(prompt, **call, assistant_model=drafter)
    with attach(target, drafter) as attachment:
        assert torch.equal(target.generate(prompt, **call), plain)
    assert attachment.statistics.calls == 0


def test_a_hidden_state_that_is_left_out_is_named(monkeypatch):
    target = make_target()
    drafter, forward = make_drafter(target), type(target).forward

    @harmless
    def forgetful(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(None for _ in outputs.hidden_states)
        return outputs

    monkeypatch.setattr(type(target), "forward", forgetful)
    with pytest.raises(ValueError, match="hidden state 1 of its layers, which it leaves out"):
        text(target, drafter=drafter)


def test_an_image_in_the_prompt():
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    language = {"model_type": "llama", **SIZES, **LLAMA}
    parts = {"vision_config": vision, "text_config": language, "image_token_id": 96}
    target = model_of("llava", AutoModelForImageTextToText, **parts)
    inputs = batch_of(1)
    inputs["input_ids"][0, 3:7] = 96
    inputs["input_ids"][0, 7:].clamp_(max=90)
    inputs["pixel_values"] = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    plain, drafted = compare(target, make_drafter(target), inputs, suppress_tokens=[96])
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.statistics.draft_kind == "tree", drafted.statistics.reason
    drafted = text(target, drafter=make_drafter(target), inputs=inputs, suppress_tokens=[96])
    assert drafted.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_an_image_with_positions_of_several_axes(rows):
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 14, "mlp_ratio": 1}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {**SIZES, **LLAMA, "rope_parameters": rope}
    tokens = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    target = model_of("qwen2_vl", AutoModelForImageTextToText, vision_config=vision, text_config=text, **tokens)
    inputs = batch_of(rows)
    inputs["input_ids"].clamp_(max=90)
    inputs["input_ids"][:, 5] = 94
    inputs["input_ids"][:, 6:8] = 96
    types = (inputs["input_ids"] == 96).int()
    inputs["mm_token_type_ids"] = types
    inputs["image_grid_thw"] = torch.tensor([[1, 2, 4]] * rows)
    inputs["pixel_values"] = torch.randn(8 * rows, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(1))
    special = [93, 94, 95, 96]
    plain, drafted = compare(target, make_drafter(target), inputs, suppress_tokens=special)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.statistics.draft_kind == "tree", drafted.statistics.reason


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("kind", "model_type"), [("dynamic", "llama"), ("longrope", "llama"), ("longrope", "phi3")])
def test_rotary_frequencies_that_change_with_the_length(kind, model_type, rows):
    """No draft reaches over the change, and beyond it drafts go on where the library's frequencies allow."""
    if kind == "dynamic":
        target = make_target(
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, max_position_embeddings=20
        )
    else:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope |= {"original_max_position_embeddings": 20, "factor": 4.0}
        fields = {**LLAMA, "max_position_embeddings": 80, "rope_parameters": rope}
        target = model_of("phi3" if model_type == "phi3" else "llama", **fields)
        if model_type == "phi3":  # it computes its cache anew at the change
            target.config.original_max_position_embeddings = 20
    # As in real models, a draft has fewer tokens than the length at which frequencies change.
    plain, drafted = compare(target, make_drafter(target, tree_size=8), batch_of(rows))
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.statistics.tau > 1.05
    ends = [int(plain.sequences[0, 12 + 6])]  # a row that has ended is read on with the others
    plain, drafted = compare(target, make_drafter(target, tree_size=8), batch_of(rows), eos_token_id=ends)
    assert drafted.sequences.tolist() == plain.sequences.tolist()


def test_flex_attention_reads_trees():
    """Where flex attention itself reads rightly: on some processors its compiled kernel gives NaN for some lengths."""
    target, other = make_target("flex_attention"), make_target("sdpa")
    if not torch.equal(*(text(each, max_new_tokens=28) for each in (target, other))):
        pytest.skip("plain decoding by flex attention and by sdpa give different texts here")
    check(target, "tree")


def test_an_attention_without_masks_gets_chains_and_one_warning(caplog):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register("causal_only", sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("causal_only", sdpa_mask)
    statistics = check(make_target("causal_only"), "chain")
    assert "'causal_only'" in statistics.reason


class PackedLinear(torch.nn.Module):
    """As quantisation libraries make them: integers and scales, no weight that could be read as one."""

    def __init__(self, linear: torch.nn.Linear, name: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127, False)
        packed = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)
        setattr(self, name, packed)
        self.name = name

    def unpacked(self):
        return getattr(self, self.name).to(self.scale.dtype) * self.scale

    @harmless
    def forward(self, x):
        return x @ self.unpacked().T


@pytest.mark.parametrize("name", ["weight", "qweight"])
def test_quantised_targets(name):
    """The text is the quantised target's; the drafter gets at its output rows too, packed as they are."""
    target = make_target()
    for layer in target.model.layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj, name)
    target.lm_head = PackedLinear(target.lm_head, name)
    drafter = make_drafter(target, draft_vocab_size=40)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    expected = target.lm_head.unpacked()[weights.vocab_ids]
    torch.testing.assert_close(weights.head, expected, atol=1e-5, rtol=1e-5)
    agree(target, 1, drafter)
    check(target, "tree", 2)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_target_whose_products_round_their_inputs_is_refused(seed, rows):
    """Its text depends on how many tokens are read at once: no draft can be exact."""
    drafter = CachebackDrafter(tree_sizing="fixed", tree_size=6)
    with pytest.raises(ValueError, match=r"one by one|round what they are given"):
        text(rounded_target(14, 36), drafter=drafter, inputs=batch_of(rows, 20, seed))


class OfIntegers(torch.nn.Linear):
    """Multiplies 8-bit integers of each row, as 8-bit activations do."""

    @harmless
    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return torch.nn.functional.linear((x / scale).round() * scale, self.weight)


class OfUnpacked(torch.nn.Linear):
    """Multiplies in float32 by weights of 4 bits, which it unpacks."""

    @harmless
    def forward(self, x):
        scale = self.weight.abs().amax(-1, keepdim=True) / 7
        return torch.nn.functional.linear(x, (self.weight / scale).round() * scale)


class OfUnknownWidth(OfIntegers):
    """Does not say how many inputs it has."""

    in_features = property(lambda self: None)


class OfHalf(torch.nn.Linear):
    """Multiplies in half precision, whatever it is given."""

    @harmless
    def forward(self, x):
        return torch.nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "refused"), [(OfIntegers, True), (OfUnknownWidth, True), (OfHalf, True), (OfUnpacked, False)]
)
def test_one_layer_of_another_library_that_rounds_its_inputs_is_found(kind, refused):
    """By the layer itself: whether texts differ would be a matter of luck."""
    target = make_target()
    target.model.layers[1].mlp.up_proj.__class__ = kind
    if refused:
        with pytest.raises(ValueError, match="round what they are given"):
            text(target, drafter=make_drafter(target))
    else:
        agree(target)
        check(target, "tree")


class Gate(torch.nn.Module):
    """Weighs experts, with no product alone that could be tested."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 32))

    @harmless
    def forward(self, x):
        return (x @ self.weight.T).softmax(dim=-1)


class Places(Gate):
    """Returns the same for all inputs."""

    @harmless
    def forward(self, x):
        return self.weight[: x.shape[1]]


@pytest.mark.parametrize("kind", [Gate, Places])
def test_a_layer_of_another_library_that_is_no_product_is_not_taken_for_one_that_rounds(kind):
    assert not rounds_inputs(torch.nn.Sequential(kind()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_misreads_trees_is_found_out(monkeypatch, dtype):
    """Chains are read rightly, so chains it is."""
    target = make_target().to(dtype)
    misread_beyond(monkeypatch, target, 0, "trees")
    drafter = make_drafter(target).to(dtype)
    statistics = text(target, drafter=drafter, max_new_tokens=12, return_dict_in_generate=True).statistics
    assert statistics.draft_kind == "chain" and "otherwise than one by one" in statistics.reason


def test_a_refusal_is_not_remembered():
    """In training mode dropout makes every reading another one; afterwards the target is as good as ever."""
    target = make_target(attention_dropout=0.5)
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="cannot be drafted for"):
        text(target.train(), drafter=drafter)
    check(target.eval(), "tree")


@pytest.mark.parametrize(
    ("reuse", "builder", "rows"),
    [("resample", "beam", 1), ("resample", "beam", 3), ("ensemble", "beam", 3), ("none", "gumbel", 1)],
)
def test_every_way_of_drafting_gives_chains_where_only_they_are_read(reuse, builder, rows):
    model_type, fields, _ = CHAINS["ALiBi"]
    target = model_of(model_type, **fields)
    drafter = make_drafter(target, initializer_range=0.5)
    drafter.generation_config.reuse, drafter.generation_config.tree_builder = reuse, builder
    for new in (NEW, 3):
        agree(target, rows, drafter, max_new_tokens=new)


@pytest.mark.parametrize("hooked", [False, True])
def test_time_steps_are_limited_where_plain_decoding_limits_them(hooked):
    """transformers limits them in a forward over several tokens, and not in one over a single token."""
    fields = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    layers = {"attn_layer_indices": [1], "num_hidden_layers": 3, "time_step_limit": (0.2, 0.6)}
    target, seen = model_of("bamba", **{**LLAMA, **fields, **layers}), []
    if hooked:
        target.model.layers[0].mamba.register_forward_hook(harmless(lambda *_: seen.append(1)))
    options = {**batch_of(1), "do_sample": False, "max_new_tokens": 24, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    plain = target.generate(**options)
    seen.clear()
    for seed in range(3):
        drafter = scripted(make_drafter(target), plain.sequences[:, 12:], seed)
        output = target.generate(**options, assistant_model=drafter)
        assert output.sequences.tolist() == plain.sequences.tolist()
        for logits, expected in zip(output.logits, plain.logits, strict=True):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert output.statistics.tau > 1 and bool(seen) == hooked
    assert target.model.layers[0].mamba.time_step_limit == (0.2, 0.6)


@pytest.mark.parametrize("name", ["ALiBi", "recurrent layers"])
def test_rows_in_step_end_at_their_own_time(name):
    model_type, fields, _ = CHAINS[name]
    target = model_of(model_type, **fields)
    free = text(target, 3)
    ends = [int(free[0, 12 + 3]), int(free[2, 12 + 8])]
    plain, drafted = compare(target, make_drafter(target), batch_of(3), eos_token_id=ends)
    assert drafted.sequences.tolist() == plain.sequences.tolist()


def test_what_a_target_can_is_tried_once():
    target, calls = make_target(), []
    drafter = make_drafter(target)
    target.register_forward_hook(harmless(lambda *_: calls.append(1)))
    counts = []
    for _ in range(2):
        calls.clear()
        output = text(target, drafter=drafter, return_dict_in_generate=True)
        counts.append(len(calls) - output.statistics.target_forwards)
    assert counts[0] > 0 and counts[1] == 0
    gone = weakref.ref(target)
    del target, drafter, output
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 6), (torch.bfloat16, 8)])
def test_a_trial_takes_few_forwards_and_a_short_call_none(rows, dtype, expected):
    """Four tokens are read one at a time, and again in two drafts; half precision measures its rounding twice."""
    target = make_target().to(dtype)
    drafter = make_drafter(target).to(dtype)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None
    with trial_forwards(target) as forwards:
        for new in (5, NEW):
            output = text(target, rows, drafter, max_new_tokens=new, return_dict_in_generate=True)
            assert forwards(output.statistics.target_forwards) == (expected if new == NEW else 0)
            assert output.statistics.draft_kind == ("tree" if new == NEW else "chain")
            assert ("in so short a call" in output.statistics.reason) == (new != NEW)


def test_short_calls_of_a_large_target_draft_once_they_could_have_won_a_trial_back(tuned):
    tuned(trial_numbers=0, trial_room=2 * NEW + 1)
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None
    told = [text(target, 1, drafter, return_dict_in_generate=True).statistics.reason for _ in range(4)]
    assert ["in so short a call" in each for each in told] == [True, True, False, False]
    output = text(make_target(), 1, drafter, max_new_tokens=2 * NEW + 2, return_dict_in_generate=True)
    assert not output.statistics.reason


@pytest.mark.parametrize("new", [3, 5, 8, NEW])
def test_the_first_call_streams_all_of_its_text_in_order(new):
    target, streamer = make_target(), Steps()
    expected = text(target, max_new_tokens=new)[0].tolist()
    text(target, drafter=make_drafter(target), max_new_tokens=new, streamer=streamer)
    assert streamer.tokens == expected and streamer.ended == 1


def test_nothing_is_streamed_by_a_target_that_turns_out_to_be_refused(monkeypatch):
    target, streamer = make_target(), Steps()
    misread_beyond(monkeypatch, target, 0, "drafts")
    with pytest.raises(ValueError, match="several tokens at once are read otherwise than one by one"):
        text(target, drafter=make_drafter(target), streamer=streamer)
    assert streamer.tokens == batch_of(1)["input_ids"].flatten().tolist() and not streamer.ended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["trees", "drafts", ""])
def test_a_text_that_repeats_itself_is_no_proof(monkeypatch, what, dtype):
    """Its tokens could stand for one another, so the target is tried with others."""
    target = make_target().to(dtype)
    suppressed = {"suppress_tokens": [token for token in range(VOCAB) if token != 5]}
    drafter, plain = make_drafter(target).to(dtype), text(target, **suppressed)
    if what:
        misread_beyond(monkeypatch, target, 0, what)
    if what == "drafts":
        with pytest.raises(ValueError, match="several tokens at once"):
            text(target, drafter=drafter, **suppressed)
        return
    output = text(target, drafter=drafter, **suppressed, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.statistics.draft_kind == ("chain" if what else "tree"), output.statistics.reason


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_next"])
def test_after_a_failed_trial_the_cache_holds_what_plain_decoding_reads(monkeypatch, model_type, tuned):
    fields = {"mistral": TREES["windows in all layers"][1], "qwen3_next": CHAINS["recurrent layers"][1]}
    target = model_of(model_type, **fields.get(model_type, LLAMA))
    tuned(sure_length=16)
    assert repeating(target, new=10)[1].statistics.tau > 1.0  # short texts are known to be read rightly
    misread_beyond(monkeypatch, target, 20, "drafts")
    plain, drafted = repeating(target)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert "nothing is drafted beyond" in drafted.statistics.reason


def repeating(target, rows: int = 1, prompt: int = 12, new: int = 30, **drafting):
    """A plain and a drafted text, by a drafter that knows the plain one: its drafts are as long as they may be."""
    inputs = {"input_ids": torch.randint(2, VOCAB, (rows, prompt), generator=torch.Generator().manual_seed(prompt))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for row in range(1, rows):
        inputs["attention_mask"][row, : 2 * row] = 0
    kwargs = {**inputs, "do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True}
    plain = target.generate(**kwargs)
    texts = [text[prompt:].tolist() for text in plain.sequences]
    drafter = CachebackDrafter(texts, **{"tree_sizing": "fixed", "tree_size": 6, **drafting})
    return plain, target.generate(**kwargs, assistant_model=drafter)


@pytest.mark.parametrize("rows", [1, 3])
def test_queries_scaled_by_cache_slot(rows):
    """No tree lies over a step of the scale, and rows of a batch that reaches one go in step."""
    fields = {**LLAMA, "attention_chunk_size": 64, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
    fields |= {"num_experts_per_tok": 1, "no_rope_layers": [1, 0, 0], "moe_layers": [1], "attn_scale": 2.0}
    target = model_of("llama4_text", **fields, floor_scale=24)
    for prompt in (12, 20, 23):  # a trial would lie over the step, or just before it
        plain, drafted = repeating(target, rows, prompt, new=28)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        ids = plain.sequences[:, :prompt]
        settings = {"inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "max_new_tokens": 14}
        agree(target, **settings)  # trees with many branches
    assert drafted.statistics.tau > 1.5
    assert drafted.statistics.draft_kind == ("tree" if rows == 1 else "chain")
    assert repeating(target, rows, 26, new=8)[1].statistics.draft_kind == "tree"  # no step within the call


CHOOSING = {
    "index_topk": (
        "hy_v4",
        {**LLAMA, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        | {"qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "index_topk": 24, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "keep_window_size": ("doge", {**LLAMA, "keep_window_size": 24}),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CHOOSING)
def test_keys_chosen_by_scores_that_may_be_equal(name, rows):
    """Which of equal keys are chosen depends on how many stand in the cache: nothing is drafted beyond so many."""
    model_type, fields = CHOOSING[name]
    target = model_of(model_type, **fields)
    for prompt in (8, 22, 30):
        plain, drafted = repeating(target, rows, prompt, new=20)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert (
            name in drafted.statistics.reason and "nothing is drafted beyond position 23" in drafted.statistics.reason
        )
    assert repeating(target, rows, 8, new=12)[1].statistics.tau > 1.5


def test_a_cache_layer_that_cannot_take_back_what_it_keeps_is_refused():
    """It inherits `crop` and says that it may be cropped, but keeps compressed entries too."""
    fields = {**LLAMA, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2}
    fields |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 16}
    fields |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "hc_mult": 2, "num_hash_layers": 0}
    target = model_of("deepseek_v4", **fields)
    with pytest.raises(ValueError, match="cannot be put back to the last accepted token"):
        repeating(target)


def misread_beyond(monkeypatch, target, length: int, what: str) -> None:
    """A planted fault: beyond a length, several tokens at once are read without their mask or positions."""
    forward = type(target.model).forward

    @harmless
    def short_sighted(self, *args, attention_mask=None, position_ids=None, **kwargs):
        cached = given_cache(kwargs).get_seq_length() if given_cache(kwargs) is not None else 0
        several = cached > 0 and position_ids is not None and position_ids.shape[-1] > 1
        if several and cached >= length:
            if what == "trees" and attention_mask is not None and attention_mask.dim() == 4:
                attention_mask = None
            elif what == "drafts":
                position_ids = torch.zeros_like(position_ids)
        kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", short_sighted)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("what", "goes_on"), [("trees", "chains are drafted"), ("drafts", "nothing is drafted")])
def test_long_texts_are_tried_again(monkeypatch, what, goes_on, named, tuned):
    """In the middle of a call, at lengths that the configuration names and wherever the text has doubled."""
    target = make_target()
    if named:
        target.config.keep_last = 32
        misread_beyond(monkeypatch, target, 32, what)
    else:
        tuned(sure_length=16)
        misread_beyond(monkeypatch, target, 25, what)  # twice the 13 tokens of the first trial are sure
    for _ in range(2):
        plain, drafted = repeating(target)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert goes_on in drafted.statistics.reason and "otherwise than one by one" in drafted.statistics.reason
        assert drafted.statistics.tau > 1.1
    assert repeating(target, new=8)[1].statistics.reason == ""  # short texts are read as before


@contextlib.contextmanager
def trial_forwards(target):
    """Yields a function that returns the number of forwards since it was called last, but for some that are known."""
    calls = []

    def since(known: int) -> int:
        count = len(calls) - known
        calls.clear()
        return count

    handle = target.register_forward_hook(harmless(lambda *_: calls.append(1)))
    yield since
    handle.remove()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_misreading_is_remembered_once_it_is_found_again(monkeypatch, rows, tuned):
    """In the middle of a call; shorter texts are drafted for as before, and the first trial is known."""
    target, found = make_target(), []
    tuned(sure_length=16)
    misread_beyond(monkeypatch, target, 25, "drafts")
    with trial_forwards(target) as forwards:
        for _ in range(4):
            plain, drafted = repeating(target, rows, new=26)
            assert drafted.sequences.tolist() == plain.sequences.tolist()
            assert "nothing is drafted beyond" in drafted.statistics.reason
            found.append(forwards(26 + drafted.statistics.target_forwards))
    assert found[0] > found[1] > 0 and found[2:] == [0, 0]
    assert repeating(target, rows, new=8)[1].statistics.reason == ""


def test_a_call_of_one_text_goes_on_where_it_finds_that_long_texts_are_misread(monkeypatch, tuned):
    """It tries that with its own tokens, which stay in the cache."""
    target = make_target()
    tuned(sure_length=16)
    misread_beyond(monkeypatch, target, 25, "drafts")
    drafter = make_drafter(target)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None
    call = {"max_new_tokens": 24, "return_dict_in_generate": True}
    plain = text(target, **call)
    for _ in range(3):
        drafted = text(target, drafter=drafter, **call)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert "nothing is drafted beyond" in drafted.statistics.reason
        assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def misread_when_odd(monkeypatch, target) -> None:
    """A planted fault: several tokens at once are read without their positions while the text is called odd."""
    forward = type(target.model).forward

    @harmless
    def reading(self, *args, position_ids=None, **kwargs):
        cached = given_cache(kwargs) is not None and given_cache(kwargs).get_seq_length() > 0
        if cached and self.config.is_odd and position_ids is not None and position_ids.shape[-1] > 1:
            position_ids = torch.zeros_like(position_ids)
        return forward(self, *args, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", reading)


def test_a_refusal_that_is_due_to_one_text_is_forgotten(monkeypatch):
    """Two texts in a row have to show it; then it holds for texts up to a length, and longer ones are tried again."""
    target = make_target()
    misread_when_odd(monkeypatch, target)

    def forwards_of(odd: bool, prompt: int = 12) -> int:
        target.config.is_odd = odd
        if odd:
            with pytest.raises(ValueError, match="otherwise than one by one"):
                repeating(target, prompt=prompt, new=4)
            return forwards(4 + 1)
        plain, drafted = repeating(target, prompt=prompt, new=4)
        assert drafted.sequences.tolist() == plain.sequences.tolist() and drafted.statistics.draft_kind == "tree"
        return forwards(4 + drafted.statistics.target_forwards)

    with trial_forwards(target) as forwards:
        assert forwards_of(odd=True) > 0 and forwards_of(odd=False) > 0 and forwards_of(odd=False) == 0
    target = make_target(max_position_embeddings=1024)
    with trial_forwards(target) as forwards:
        assert forwards_of(odd=True) > 0 and forwards_of(odd=True) > 0 and forwards_of(odd=True) == 0
        assert forwards_of(odd=False, prompt=300) > 0


def dropping(inner):
    """Drops all tokens of a forward beyond the eighth."""

    class Dropping(torch.nn.Module):
        @harmless
        def forward(self, x):
            return inner(x) * (torch.arange(x.shape[1]) < 8)[:, None]

    return Dropping()


@pytest.mark.parametrize("chains", [False, True])
def test_a_finding_holds_for_drafts_no_larger_than_the_ones_tried(chains):
    """Close to the last position there is room for short drafts only."""
    target = model_of("gpt2", n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.3)
    target.transformer.h[1].mlp = dropping(target.transformer.h[1].mlp)
    target.config.alibi = chains  # by which trees are ruled out
    for prompt, new in ((248, 8), (12, 40)):
        ids = torch.randint(2, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(prompt))
        call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new}
        plain = target.generate(ids, **call)
        with attach(target, CachebackDrafter(plain[:, prompt:].tolist(), tree_sizing="fixed")) as attachment:
            assert target.generate(ids, **call).equal(plain)
    assert attachment.statistics.calls == 0 and "otherwise than one by one" in str(attachment.statistics.stepped_aside)


@pytest.mark.parametrize("what", ["trees", "drafts"])
def test_rows_that_can_be_drafted_for_no_more_cost_what_plain_decoding_costs(monkeypatch, what):
    """They are at different lengths by then, so each is read as a tree of one node."""
    target = make_target()
    target.config.keep_last = 32
    misread_beyond(monkeypatch, target, 32, what)
    plain, drafted = repeating(target, rows=3, new=40)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert "nothing is drafted beyond" in drafted.statistics.reason

    reads, told = [], []
    forward, rest, observe = type(target.model).forward, Drafting.rest, HSDraftSession.observe

    @harmless
    def counting(self, input_ids=None, *args, **kwargs):
        reads.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    def resting(self):
        rest(self)
        assert not any(getattr(self.session, "_pending", ()))
        del reads[:], told[:]

    def noting(self, news):
        told.append(news)
        observe(self, news)

    monkeypatch.setattr(type(target.model), "forward", counting)
    monkeypatch.setattr(HSDraftSession, "observe", noting)
    monkeypatch.setattr(Drafting, "rest", resting)
    for drafter in (CachebackDrafter(plain.sequences.tolist()), make_drafter(target)):
        call = {"max_new_tokens": 40, "return_dict_in_generate": True}
        plain, drafted = text(target, 3, **call), text(target, 3, drafter, **call)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        furthest = int(drafted.statistics.reason.split(" tokens:")[0].split()[-1])
        left = plain.sequences.shape[1] - furthest
        assert set(reads) == {1} and len(reads) <= left + 3, "rows that are behind catch up by a few tokens"
        assert not told
        assert drafted.statistics.drafted_nodes[-3:] == [0, 0, 0]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_next"])
def test_a_trial_in_the_middle_of_a_call_leaves_no_trace(model_type, rows, tuned):
    tuned(sure_length=16)
    fields = {"mistral": TREES["windows in all layers"][1], "qwen3_next": CHAINS["recurrent layers"][1]}
    target = model_of(model_type, **fields.get(model_type, LLAMA))
    with trial_forwards(target) as forwards:
        plain, drafted = repeating(target, rows, tree_size=16)  # as large as the other drafts
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert drafted.statistics.reason == ("" if model_type != "qwen3_next" else ANY)
        assert forwards(30 + drafted.statistics.target_forwards) > 0
        plain, drafted = compare(target, make_drafter(target), batch_of(rows))
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        # Of texts as long as the first one's, everything is known.
        assert forwards(NEW + drafted.statistics.target_forwards) == 0


@pytest.mark.parametrize("padded", [True, False])
def test_two_rows_of_a_batch_are_tried(monkeypatch, padded, tuned):
    """The first trial and one in the middle of a call: of a large batch they would take longer than many rounds."""
    tuned(sure_length=16)
    target, sizes = make_target(), []
    forward = type(target).forward

    @harmless
    @functools.wraps(forward)
    def counted(self, *args, **inputs):
        sizes.append(len(inputs["input_ids"]))
        return forward(self, *args, **inputs)

    monkeypatch.setattr(type(target), "forward", counted)
    inputs = batch_of(5)
    if not padded:
        inputs = {"input_ids": inputs["input_ids"][:1].repeat(5, 1)}
    plain, drafted = compare(target, make_drafter(target), inputs, max_new_tokens=24)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert "".join(map(str, sizes)).count("52222225") == 2  # six forwards a trial; later rows leave the batch


def test_how_long_a_trial_counts():
    target = make_target()
    assert [target_limits.known_until(target, length) for length in (13, 200, 300)] == [256, 400, 600]
    target.config.sliding_window, target.config.max_window_layers = 200, 28
    assert [target_limits.known_until(target, length) for length in (13, 200, 201)] == [200, 200, 402]
    assert target_limits.known_until(target, 201, doubling=False) == sys.maxsize


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "bloom", "lfm3", "mamba"])
def test_the_support_table_tells_trees_chains_and_refusals(model_type):
    rows = [check_type("causal", *row) for row in model_types("causal") if row[0] == model_type]
    expected = {"bloom": "chain", "lfm3": "chain", "mamba": "refused"}.get(model_type, "tree")
    assert [row.drafts for row in rows] == [expected]
    assert rows[0].equal is (None if expected == "refused" else True)
    assert bool(rows[0].reason) == (expected != "tree")


def test_the_support_table_has_targets_whose_outputs_lack_statistics():
    [row] = [check_type("speech", *row) for row in model_types("speech") if row[0] == "whisper"]
    assert (row.drafts, row.equal, row.batch, row.ngrams) == ("chain", True, "equal", "equal") and row.tau > 1
