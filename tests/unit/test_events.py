"""Events: one line of JSON each, readable by older and newer versions, and durable in a log."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigError
from everstep.orchestrator import events as ev
from everstep.orchestrator.eventlog import EventLog, check_storage, read_history

TEXT = st.text(max_size=20)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**53), 2**53),
    str: TEXT,
    bool: st.booleans(),
    int | None: st.none() | st.integers(0, 9),
    float | None: st.none() | st.floats(0, 9),
    tuple[int, ...]: st.lists(st.integers(0, 99), max_size=4).map(tuple),
    tuple[str, ...]: st.lists(TEXT, max_size=4).map(tuple),
    Mapping[str, float]: st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    Mapping[str, Any]: st.dictionaries(TEXT, st.integers() | TEXT, max_size=3),
}


def any_event(cls: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.name != "extra"]
    return st.builds(cls, **{name: VALUES[hints[name]] for name in names})


@given(event=st.one_of([any_event(cls) for cls in ev.event_types().values()]))
def test_every_event_comes_back_from_its_line_as_it_was(event: ev.Event) -> None:
    line = event.to_json()
    assert "\n" not in line
    assert ev.parse(line) == event


def test_a_line_says_version_type_time_and_run_first() -> None:
    line = ev.Waiting(replicas=1, min_replicas=2).stamped(12.5, "gpt").to_json()
    assert line == '{"v":1,"type":"waiting","time":12.5,"run":"gpt","replicas":1,"min_replicas":2}'


def test_what_a_newer_version_wrote_survives_reading_and_writing() -> None:
    unknown_type = '{"v":1,"type":"moon_phase","time":3.0,"run":"gpt","phase":[1,{"a":null}]}'
    newer = '{"v":9,"type":"waiting","time":3.0,"run":"gpt","replicas":1,"min_replicas":2}'
    unknown_field = (
        '{"v":1,"type":"waiting","time":3.0,"run":"gpt","replicas":1,"min_replicas":2,"mood":"good"}'
    )
    missing_field = '{"v":1,"type":"waiting","time":3.0,"run":"gpt"}'
    for line in (unknown_type, newer, unknown_field, missing_field):
        assert ev.parse(line).to_json() == line
        assert ev.parse(line).run == "gpt"
    assert ev.parse(unknown_type).type == "moon_phase"
    assert isinstance(ev.parse(newer), ev.UnknownEvent), "its fields may mean something else"
    assert isinstance(ev.parse(unknown_field), ev.Waiting)


def test_numbers_that_json_does_not_have_are_written_as_null_and_read_as_nan() -> None:
    event = ev.StepCommitted(step=1, generation=1, metrics={"loss": math.inf, "lr": 0.1}, step_s=math.nan)
    line = event.to_json()
    assert json.loads(line)["metrics"] == {"loss": None, "lr": 0.1}
    again = ev.parse(line)
    assert isinstance(again, ev.StepCommitted)
    assert math.isnan(again.metrics["loss"]) and math.isnan(again.step_s)


@pytest.mark.parametrize("line", ["", "[]", "{", '{"v":1}', '{"type":3}', "null"])
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        ev.parse(line)


def steps(first: int, stop: int) -> list[ev.Event]:
    return [ev.StepCommitted(step=n, generation=1).stamped(float(n), "gpt") for n in range(first, stop)]


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "deep" / "storage")
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/storage"


def test_a_log_keeps_batches_of_several_controllers_in_order(storage: str) -> None:
    for incarnation in (9, 10, 11):
        log = EventLog(storage, "gpt", incarnation=incarnation)
        for batch in range(3):
            first = (incarnation - 9) * 9 + batch * 3
            log.add(*steps(first, first + 3))
            log.flush()
        log.flush()
    history = read_history(storage, "gpt")
    assert history.events == tuple(steps(0, 27))
    assert history.damaged == 0
    assert read_history(storage, "other").events == ()


def test_a_name_used_again_starts_a_new_run_in_the_same_log(storage: str) -> None:
    for value in (1, 2):
        log = EventLog(storage, "gpt", incarnation=1)
        log.add(ev.RunStarted(run="gpt", step=value), *steps(0, 2))
        log.flush()
    history = read_history(storage, "gpt")
    assert len(history.events) == 6
    assert history.last_run() == history.events[3:]


def test_a_half_written_line_costs_only_itself(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), "gpt")
    log.add(*steps(0, 2))
    log.flush()
    file = tmp_path / "gpt" / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert read_history(str(tmp_path), "gpt").damaged == 1

    successor = EventLog(str(tmp_path), "gpt", incarnation=2)
    successor.add(*steps(2, 4))
    successor.flush()
    history = read_history(str(tmp_path), "gpt")
    assert history.events == (*steps(0, 1), *steps(2, 4))
    assert history.damaged == 1


def test_a_failed_write_is_made_up_for_without_a_line_lost_or_twice(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(storage, "gpt")
    log.add(*steps(0, 2))
    log.flush()
    log.add(*steps(2, 4))
    with monkeypatch.context() as broken:
        where = (
            "os.fsync" if "://" not in storage else "fsspec.implementations.memory.MemoryFileSystem.pipe_file"
        )
        broken.setattr(where, _disk_full)
        with pytest.raises(OSError, match="disk full"):
            log.flush()
    log.add(*steps(4, 6))
    log.flush()
    assert read_history(storage, "gpt").events == tuple(steps(0, 6))


def test_events_may_come_while_others_are_written(storage: str) -> None:
    log = EventLog(storage, "gpt")
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            log.flush()

    writer = threading.Thread(target=write)
    writer.start()
    for event in steps(0, 2000):
        log.add(event)
    done.set()
    writer.join(timeout=30.0)
    log.flush()
    assert read_history(storage, "gpt").events == tuple(steps(0, 2000))


def _disk_full(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_storage_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    check_storage(str(tmp_path / "new" / "folder"), "run")
    assert list((tmp_path / "new" / "folder" / "run").iterdir()) == []
    check_storage("memory://events", "run")
    (tmp_path / "file").touch()
    for storage in (str(tmp_path / "file"), "/proc/nowhere", "nosuch://bucket/runs"):
        with pytest.raises(ConfigError, match=f"(?s)storage = '{storage}'.*EVERSTEP_STORAGE"):
            check_storage(storage, "run")
