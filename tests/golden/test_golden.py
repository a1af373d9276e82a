"""The engine follows a plain loop of torch in every way of running that the published curve is
followed in, on a small text of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.command_run import command_run
from tests.golden.page import agrees, page
from tests.golden.runs import WAYS, Curve, Way, engine_run, plain_run
from tests.golden.stream import PUBLISHED, SETTING, Setting, read_text

SMALL = replace(
    SETTING,
    layers=4,
    hidden=32,
    length=16,
    steps=21,
    eval_every=10,
    eval_batches=2,
    warmup=5,
    peak=1e-2,
)
PROSE = (
    "It is a truth of counting that what is counted twice is there once, and is still paid twice. "
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(PROSE * 20)
    return path


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_run_follows_a_plain_loop_of_torch(way: Way, text: Path) -> None:
    plain = plain_run(SMALL, read_text(text))
    ours = engine_run(way, SMALL, text)
    assert plain.batches[-1] < plain.batches[0] - 0.5
    require_same_curve(ours, plain)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("stop", [0, 7], ids=["at once", "resumed"])
def test_the_command_follows_a_plain_loop_of_torch(stop: int, text: Path, tmp_path: Path) -> None:
    plain = plain_run(SMALL, read_text(text))
    ours = command_run(SMALL, read_text(text), tmp_path, stop)
    require_same_curve(ours, plain)


def require_same_curve(ours: Curve, plain: Curve) -> None:
    assert ours.batches == pytest.approx(plain.batches, abs=1e-5)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-4)
    assert list(ours.evaluations) == [0, 10, 20]
    for step, means in plain.evaluations.items():
        assert ours.evaluations[step] == pytest.approx(means, abs=1e-5)


def test_the_rate_begins_above_zero_and_ends_at_the_lowest() -> None:
    setting = Setting()
    assert setting.lr(0) == pytest.approx(1e-3 / 101)
    assert setting.lr(99) == pytest.approx(1e-3 * 100 / 101)
    assert setting.lr(100) == 1e-3
    assert setting.lr(2000) == pytest.approx(1e-4)


def test_a_number_agrees_if_it_is_near_those_that_are_rounded_to_the_published_one() -> None:
    assert agrees(1.76485, 1.7648)
    assert agrees(1.764859, 1.7648)
    assert not agrees(1.764861, 1.7648)


def test_the_page_has_every_published_number_and_names_those_that_differ() -> None:
    curve = Curve([0.0] * SETTING.steps, [1.0] * SETTING.steps)
    for point in PUBLISHED["losses"]:
        curve.batches[point["step"]] = point["loss"]
    for point in PUBLISHED["evaluations"]:
        curve.evaluations[point["step"]] = {part: point[part] for part in ("train", "held_out")}
    other = Curve(curve.batches.copy(), curve.norms, curve.evaluations)
    other.batches[700] += 1e-3
    text = page({"torch alone": curve, "tensor 2": other}, "torch alone", 1.0, "picture.png")
    assert text.count("**differs**") == 1
    assert "- tensor 2, 700: 2.095700 for 2.0947" in text
    assert "1 of 78 numbers differ" in text
