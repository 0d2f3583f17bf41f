"""What is faster on a device changes no text, and is asked for in one place."""

import re
from pathlib import Path

import pytest
from conftest import make_drafter, make_target
from test_contract import NEW, batch_of

import hf_hsdraft
from hf_hsdraft.target.target_acceleration import TargetAcceleration
from hf_hsdraft.target.target_runtime import TargetRuntime

TARGET = Path(hf_hsdraft.__file__).parent / "target"


def test_one_file_of_the_target_asks_for_acceleration():
    asking = [path.name for path in TARGET.glob("*.py") if re.search(r"^from \.+acceleration", path.read_text(), re.M)]
    assert asking == ["target_acceleration.py"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_without_acceleration_every_text_is_the_same(monkeypatch, rows, cache):
    target = make_target()
    kwargs = {**batch_of(rows), **cache, "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**kwargs)
    drafter = make_drafter(target)
    used, forward = [], TargetRuntime.verify

    def verify(runtime, *args):
        used.append(runtime.packed)
        return forward(runtime, *args)

    monkeypatch.setattr(TargetRuntime, "verify", verify)
    for switched_on in (True, False):
        monkeypatch.setattr(TargetAcceleration, "switched_on", switched_on)
        used.clear()
        drafted = target.generate(**kwargs, assistant_model=drafter)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert drafted.statistics.packed_weights == any(used)
        assert switched_on or not any(used)
