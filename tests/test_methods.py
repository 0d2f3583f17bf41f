"""Methods are loaded by their names, and the core does without them."""

import sys
import types

import pytest

from hf_hsdraft.core import methods
from hf_hsdraft.core.methods import Registry


@pytest.fixture
def two_rules(monkeypatch):
    monkeypatch.setattr(methods, "_index", lambda: {"rule": {"late": "late.rule"}})
    registry = Registry("rule", {"early": 1})

    def load(name):
        assert name == "hf_hsdraft.methods.late.rule"
        registry["late"] = 2
        return types.ModuleType(name)

    monkeypatch.setattr(methods.importlib, "import_module", load)
    return registry


def test_an_offer_is_loaded_when_it_is_asked_for(two_rules):
    assert list(two_rules) == ["early", "late"] and len(two_rules) == 2 and "late" in two_rules
    assert two_rules.loaded == {"early": 1}
    assert two_rules["late"] == 2 and list(two_rules) == ["early", "late"]


def test_what_nobody_offers_is_a_key_error(two_rules):
    with pytest.raises(KeyError, match="never"):
        two_rules["never"]


def test_without_the_folder_nothing_is_offered(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_hsdraft.methods", None)
    methods._index.cache_clear()
    assert methods.offered("verification") == []
    methods._index.cache_clear()
