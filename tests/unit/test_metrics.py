"""What is counted, and how it reaches a page."""

import time
from collections.abc import Mapping

import pytest

from python_backend_models import metrics
from python_backend_models.metrics import Board, Family, Publisher
from python_backend_models.orchestrator import SongReport
from tests.unit.test_orchestrator import job


class FakePage:
    """Series by name and labels, with every change that came."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.updates = 0
        self.broken = False

    def __call__(self, family: Family, labels: Mapping[str, str]) -> "FakeSeries":
        key = (family.name, tuple(sorted(labels.items())))
        assert key not in self.values
        self.values[key] = 0.0
        return FakeSeries(self, key, family.kind)


class FakeSeries:
    def __init__(self, page: FakePage, key: tuple[str, tuple[tuple[str, str], ...]], kind: str) -> None:
        self.page, self.key, self.kind = page, key, kind

    def increment(self, value: float) -> None:
        assert self.kind == "counter"
        assert value > 0
        self._change(self.page.values[self.key] + value)

    def set(self, value: float) -> None:
        assert self.kind == "gauge"
        self._change(value)

    def _change(self, value: float) -> None:
        if self.page.broken:
            raise RuntimeError("the server is gone")
        self.page.values[self.key] = value
        self.page.updates += 1


def board() -> Board:
    made = Board(heartbeat="rounds_total")
    made.counter("apples_total", "apples", label="kind", values=("red", "green"))
    made.gauge("baskets", "baskets")
    made.histogram("weight", "weight", bounds=(0.5, 2.0))
    return made


def read(made: Board) -> dict[str, float]:
    return {f"{family.name}{dict(labels) or ''}": value for (family, labels), value in made.read().items()}


def test_a_histogram_is_cumulative_counters() -> None:
    made = board()
    for value in (0.5, 0.6, 7.0):
        made.observe("weight", value)
    values = read(made)
    assert values["weight_bucket{'le': '0.5'}"] == 1  # a bound belongs to its bucket
    assert values["weight_bucket{'le': '2'}"] == 2
    assert values["weight_bucket{'le': '+Inf'}"] == values["weight_count"] == 3
    assert values["weight_sum"] == pytest.approx(8.1)


def test_what_was_not_declared_cannot_be_counted() -> None:
    made = board()
    with pytest.raises(KeyError):
        made.add("pears_total")
    with pytest.raises(KeyError):
        made.add("apples_total", kind="blue")
    with pytest.raises(KeyError):
        made.set("apples_total", 3)
    with pytest.raises(ValueError, match="apples_total"):
        made.gauge("apples_total", "again")


def test_only_what_changed_is_published_and_everything_stands_there_from_the_start() -> None:
    page, made = FakePage(), board()
    publisher = Publisher(made, page, instance_name="tree_0_0", every_s=3600)
    named = ("instance_name", "tree_0_0")
    assert page.values[("apples_total", (named, ("kind", "red")))] == 0
    made.add("apples_total", 3, kind="red")
    made.set("baskets", 2)
    publisher.publish()
    assert page.updates == 2 + 1  # two changes and the heartbeat
    publisher.publish()
    assert page.updates == 2 + 2
    assert page.values[("rounds_total", (named,))] == 2
    made.add("apples_total", kind="red")
    made.set("baskets", 0)
    publisher.publish()
    assert page.values[("apples_total", (named, ("kind", "red")))] == 4
    assert page.values[("apples_total", (named, ("kind", "green")))] == 0
    assert page.values[("baskets", (named,))] == 0
    assert page.updates == 2 + 2 + 2 + 1
    publisher.close()


def test_the_heartbeat_comes_when_the_other_numbers_are_there() -> None:
    page, made = FakePage(), board()
    heard: list[float] = []

    class Watched(FakeSeries):
        def increment(self, value: float) -> None:
            heard.append(page.values[("baskets", (("instance_name", "tree"),))])
            super().increment(value)

    def sink(family: Family, labels: Mapping[str, str]) -> FakeSeries:
        series = page(family, labels)
        return Watched(page, series.key, series.kind) if family.name == "rounds_total" else series

    publisher = Publisher(made, sink, instance_name="tree", every_s=3600)
    asked = iter((1.0, 7.0, 8.0))
    made.ask("baskets", lambda: next(asked))
    publisher.publish()
    publisher.publish()
    assert heard == [7.0, 8.0]  # asked for anew in each round
    publisher.close()


def test_the_thread_publishes_and_a_page_that_fails_ends_it_quietly() -> None:
    page, made = FakePage(), board()
    publisher = Publisher(made, page, instance_name="tree", every_s=0.01)
    made.set("baskets", 5)
    deadline_s = time.monotonic() + 10
    while not page.updates:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    page.broken = True
    made.set("baskets", 6)
    assert publisher._thread
    publisher._thread.join(10)
    assert not publisher._thread.is_alive()
    publisher.close()


def test_without_a_page_counting_costs_nothing_more() -> None:
    made = board()
    publisher = Publisher(made, None, instance_name="tree", every_s=1)
    made.add("apples_total", kind="red")
    publisher.close()


def test_a_song_is_counted_by_what_came_of_it() -> None:
    made = metrics.music3_board()
    report = SongReport(
        job(), 0.0, started_s=1.5, first_audio_s=3.0, ended_s=11.5, frames=250, outcome="done"
    )
    report.samples, report.stage_s, report.stage_calls = 320_000, {"dit": 4.0}, {"dit": 2}
    metrics.count_song(made, report)
    values = read(made)
    assert values["music3_songs_total{'outcome': 'done'}"] == 1
    assert values["music3_frames_total"] == 250
    assert values["music3_audio_seconds_total"] == 10
    assert values["music3_queue_seconds_sum"] == 1.5
    assert values["music3_first_audio_seconds_sum"] == 3.0
    assert values["music3_song_seconds_sum"] == 11.5
    assert values["music3_realtime_factor_sum"] == 1.0  # ten seconds' making for ten seconds' sound
    assert values["music3_stage_seconds_total{'stage': 'dit'}"] == 4.0
    assert values["music3_stage_calls_total{'stage': 'dit'}"] == 2


def test_a_song_that_never_started_counts_as_no_wait_and_no_sound() -> None:
    made = metrics.music3_board()
    metrics.count_song(made, SongReport(job(), 0.0, ended_s=4.0, outcome="cancelled"))
    values = read(made)
    assert values["music3_songs_total{'outcome': 'cancelled'}"] == 1
    assert values["music3_queue_seconds_count"] == values["music3_song_seconds_count"] == 0


def test_every_family_says_what_it_is_and_is_named_as_prometheus_wants() -> None:
    boards = [metrics.music3_board(), metrics.talker_board()]
    boards += [metrics.acoustic_board(stage) for stage in ("dit", "vocoder")]
    families = [family for made in boards for family, _ in made.read()]
    assert len({family.name for family in families}) >= 30
    for family in families:
        assert family.meaning
        assert family.name.startswith("music3_")
        counted = ("_total", "_bucket", "_sum", "_count")
        assert family.name.endswith(counted) == (family.kind == "counter")


def test_a_step_is_busy_time_once_whatever_it_worked_on() -> None:
    made = metrics.talker_board()
    census = dict.fromkeys(("live", "waiting", "slots_free", "pages_free", "pages_shared"), 1)
    for frames, prefilled, seconds in ((0, True, 1.0), (2, True, 2.0), (2, False, 4.0), (0, False, 8.0)):
        metrics.count_step(made, census, frames=frames, prefilled=prefilled, seconds=seconds)
    values = read(made)
    assert values["music3_talker_busy_seconds_total"] == 7.0
    assert values["music3_talker_prefill_seconds_total"] == 3.0
    assert values["music3_talker_step_seconds_total"] == 6.0
    assert values["music3_talker_frames_total"] == 4
