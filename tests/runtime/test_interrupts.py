"""An exception anywhere inside a forward leaves the caller's cache as it was before that forward."""

import contextlib
import sys

import pytest
from conftest import make_target
from oracles.tiny import tiny_config, tiny_model
from test_contract import make_windowed
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.runtime.target_runtime import TargetRuntime

NEW = 8
PLACES = {"update", "_appended", "update_conv_state", "crop"}


def make_convolutions():
    """Convolutions and full attention."""
    config = tiny_config(Lfm2Config)
    config.layer_types = ["conv", "full_attention"] * 2
    return tiny_model(Lfm2ForCausalLM, config)


def make_plain_layers():
    """Layers that are copied at every forward: no room is made for them to grow in."""
    return make_target()


TARGETS = {
    "growing": make_target,
    "plain layers": make_plain_layers,
    "windows": make_windowed,
    "convolutions": make_convolutions,
}


@contextlib.contextmanager
def interrupted_at(line: int):
    """Raises a KeyboardInterrupt at the given line that is run of a cache layer, counted from the first draft on."""
    count, verify = 0, TargetRuntime.verify

    def inside(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return inside

    def entered(frame, event, argument):
        code = frame.f_code
        of_cache = code.co_name in PLACES and code.co_filename.endswith(("cache_utils.py", "cache_slots.py"))
        return inside if of_cache else None

    def traced(self, *args):
        sys.settrace(entered)
        return verify(self, *args)

    TargetRuntime.verify = traced
    try:
        yield
    finally:
        sys.settrace(None)
        TargetRuntime.verify = verify


@pytest.mark.parametrize("kind", TARGETS)
def test_an_interrupt_between_keys_and_values(kind, prompt, monkeypatch):
    """At any line of the layers' code, of the first drafts and of later ones."""
    if kind == "plain layers":
        monkeypatch.setattr("hf_hsdraft.runtime.cache_slots.make_room", lambda cache: None)
    target = TARGETS[kind]()
    call = {"do_sample": False, "pad_token_id": 0}
    plain = target.generate(prompt, max_new_tokens=NEW + 8, **call)
    drafter = CachebackDrafter([plain[0].tolist()], node_cost=0.0, depth_cost=0.0)
    drafted = target.generate(prompt, max_new_tokens=NEW, **call, assistant_model=drafter)
    assert drafted.tolist() == plain[:, :-8].tolist()
    for line in (*range(3, 20), 30, 41, 52):
        cache = DynamicCache(config=target.config)
        with interrupted_at(line), pytest.raises(KeyboardInterrupt):
            target.generate(prompt, max_new_tokens=NEW, past_key_values=cache, **call, assistant_model=drafter)
        read = cache.get_seq_length()
        assert read >= prompt.shape[1]
        again = target.generate(plain[:, : read + 1], max_new_tokens=5, past_key_values=cache, **call)
        assert again.tolist() == plain[:, : read + 6].tolist(), (line, read)
