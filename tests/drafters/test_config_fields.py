"""Configurations whose fields are declared once: what is checked, derived, shown and saved of them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from hf_hsdraft import BlockConfig, EagleConfig, HSDraftConfig, SelfDraftConfig, SpecFormerConfig
from hf_hsdraft.core.checks import settings
from hf_hsdraft.methods.published.decoder_layer import LayerSizes

OF_TRANSFORMERS = [HSDraftConfig, SelfDraftConfig, SpecFormerConfig]
EVERY = [*OF_TRANSFORMERS, BlockConfig, EagleConfig, LayerSizes]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_help_tells_of_each_field_and_the_constructor_takes_it(kind):
    told, taken = kind.__doc__, inspect.signature(kind.__init__).parameters
    for each in settings(kind):
        assert f"\n        {each.name}: " in told and each.name in taken


@pytest.mark.parametrize("kind", OF_TRANSFORMERS, ids=lambda kind: kind.__name__)
def test_each_limit_is_kept_when_it_is_built_and_when_it_is_checked(kind):
    for each in settings(kind):
        most = getattr(each.metadata["limit"], "most", 0)
        if most and each.name != "format_version":  # of which a newer one is told otherwise
            with pytest.raises(ValueError, match=f"^{each.name}={most + 1} is invalid"):
                kind(**{each.name: most + 1})
            config = kind()
            setattr(config, each.name, "many")
            with pytest.raises(ValueError, match=f"^{each.name}='many' is invalid"):
                config.check()


@pytest.mark.parametrize("kind", OF_TRANSFORMERS, ids=lambda kind: kind.__name__)
def test_what_is_not_given_is_derived_and_saved(kind, tmp_path):
    config = kind(vocab_size=50, target_hidden_size=64, target_num_hidden_layers=8)
    assert config.draft_vocab_size == 50 and config.intermediate_size == 256
    config.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    names = [each.name for each in settings(kind)]
    assert [getattr(again, name) for name in names] == [getattr(config, name) for name in names]


def test_a_field_of_transformers_is_not_taken_out_of_a_file():
    assert HSDraftConfig(is_encoder_decoder=True, chunk_size_feed_forward=3).is_encoder_decoder is False


def test_plain_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LayerSizes(8, 8, 2, 2, 4).head_dim = 6
