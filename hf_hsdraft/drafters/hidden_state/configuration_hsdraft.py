"""Configuration of a hidden-state drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checks import choice, demand, integer, is_integer, setting
from ..base.travelling_config import AttendingConfig, as_dict

INJECTORS = ("low_rank", "path", "selector")
_LONGEST_REFERENCE = 512


class HSDraftConfig(AttendingConfig):
    """Configuration of an [`HSDrafter`], checked on construction; [`HSDraftConfig.for_target`] derives it."""

    model_type = "hsdraft"

    target_reference: Mapping[str, Any] | None = setting(
        "A text by which the target is recognised, see `target_match`: its token ids `input_ids`, and the position "
        "`start` from which on the target wrote it. Of those tokens the target chooses `agreed` again, and the "
        "drafter's first choice hits `drafted`",
        None, convert=as_dict
    )  # fmt: skip
    num_hidden_layers: int = setting(
        "Number of layers of the trunk. All of them read the accepted text; g_0 comes of the last one", 1, integer(64)
    )
    num_roll_layers: int = setting(
        "Number of layers that a roll-out step goes through, which are the last ones; `None` means all. Fewer make the "
        "text's part deeper than the roll-out, which is what drafts cost",
        None, integer(64), derived=lambda config: config.num_hidden_layers
    )  # fmt: skip
    num_step_modules: int = setting(
        "M, the number of parameter sets that take turns by step (PRISM, processing modules). The first one reads the "
        "text and gives g_0. Step k has set k, and all steps from M - 1 on have the last one. A set is the projection "
        "of the state before and the `num_roll_layers` layers. They share keys and values",
        1, integer(64)
    )  # fmt: skip
    num_draft_steps: int = setting(
        "K, the number of hidden states rolled out per round, and so the depth of the draft tree", 6, integer(64)
    )
    injector: str = setting(
        'How token information joins the hidden states. `"low_rank"` is the paper\'s bias W2 W1 e(parent); `"path"` is '
        'a gated network on hidden state, parent and the path from the root. `"selector"` scores pairs of the parent '
        "and each of the best candidates of a depth (DFlash2)",
        "path", choice(*INJECTORS)
    )  # fmt: skip
    injector_rank: int = setting("r, the rank through which token information reaches the logits", 128, integer(2**16))
    injector_hidden_size: int = setting("Inner width of the path injector", 256, integer(2**17))
    injector_top_k: int = setting("Number of candidates of a depth that the selector scores", 16, integer(2**16))

    def check(self) -> None:
        super().check()
        layers, rolled = self.num_hidden_layers, self.num_roll_layers
        demand(rolled <= layers, "num_roll_layers", rolled, f"the trunk has only num_hidden_layers={layers}")
        steps, modules = self.num_draft_steps, self.num_step_modules
        wanted = f"there are only num_draft_steps={steps}, and each set of parameters needs a step"
        demand(modules <= steps, "num_step_modules", modules, wanted)
        wanted = "expected input_ids, start, agreed and drafted as `hsdraft train` writes them"
        demand(self._is_reference(self.target_reference), "target_reference", self.target_reference, wanted)

    def _is_reference(self, value: Any) -> bool:
        names = ("input_ids", "start", "agreed", "drafted")
        if value is None:
            return True
        if not isinstance(value, dict) or value.keys() != set(names):
            return False
        ids, start, *counts = (value[name] for name in names)
        valid = isinstance(ids, list) and 3 <= len(ids) <= _LONGEST_REFERENCE
        valid = valid and all(is_integer(token) and 0 <= token < self.vocab_size for token in ids)
        valid = valid and is_integer(start) and 2 <= start < len(ids)
        return valid and all(is_integer(count) and 0 <= count <= len(ids) - start for count in counts)


__all__ = ["HSDraftConfig"]
