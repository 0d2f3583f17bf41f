"""Pictures of a training run: what is drawn, what is skipped, and that nothing half-written is left."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from hf_hsdraft.methods.pictures import training_pictures as pictures
from hf_hsdraft.methods.pictures.training_pictures import draw_pictures
from hf_hsdraft.training.loop.results import RenewedPictures

HISTORY = [
    {"step": 10, "loss": 2.0, "learning_rate": 1e-4, "accuracy_1": 0.3, "accuracy_2": 0.2},
    {"step": 20, "loss": 1.5, "learning_rate": 1e-4, "accuracy_1": 0.4, "accuracy_2": 0.3},
    {"step": 20, "eval_loss": 1.6, "eval_tau": 1.9, "eval_accuracy_1": 0.4, "eval_acceptance_1": 0.3},
    {"step": 40, "loss": 1.2, "learning_rate": 1e-5},
    {
        "step": 40,
        "eval_loss": 1.4,
        "eval_tau": 2.25,
        "eval_accuracy_1": 0.6,
        "eval_accuracy_2": 0.5,
        "eval_acceptance_1": 0.55,
        "eval_acceptance_2": 0.25,
    },
    {"step": 40, "train_loss": 1.5, "train_runtime": 3.0},
]
CALIBRATION = {
    "confidence": [[0.25, 0.75], [0.4, float("nan")]],
    "accuracy": [[0.5, 0.75], [0.1, float("nan")]],
    "count": [[40, 60], [10, 0]],
}


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_all_pictures_are_drawn_and_nothing_else(tmp_path):
    folder = tmp_path / "run" / "pictures"
    written = draw_pictures(HISTORY, CALIBRATION, folder)
    assert names(written) == ["learning_curves.png", "acceptance.png", "calibration.png"]
    assert sorted(folder.iterdir()) == sorted(written)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_pictures_of_a_run_are_renewed_by_each_evaluation(tmp_path):
    renewed, drawn = RenewedPictures(tmp_path), []
    for history in (HISTORY[:3], HISTORY):
        renewed.on_evaluate(None, SimpleNamespace(log_history=history, is_world_process_zero=True), None)
        drawn.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert drawn[0].keys() == drawn[1].keys() == {"learning_curves.png", "acceptance.png"}
    assert all(drawn[0][name] != drawn[1][name] for name in drawn[0])
    RenewedPictures(tmp_path / "other").on_evaluate(None, SimpleNamespace(is_world_process_zero=False), None)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("history", "calibration", "expected"),
    [
        ([], None, []),
        ([{"step": 1, "learning_rate": 0.1}], {"confidence": [], "accuracy": [], "count": []}, []),
        (HISTORY[:1], None, ["learning_curves.png"]),
        ([{"step": 5, "eval_tau": 1.5}], None, ["learning_curves.png"]),
        ([{"step": 5, "eval_accuracy_1": 0.5}], None, ["acceptance.png"]),
        ([{"step": 5, "eval_acceptance_1": float("nan")}], None, []),
        ([], {"confidence": [[0.5]], "accuracy": [[0.5]], "count": [[0]]}, []),
        ([], CALIBRATION, ["calibration.png"]),
    ],
)
def test_what_has_no_data_is_skipped(tmp_path, history, calibration, expected):
    assert names(draw_pictures(history, calibration, tmp_path)) == expected


def test_curves_follow_the_history():
    loss, tau = pictures._learning_curves(HISTORY).axes
    assert [line.get_xydata().tolist() for line in loss.lines] == [
        [[10, 2.0], [20, 1.5], [40, 1.2]],
        [[20, 1.6], [40, 1.4]],
    ]
    assert tau.lines[0].get_xydata().tolist() == [[20, 1.9], [40, 2.25]]
    assert "2.25 at step 40" in tau.get_title()


def test_acceptance_is_that_of_the_last_evaluation():
    (axes,) = pictures._acceptance(HISTORY).axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[0.6, 0.5], [0.55, 0.25]]
    assert axes.get_xticks().tolist() == [1, 2]
    assert "step 40" in axes.get_title()


def test_a_depth_that_no_round_reached_leaves_a_gap():
    entry = {"step": 1, "eval_accuracy_1": 0.5, "eval_accuracy_2": 0.4, "eval_acceptance_1": 0.5}
    (axes,) = pictures._acceptance([entry | {"eval_acceptance_2": float("nan")}]).axes
    assert [len(bars) for bars in axes.containers] == [2, 1]


def test_calibration_error_weighs_bins_by_their_tokens():
    figure = pictures._calibration(CALIBRATION)
    legends = [axes.get_legend().get_texts()[0].get_text() for axes in figure.axes if axes.get_legend()]
    assert legends == ["ECE 0.100", "ECE 0.300"]  # (40 x 0.25 + 60 x 0) / 100, and 10 x 0.3 / 10


@pytest.mark.parametrize("depths", [1, 4, 5, 7, 9])
def test_calibration_shows_every_depth_once(depths):
    bins = {name: values[:1] * depths for name, values in CALIBRATION.items()}
    shown = [axes.get_title() for axes in pictures._calibration(bins).axes if axes.get_visible()]
    assert [title for title in shown if title] == [f"depth {depth + 1}" for depth in range(depths)]
    assert len(shown) == 2 * depths


def test_an_older_picture_survives_a_failure(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    (old,) = draw_pictures(HISTORY[:1], None, tmp_path)
    before = old.read_bytes()

    def fail(self, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_pictures(HISTORY, None, tmp_path)
    assert old.read_bytes() == before


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[train\]'"):
        draw_pictures(HISTORY, None, tmp_path)
