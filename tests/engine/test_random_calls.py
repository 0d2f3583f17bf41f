"""A few configurations of the benchmark of random calls; `python benchmarks/random_calls.py` decodes thousands."""

import pytest
import random_calls

SEED = 5


@pytest.mark.slow
def test_random_calls_return_what_plain_ones_return():
    found = {number: random_calls.check(SEED, number) for number in range(20)}
    assert {number: each.reason for number, each in found.items() if each.result == "WRONG"} == {}
    assert sum(each.accepted for each in found.values()) >= 10
    assert sum(each.rejected for each in found.values()) >= 10


@pytest.mark.parametrize("number", [69, 248, 363])
def test_configurations_that_were_wrong_before(number):
    """States in a target's modules that a refused call would read the prompt into; hidden states in groups."""
    assert random_calls.check(2027, number).result in ("same", "refused")


def test_a_configuration_is_the_same_whenever_it_is_made():
    from oracles.random_cases import case_of

    assert case_of(1, 7) == case_of(1, 7) != case_of(1, 8)
