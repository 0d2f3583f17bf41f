"""The lm-evaluation-harness model `hsdraft`, which decodes with a drafter.

`import hf_hsdraft.bench.lm_eval_model` registers it. lm_eval finds models of other packages only once they are
imported, so this file run as a program is lm_eval's command with the model known:

    python -m hf_hsdraft.bench.lm_eval_model --model hsdraft --model_args pretrained=NAME,drafter=NAME --tasks gsm8k
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..drafters.base.protocol import Drafter
from ..generate.attachment import Attachment, AttachmentStatistics, attach

logger = logging.getLogger("lm_eval.hsdraft")  # shown like lm_eval's messages


@register_model("hsdraft")
class HSDraftLM(HFLM):
    """lm_eval's model `hf` with drafted generation. Likelihoods never call `generate()`, so they do not change.

    Args:
        pretrained: Hub name or folder of the target, or the loaded target.
        drafter: a drafter, or its Hub name or folder. `None` decodes plainly.
        arguments: further arguments of `HFLM`.

    `seconds` is the wall-clock time of each call of `generate()`.
    """

    def __init__(
        self, pretrained: Any, drafter: Drafter | str | os.PathLike[str] | None = None, **arguments: Any
    ) -> None:
        super().__init__(pretrained, **arguments)
        self.attachment: Attachment | None = None if drafter is None else attach(self.model, drafter)
        self.seconds: list[float] = []

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = super().generate_until(requests, disable_tqdm)
        if self.attachment is not None:
            logger.info(what_drafting_did(self.attachment.statistics))
        return texts

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        tokens = super()._model_generate(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return tokens

    def get_model_info(self) -> dict[str, Any]:
        """Adds drafting statistics to what lm_eval writes about the model."""
        info = super().get_model_info()
        if self.attachment is not None:
            info["drafting"] = as_fields(self.attachment.statistics)
        return info


def as_fields(statistics: AttachmentStatistics) -> dict[str, Any]:
    return {"tau": statistics.tau, **asdict(statistics)}


def what_drafting_did(statistics: AttachmentStatistics) -> str:
    """One sentence, and a line for each reason to step aside."""
    said = f"{statistics.calls} calls of generate() drafted"
    if statistics.calls:
        said += f", tau {statistics.tau:.2f}, {statistics.new_tokens} tokens in {statistics.seconds:.1f} s"
    aside = statistics.stepped_aside
    said += f"; {sum(aside.values())} stepped aside"
    return said + "".join(f"\n  {count} because {reason}" for reason, count in aside.items())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
