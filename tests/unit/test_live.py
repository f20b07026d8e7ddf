"""The live view: one line now and then, and what matters at once, in words."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest

from everstep.orchestrator import events as ev
from everstep.orchestrator import words
from everstep.orchestrator.live import BarView, LiveLines, LogView, live_view


def start(total: int | None = 2000) -> list[ev.Event]:
    formed = ev.GenerationFormed(
        time=0.0, generation=7, replicas=(0, 1, 2, 3), nodes=("a", "b", "a", "c"), step=0
    )
    return [ev.RunStarted(time=0.0, run="gpt", total=total), formed]


def commits(first: int, stop: int, per_s: float = 10.0) -> Iterator[ev.StepCommitted]:
    for n in range(first, stop):
        yield ev.StepCommitted(
            time=n / per_s,
            step=n,
            generation=7,
            metrics={"loss": 1.2345},
            samples=320,
            world_size=4,
            step_s=1 / per_s,
        )


def lost(replica: int) -> ev.ReplicaLost:
    return ev.ReplicaLost(time=12.0, replica=replica, node="ab12", cause="process killed")


RECOVERY = ev.Recovery(
    time=12.1, generation_before=7, generation_after=8, total_s=0.084, world_size_after=3, step=121
)


def test_a_line_tells_step_loss_speed_replicas_generation_and_time_left() -> None:
    live = LiveLines(5.0)
    lines = live.lines([*start(), *commits(0, 51)])
    assert lines[-1] == "step 51/2000  loss 1.2345  3.2k samples/s  4 replicas  gen 7  ETA 0:03:15"


def test_lines_come_at_their_interval_and_not_per_step() -> None:
    lines = LiveLines(5.0).lines([*start(), *commits(0, 1000)])
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) == 20  # the first commit, then each five of the 100 seconds
    assert progress[0] == "step 1/2000  loss 1.2345  4 replicas  gen 7"


def test_a_loss_and_its_recovery_are_one_sentence() -> None:
    live = LiveLines(5.0)
    live.lines(start())
    lines = live.lines([lost(2), RECOVERY])
    assert lines == [
        "replica 2 lost on node ab12 (process killed); "
        "3 go on: generation 8 after 84 ms, step 121, 0 steps lost"
    ]


def test_a_loss_that_is_not_recovered_is_told_at_the_next_poll() -> None:
    live = LiveLines(5.0)
    live.lines(start())
    assert live.lines([lost(2), lost(3)]) == []
    assert live.lines([]) == [f"replica {n} lost on node ab12 (process killed)" for n in (2, 3)]
    assert live.lines([RECOVERY]) == ["3 go on: generation 8 after 84 ms, step 121, 0 steps lost"]


def test_waiting_is_told_at_once_with_what_led_to_it() -> None:
    live = LiveLines(5.0)
    lines = live.lines([lost(2), ev.Waiting(replicas=1, min_replicas=2)])
    assert lines[0].startswith("replica 2 lost")
    assert lines[1] == "waiting: 1 replica left, 2 needed; the state is kept"


def test_the_end_shows_the_last_step_however_long_ago_a_line_was() -> None:
    live = LiveLines(5.0)
    live.lines([*start(3), *commits(0, 3)])
    end = ev.RunEnded(outcome="finished", step=3, buckets={"productive": 61.0})
    lines = live.lines([end])
    assert lines[0].startswith("step 3/3  loss 1.2345")
    assert lines[1] == "run finished after 3 steps in 0:01:01"


def test_going_back_after_lost_state_starts_the_measurement_anew() -> None:
    live = LiveLines(1.0)
    live.lines([*start(), *commits(0, 100)])
    again = [ev.StepCommitted(time=20.0 + n, step=n, generation=9, samples=320) for n in range(3)]
    lines = live.lines([ev.StateLost(step=0), *again])
    assert lines[0] == "no replica holds the state any more: back to step 0"
    assert "320 samples/s" in lines[-1] and "ETA" in lines[-1]


def test_a_log_gets_lines_and_a_terminal_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log, terminal = io.StringIO(), Terminal()
    for stream, kind in ((log, LogView), (terminal, BarView)):
        view = live_view(stream, 5.0)
        assert isinstance(view, kind)
        view.show([*start(), *commits(0, 100), lost(2), RECOVERY])
        view.show([])
        view.close()
    assert "\x1b" not in log.getvalue()
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    for text in ("step 100/2000", "3 go on: generation 8", "run gpt started"):
        assert text in seen and (text in log.getvalue() or text.startswith("step"))


@pytest.mark.parametrize("name", sorted(ev.event_types()))
def test_every_event_has_words_of_its_own(name: str) -> None:
    handler = words.describe.dispatch(ev.event_types()[name])
    assert handler is not words.describe.dispatch(ev.Event)


def test_an_event_of_a_newer_version_is_shown_as_it_is() -> None:
    event = ev.parse('{"v":1,"type":"moon_phase","time":3.0,"run":"gpt","phase":"full"}')
    assert words.describe(event) == "moon phase: phase full"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0841, "84 ms"), (0.0042, "4.2 ms"), (0.9999, "1.0 s"), (61.4, "61.4 s"), (724, "0:12:04")],
)
def test_seconds_read_well(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3210, "3.2k"), (812.4, "812"), (0.52, "0.52"), (123456, "123k"), (2.5e6, "2.5M"), (0, "0")],
)
def test_rates_read_well(value: float, text: str) -> None:
    assert words.rate(value) == text


def test_a_node_id_of_ray_is_cut_and_a_name_is_not() -> None:
    assert words.short("ab12cd34" * 7) == "ab12cd34"
    assert (
        words.short("gpu-node-with-a-very-long-name-of-its-own")
        == "gpu-node-with-a-very-long-name-of-its-own"
    )
