"""Training of drafters in the formats of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import torch

from ...core.checks import demand, public_name
from ...drafters.base.draft_options import leave_folder
from ...training.families.family import KEPT, OPTIONS, TrainableFamily, name_of
from .decoder_layer import LayerSizes


class PublishedFamily(TrainableFamily):
    """Families whose configurations are frozen dataclasses without drafting options."""

    config: Any  # class of the configurations, with `for_target(target, **fields)`
    free: tuple[str, ...] = ("target_name",)  # fields of a configuration on which no weights depend

    @property
    def fields(self) -> set[str]:
        own = {field.name for kind in (self.config, LayerSizes) for field in fields_of(kind)}
        return own | {"num_draft_steps", "draft_vocab_ids", *OPTIONS}

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        config = self.derived(target, fields)
        with torch.device("meta"):
            self.set_options(self.drafter(config), fields)
        return config

    def derived(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns a configuration. Its draft vocabulary defaults to a quarter of the target's until one is chosen."""
        own = {name: value for name, value in fields.items() if name not in OPTIONS}
        size = target.config.get_text_config().vocab_size
        ids = own.get("draft_vocab_ids")
        own.setdefault("draft_vocab_size", max(1, size // 4) if ids is None else len(ids))
        return self.config.for_target(target, **_named(own))

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        self.check_trainable(drafter.config)
        leave_folder(drafter)
        fields = _named(fields)
        drafter.config = replace(drafter.config, **{name: fields[name] for name in self.free if name in fields})
        drafter.generation_config.num_assistant_tokens = drafter.num_draft_steps
        self.set_options(drafter, fields)
        for name, value in fields.items():
            if name not in (*OPTIONS, *self.free):
                found, wanted = _found(drafter.config, name), tuple(value) if isinstance(value, list) else value
                demand(found == wanted, name, wanted, KEPT.format(found))

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        drafter.check(target)
        architecture = type(target).__name__.removeprefix("FSDP")  # a sharded target is the same target
        told = {"target_name": name_of(target, name), "target_architectures": (architecture,)}
        drafter.config = replace(drafter.config, **told)


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same fields, with the target's name as it may be published."""
    names = {name: public_name(str(value)) for name, value in fields.items() if name == "target_name"}
    return {**fields, **names}


def _found(config: Any, name: str) -> Any:
    """Returns a field of a configuration, or of the sizes of its layers."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, LayerSizes))]
    value = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
    return tuple(value) if isinstance(value, list) else value
