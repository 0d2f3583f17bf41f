"""Training of drafters in the package's own format, which are saved with their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...drafters.base.refiners import leave_folder
from ...drafters.base.target_info import tokenizer_hash
from ..data.vocabulary import with_draft_vocabulary
from .family import Choose, TrainableFamily, name_of

_SHORTEST_WINDOW = 128
_FREE = ("tree_size", "beam_width", "sliding_window")  # fields on which no weights depend


class TravellingFamily(TrainableFamily):
    """Families whose configurations are transformers', drafting options included."""

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        return self.drafter.config_class.for_target(target, **fields)

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> Any:
        # Training never looks back further than the longest text.
        window = {"sliding_window": max(longest, _SHORTEST_WINDOW)} if "sliding_window" in self.fields else {}
        return self.with_chosen_vocabulary(target, {**window, **fields}, choose)

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        config, options = drafter.config, drafter.generation_config
        config.target_name = fields.get("target_name", config.target_name)
        leave_folder(drafter)  # and its recipe and figures, which are not this run's
        for name in _FREE:
            if name in fields and hasattr(config, name):
                setattr(config, name, fields[name])
                if name != "sliding_window":
                    setattr(options, name, fields[name])
        config.check()
        for name, value in fields.items():
            found = getattr(config, name)
            if found != value and name != "draft_vocab_size":
                raise ValueError(
                    f"{drafter.name_or_path} has {name}={found!r}, not {value!r}; leave {name} out, or train from "
                    "scratch"
                )

    def with_draft_vocabulary(self, drafter: Any, ids: list[int], output_rows: Any) -> Any:
        return with_draft_vocabulary(drafter, ids, output_rows)

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        record_name(drafter, target, tokenizer, name)


def record_name(drafter: Any, target: Any, tokenizer: Any, name: str | None = None) -> None:
    """Records the target's name, tokenizer and special tokens in a drafter's configuration."""
    drafter.check(target)
    config = drafter.config
    config.target_name = name_of(target, name)
    config.target_revision = getattr(target.config, "_commit_hash", None) or ""
    config.target_tokenizer_hash = tokenizer_hash(tokenizer)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(target.config.get_text_config(), token, None))
