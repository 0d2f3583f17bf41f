"""The parts of published drafters against the layers of transformers, and attention against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hf_hsdraft.core.tensors import batched_attention
from hf_hsdraft.methods.published.decoder_layer import Attention, FeedForward, LayerSizes, rotary_of

ROPES = {
    "plain": {"rope_theta": 5000.0},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_layers_parts_compute_what_transformers_layers_do(rope, qk_norm):
    torch.manual_seed(0)
    kind, attention = (Qwen3Config, Qwen3Attention) if qk_norm else (LlamaConfig, LlamaAttention)
    config = kind(**SIZES, **ROPES[rope], attn_implementation="eager")
    theirs, ours = attention(config, 0), Attention(sizes := LayerSizes(**SIZES, qk_norm=qk_norm))
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(1, 9, 32), torch.arange(20, 29)[None]
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, LlamaRotaryEmbedding(config)(x, positions), mask)
    turned = rotary_of(ROPES[rope], sizes)(positions, torch.float32)
    keys, values = ours.keys(x, turned).transpose(1, 2), ours.values(x).transpose(1, 2)
    seen = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    mixed = batched_attention(ours.queries(x, turned), keys, values, seen)
    torch.testing.assert_close(ours.o_proj(mixed), expected, atol=1e-5, rtol=1e-5)
    mlp = LlamaMLP(LlamaConfig(**SIZES))
    feed = FeedForward(sizes.hidden_size, sizes.intermediate_size, sizes.hidden_act)
    feed.load_state_dict(mlp.state_dict())
    torch.testing.assert_close(feed(x), mlp(x))


def test_frequencies_keep_float32_when_a_drafter_is_cast():
    rotary = rotary_of({}, LayerSizes(**SIZES))
    cos, _ = rotary(torch.tensor([3001]), torch.bfloat16)
    exact, _ = rotary_of({}, LayerSizes(**SIZES))(torch.tensor([3001]), torch.float32)
    assert torch.equal(cos, exact.bfloat16())
