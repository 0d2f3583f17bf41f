"""Drafters of the published families with random weights, and the drafts of their sessions."""

from __future__ import annotations

import copy
from functools import partial

import torch
from conftest import VOCAB
from oracles.format_parity import randomise

from hf_hsdraft import BlockDrafter, CausalLMDrafter, EagleConfig, EagleDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask, Call
from hf_hsdraft.methods.block.configuration import Sight
from hf_hsdraft.methods.distillation.layer_subset import with_layers
from hf_hsdraft.methods.eagle.configuration import LatentSizes
from hf_hsdraft.methods.flashmap import FlashMapConfig, FlashMapDrafter
from hf_hsdraft.methods.published.decoder_layer import LayerSizes

STEPS = 4
BLOCKS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "plain": {"markov_rank": 0},
    "fill-in": {"markov_rank": 0, "sample_from_anchor": False},
    "sliding": {"sights": (Sight(5, True, True), Sight(4))},
    "selector": {"markov_rank": 0, "selector_rank": 8, "selector_top_k": 6, "conv_kernel_size": 2},
    "xpress": {"markov_rank": 0, "xpress_rank": 8, "sample_from_anchor": False},
    "part": {"draft_vocab_ids": tuple(range(1, VOCAB, 3))},
    "own mask": {"learned_mask": True, "markov_rank": 0},
}
EAGLES = {
    "eagle3": {},
    "eagle3, three layers": {"num_hidden_layers": 3, "windows": (None, 8, None)},
    "eagle3, norm_output": {"norm_output": True, "norm_before_residual": True},
    "peagle": {"mask_token_id": 3, "own_embedding": True},
    "eagle1": {
        "fuses_embedding": True, "own_head": False, "target_tap_layers": (-1,), "last_tap_is_normed": True,
        "fc_bias": True, "draft_vocab_ids": (9, 3, 11, 5, 7, 40, 41, 8, 6, 4),
    },
    "eagle3, latent": {"latent": {"kv_lora_rank": 10, "rotary_dim": 4, "v_head_dim": 6, "q_lora_rank": 12}},
}  # fmt: skip


def drafts_much(drafter, **options):
    """Sets options by which it drafts as much as it may, whatever the machine."""
    known = {"node_cost": 0.0, "depth_cost": 0.0, "tree_sizing": "fixed", "ngram_length": 0, "tree_size": 40}
    for name, value in {**known, "beam_width": 5, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def make_block_drafter(target, kind: str = "vanilla", **overrides) -> BlockDrafter:
    fields = {"num_draft_steps": STEPS, "num_hidden_layers": 2, "markov_rank": 8, "mask_token_id": 3, **BLOCKS[kind]}
    fields |= {"intermediate_size": 48, **overrides}
    drafter = BlockDrafter.for_target(target, **fields).eval()
    randomise(drafter)
    if drafter.config.has_own_head:
        drafter.take_head(target.get_output_embeddings(), fields["draft_vocab_ids"])
    return drafts_much(drafter)


def make_eagle(target, kind: str = "eagle3", seed: int = 1, **overrides) -> EagleDrafter:
    torch.manual_seed(seed)
    fields = {"num_draft_steps": STEPS, **EAGLES[kind], **overrides}
    if latent := fields.pop("latent", None):
        like = vars(LayerSizes.like(target.config)) | {"num_key_value_heads": target.config.num_attention_heads}
        fields["sizes"] = LatentSizes(**{**like, **latent})
    config = EagleConfig.for_target(target, **fields)
    drafter = EagleDrafter(config).eval()
    drafter.reset_parameters(std=0.1 if config.fuses_embedding else 0.3)  # its states are not normed
    return drafts_much(drafter)


def make_flashmap(target, **_) -> FlashMapDrafter:
    config, layers = target.config, (0, 2)
    sizes = {"vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size, "block_size": STEPS}
    width = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "cond_dim": 8, "time_embed_dim": 8}
    grids = {"1": [0.0, 1.0], "2": [0.0, 0.8, 1.0]}
    fields = {**sizes, **width, "num_hidden_layers": 2, "target_layer_ids": layers, "jump_grids": grids}
    drafter = FlashMapDrafter(FlashMapConfig(**fields)).eval()
    randomise(drafter)
    return drafts_much(drafter)


def near(target, noise: float = 0.02, seed: int = 1, layers: int | None = None):
    """A model whose drafts are often right and often wrong: the target's first layers with noise on the weights."""
    model, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return model if layers is None else with_layers(model, range(layers))


def make_lm(target, **_) -> CausalLMDrafter:
    return drafts_much(CausalLMDrafter(near(target)))


PUBLISHED = {
    **{f"block, {kind}": partial(make_block_drafter, kind=kind) for kind in BLOCKS},
    **{kind: partial(make_eagle, kind=kind) for kind in EAGLES},
}


def session_of(drafter, target, rows: int = 1):
    return drafter.session(Call(target, rows, DraftOptions.of(drafter)))


@torch.no_grad()
def drafts(session, roots: dict[int, int]):
    """The trees after the roots of some rows."""
    return session.draft([Ask(row, root, STEPS, 24, 5) for row, root in roots.items()])


def assert_same_tree(tree, other) -> None:
    assert tree.tokens == other.tokens and tree.parents == other.parents
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(other.scores), atol=1e-4, rtol=1e-4)
