"""Loads block drafters from published files: checks first, then builds, and fills without a second copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.checks import printable
from ...hub.checkpoint import LOOSE_MASK, Checkpoint
from ..base.formats import Format, with_fields
from ..base.layer_fields import drafted_ids
from ..base.loading_arguments import Placement, take_options
from ..base.target_info import fit_of
from . import reading
from .configuration import BlockConfig
from .drafter import BlockDrafter

Reader = Callable[[Checkpoint], BlockConfig]

# Names of tensors in files by the drafter's names, where they differ.
_OF_TRANSFORMERS = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load(checkpoint: Checkpoint, read: Reader, names: Mapping[str, str], **kwargs: Any) -> BlockDrafter:
    """Loads a drafter; skips copies of the target's rows, and checks file headers before it reads weights.

    `names` are those of tensors in the files, by the drafter's, where they differ; `kwargs` as for `from_pretrained`.
    """
    placement = Placement.taken_from(kwargs)
    config = read(checkpoint)
    with torch.device("meta"):
        drafter = BlockDrafter(config)
    take_options(drafter, checkpoint.folder, kwargs)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    shapes.pop("mask_embedding", None)
    names = {**{name: f"{name}.weight" for name in _CODEBOOKS if f"{name}.weight" in checkpoint.shapes}, **names}
    names = {**_of_domino(shapes, checkpoint), **names}
    checkpoint.check_shapes({names.get(name, name): shape for name, shape in shapes.items()}, _of_target(config))
    if config.has_own_head:
        drafted_ids(checkpoint, config.vocab_size or 0)
    own = {names.get(name, name): name for name in shapes}
    state = {own[name]: tensor for name, tensor in checkpoint.tensors(own.keys())}
    if config.has_own_head:
        state |= {"d2t": state["d2t"].long(), "t2d": state["t2d"].bool()}
    if config.learned_mask:
        state["mask_embedding"] = _mask_of(checkpoint, config)
    drafter.load_state_dict(state, assign=True)
    drafter.to(placement.dtype or drafter.dtype).eval()
    drafter.name_or_path, drafter.loaded_from = checkpoint.name, checkpoint.folder
    return placement.place(drafter)


def _of_domino(shapes: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, str]:
    """Names of Domino's tensors in the files: at the top, in early ones under `logit_head`."""
    own = [name for name in shapes if name.startswith("domino.")]
    early = any(name.startswith("logit_head.") for name in checkpoint.shapes)
    return {name: name.replace("domino.", "logit_head." if early else "", 1) for name in own}


def _of_target(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the target's tensors that files may include."""
    width, size, drafted = config.target_hidden_size, config.vocab_size, config.draft_vocab_size
    found: dict[str, tuple[int, ...]] = {"verifier_norm.weight": (width,)}
    if size is not None and drafted is not None:
        found |= {"embed_tokens.weight": (size, width), "verifier_lm_head.weight": (drafted, width)}
        if not config.has_own_head:
            found |= {"lm_head.weight": (size, width), "d2t": (size,), "t2d": (size,)}
    return found


def _mask_of(checkpoint: Checkpoint, config: BlockConfig) -> torch.Tensor:
    """Returns the mask embedding `[D]` from its separate file."""
    tensor, width = checkpoint.loose_tensor(LOOSE_MASK), config.target_hidden_size
    if tensor.numel() != width or not tensor.is_floating_point():
        found = f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{LOOSE_MASK} in {printable(checkpoint.name)} is {found}: expected {width} floating numbers")
    return tensor.reshape(width)


_OF_LAYERS = with_fields("hidden_size")


def _format(name: str, rank: int, matches: Any, read: Reader, possible: Any = _OF_LAYERS, **names: str) -> Format:
    def load_by_name(checkpoint: Checkpoint, **kwargs: Any) -> BlockDrafter:
        return load(checkpoint, read, names, **kwargs)

    return Format(
        name,
        rank,
        matches,
        load_by_name,
        drafter=BlockDrafter,
        possible=possible,
        fit=lambda checkpoint, *target: fit_of(read(checkpoint), *target),
    )


FORMATS = (
    Format(
        "neighbouring formats that are refused", 0, reading.is_refused, reading.refuse, possible=_OF_LAYERS, loads=False
    ),
    _format(
        "speculators (dflash, dflash2, dspark)",
        10,
        reading.is_speculators,
        reading.read_speculators,
        with_fields("speculators_model_type"),
    ),
    _format("DeepSpec (DSpark)", 20, reading.is_deepspec, reading.read_deepspec),
    _format("DeepSpec (DSpark of Gemma 4)", 19, reading.is_gemma_dspark, reading.read_gemma_dspark),
    _format(
        "transformers (DFlash)",
        30,
        lambda checkpoint: reading.is_transformers(checkpoint.config),
        reading.read_transformers,
        reading.is_transformers,
        **_OF_TRANSFORMERS,
    ),
    _format("z-lab (DFlash, DFlash2), SpecForge (DSpark, Domino), JetSpec", 40, reading.is_dflash, reading.read_dflash),
)
