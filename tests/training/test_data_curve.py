"""tau against the logarithm of training tokens: points, slope and picture from a report of `hsdraft bench`."""

import json

import pytest
from data_curve import curves_of, main

REPORT = {
    "summary": {
        "plain": {"tau": 1.0},
        "runs/small: chain": {"tau": 1.2},
        "runs/large: chain": {"tau": 1.5},
        "runs/large: tree24x6": {"tau": 2.25},
        "runs/small: tree24x6": {"tau": 1.75},
        "runs/middle: chain": {"tau": 1.35},
        "runs/middle: tree24x6": {"tau": 2.0},
    }
}
LEARNED = {"small": 1e4, "runs/middle": 1e5, "large": 1e6}


def test_each_variant_has_its_points_in_order_and_its_slope():
    chain, tree = curves_of(REPORT, LEARNED)
    assert (chain.variant, tree.variant) == ("chain", "tree24x6")
    assert chain.points == [(1e4, 1.2), (1e5, 1.35), (1e6, 1.5)]
    assert chain.per_tenfold == pytest.approx(0.15) and tree.per_tenfold == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("learned", "said"),
    [
        ({"other": 1.0, **LEARNED}, "no drafter other"),
        ({"small": 1e4}, "two different numbers"),
        ({"small": 1e4, "large": 1e4}, "two different numbers"),
    ],
)
def test_drafters_that_are_not_there_are_named(learned, said):
    with pytest.raises(ValueError, match=said):
        curves_of(REPORT, learned)


def test_a_name_that_fits_two_drafters_is_refused():
    both = {"summary": {**REPORT["summary"], "others/small: chain": {"tau": 1.1}}}
    with pytest.raises(ValueError, match="several drafters small"):
        curves_of(both, LEARNED)
    assert curves_of(both, {"runs/small": 1.0, "others/small": 10.0, "large": 100.0})[0].points[1] == (10.0, 1.1)


def test_the_command_prints_the_points_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    arguments = [str(tmp_path / "report.json"), str(tmp_path / "curve.png")]
    asked = [part for name, tokens in LEARNED.items() for part in ("--learned", f"{name}={tokens:.0f}")]
    main([*arguments, *asked])
    assert "chain: tau 10,000: 1.20, 100,000: 1.35, 1,000,000: 1.50; +0.15" in capsys.readouterr().out
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        main([*arguments, "--learned", "small=few"])
    assert "small=few: expected name=number" in capsys.readouterr().err
