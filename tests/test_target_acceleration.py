"""What is faster on a device changes no text, and is asked for by one seam."""

import re
from pathlib import Path

import pytest
from conftest import make_drafter, make_target
from test_contract import NEW, batch_of

import hf_hsdraft
from hf_hsdraft.core import accelerator
from hf_hsdraft.gpu.device_acceleration import DeviceAcceleration
from hf_hsdraft.runtime.target_runtime import TargetRuntime

PACKAGE = Path(hf_hsdraft.__file__).parent


@pytest.mark.parametrize("room", ["target", "engine"])
def test_only_the_seam_of_acceleration_is_asked(room):
    texts = [path.read_text() for path in (PACKAGE / room).glob("*.py")]
    asked = {name for text in texts for name in re.findall(r"^from \.+acceleration\.(\S+)", text, re.M)}
    assert asked == {"accelerator"}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_without_acceleration_every_text_is_the_same(monkeypatch, rows, cache):
    target = make_target()
    kwargs = {**batch_of(rows), **cache, "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**kwargs)
    drafter = make_drafter(target)
    used, forward = [], TargetRuntime.verify

    def verify(runtime, *args):
        used.append(runtime.acceleration.packed)
        return forward(runtime, *args)

    monkeypatch.setattr(TargetRuntime, "verify", verify)
    drafter.generation_config.packed_weights = True
    for registered in (DeviceAcceleration, accelerator.Acceleration):
        monkeypatch.setattr(accelerator, "_registered", [registered])
        used.clear()
        drafted = target.generate(**kwargs, assistant_model=drafter)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert drafted.statistics.packed_weights == any(used)
        assert registered is DeviceAcceleration or not any(used)
