"""Grows trained drafters: more sets of step parameters, more layers for the text.

A grown drafter initially computes what the smaller one does, and training continues from there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..drafters.base.draft_options import leave_folder
from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from ..training.families.family import GROWTHS


@torch.no_grad()
def grown(drafter: HSDrafter, num_step_modules: int, num_hidden_layers: int) -> HSDrafter:
    """Returns a larger drafter with the same drafts, and at least as many sets of parameters and layers.

    A new set of parameters copies the last one (PRISM, section on training: one module is trained first, then copied M
    times). New layers come first; they read only the text, and add nothing to it until trained. Roll-out steps use as
    many as before. A ValueError if such a drafter is not possible.
    """
    sizes = {"num_step_modules": num_step_modules, "num_hidden_layers": num_hidden_layers}
    config = HSDraftConfig.from_dict(drafter.config.to_dict() | sizes)
    larger = HSDrafter(config).to(drafter.device, drafter.dtype)
    larger.generation_config = copy.deepcopy(drafter.generation_config)
    leave_folder(larger)
    larger.name_or_path = drafter.name_or_path
    different = {"layers", "step_modules", "roll_norm", "roll_proj"}
    for name, part in drafter.named_children():
        if name not in different:
            getattr(larger, name).load_state_dict(part.state_dict())
    old, added = [*drafter.layers], num_hidden_layers - len(drafter.layers)
    for index, layer in enumerate(larger.layers):
        layer.load_state_dict(old[max(index - added, 0)].state_dict())
        if index < added:  # the identity; its last products learn from the first step on
            layer.attention.o_proj.weight.zero_()
            layer.down_proj.weight.zero_()
    known = drafter.steps()
    for index, (norm, project, layers) in enumerate(larger.steps()):
        old_norm, old_project, old_layers = known[min(index, len(known) - 1)]
        for new, source in zip((norm, project, *layers), (old_norm, old_project, *old_layers), strict=True):
            new.load_state_dict(source.state_dict())
    return larger


def grown_for(drafter: HSDrafter, fields: Mapping[str, Any]) -> HSDrafter:
    """Grows a drafter to the sizes in a plan's fields; see `grown`."""
    config = drafter.config
    has = config.num_step_modules, config.num_hidden_layers
    wanted = fields.get("num_step_modules", has[0]), fields.get("num_hidden_layers", has[1])
    return grown(drafter, *map(max, has, wanted)) if wanted != has else drafter


GROWTHS["hidden-state"] = grown_for
