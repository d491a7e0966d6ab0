"""The soak's rule: it sees a leak, and no leak in noise."""

import math
import random

import pytest

from tests.soak import soak
from tests.soak.growth import SLACK, Growth, growth, judge

MIB = 1024.0**2


def noisy(count: int, *, base: float, noise: float, slope: float = 0.0) -> list[float]:
    draw = random.Random(count)
    return [base * (1 + noise * draw.uniform(-1, 1)) + slope * index for index in range(count)]


@pytest.mark.parametrize("count", [12, 13, 18, 100])
def test_noise_around_a_level_is_flat(count: int) -> None:
    assert not growth(noisy(count, base=300 * MIB, noise=0.02), slack=4 * MIB).grew


@pytest.mark.parametrize("count", [12, 18, 100])
def test_a_steady_leak_is_growth(count: int) -> None:
    # A fifth of its size from the first reading to the last; half of that between the two thirds' middles.
    assert growth(noisy(count, base=300 * MIB, noise=0.01, slope=60 * MIB / count), slack=4 * MIB).grew


def test_only_the_warm_up_may_grow() -> None:
    rising, level = [100.0, 150.0, 180.0, 199.0], [200.0] * 12
    assert growth([*rising, *level], slack=0) == Growth(200.0, 200.0, False)
    assert growth([*level, *rising[1:], *[400.0] * 4], slack=0).grew


def test_exactly_the_limit_is_allowed_and_more_is_not() -> None:
    for last, grew in ((105.0, False), (105.1, True)):
        assert growth([*[0.0] * 3, *[100.0] * 5, *[last] * 4], slack=0) == Growth(100.0, last, grew)


def test_the_slack_forgives_a_little_of_small_figures() -> None:
    assert not growth([*[20] * 9, *[22] * 3], slack=SLACK["files"]).grew
    assert growth([*[20] * 9, *[23] * 3], slack=SLACK["files"]).grew
    assert growth([*[0] * 9, *[3] * 3], slack=SLACK["files"]).percent == math.inf


def test_one_outlier_in_each_third_changes_nothing() -> None:
    readings = [100.0] * 16
    readings[5], readings[14] = 1.0, 900.0
    assert growth(readings, slack=0) == Growth(100.0, 100.0, False)


def test_what_shrinks_did_not_grow() -> None:
    found = growth([100.0] * 8 + [50.0] * 8, slack=0)
    assert not found.grew
    assert found.percent == -50.0


def test_too_few_readings_are_said_to_be() -> None:
    with pytest.raises(ValueError, match="11 readings, at least 12"):
        growth([1.0] * 11, slack=0)


def test_a_busy_machine_gets_time_for_its_readings_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(now_s: float, readings: int) -> bool:
        monkeypatch.setattr(soak.time, "monotonic", lambda: now_s)
        return soak._goes_on(readings, end_s=100.0, latest_s=200.0)

    assert goes_on(99.0, 50)
    assert goes_on(150.0, 11)
    assert not goes_on(150.0, 12)
    assert not goes_on(201.0, 11)


def test_each_series_is_judged_by_its_kind() -> None:
    step = [*[0.0] * 3, *[10.0] * 5, *[12.0] * 4]
    found = judge({"files dit": step, "threads music3": step, "rss talker": [value * MIB for value in step]})
    assert not any(each.grew for each in found.values())
    with pytest.raises(KeyError, match="colour"):
        judge({"colour dit": step})
