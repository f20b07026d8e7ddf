"""The command line against a controller and a job API that are made up: what it asks, prints and exits with."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from everstep import errors
from everstep.orchestrator import cli_jobs, cli_relay, connect
from everstep.orchestrator import events as ev
from everstep.orchestrator.cli import cli
from everstep.orchestrator.eventlog import EventLog

STATUS = {
    "run": "gpt",
    "phase": "running",
    "outcome": None,
    "step": 120,
    "total": 2000,
    "generation": 7,
    "world_size": 3,
    "target": 4,
    "min_replicas": 1,
    "max_replicas": 8,
    "spares_ready": 1,
    "samples_per_s": 3210.0,
    "eta_s": 724.0,
    "metrics": {"loss": 1.2345},
    "started_at": 1000.0,
    "replicas": [
        {"replica": 0, "state": "member", "rank": 0, "node": "ab12cd34" * 7, "host": "h1", "pid": 17, "shards": [0, 1],
         "step": 120, "heartbeat_age_s": 0.2, "compute_s": 0.051},
        {"replica": 3, "state": "warming", "rank": None, "node": "", "host": "", "pid": 0, "shards": [],
         "step": None, "heartbeat_age_s": 0.2, "compute_s": 0.0},
    ],
    "last_recovery": ev.Recovery(generation_before=6, generation_after=7, total_s=0.084, world_size_after=3).to_dict(),
    "draining": ["ef56ab12" * 7],
    "buckets": {"productive": 99.0, "re_form": 1.0},
    "incarnation": 1,
}  # fmt: skip

EVENTS = [
    ev.RunStarted(total=3).stamped(1000.0, "gpt"),
    ev.GenerationFormed(generation=1, replicas=(0, 1), step=0).stamped(1001.0, "gpt"),
    *(
        ev.StepCommitted(step=n, generation=1, samples=8, metrics={"loss": 0.5}).stamped(1002.0, "gpt")
        for n in range(3)
    ),
    ev.RunEnded(outcome="finished", step=3).stamped(1003.0, "gpt"),
]


class FakeController:
    """Answers as the actor's methods do, and remembers what it was asked."""

    def __init__(self, events: list[ev.Event] = EVENTS, batch: int = 2, **answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.lines = [event.to_json() for event in events]
        self.batch = batch
        self.answers: dict[str, Any] = {
            "status": STATUS,
            "driver_alive": True,
            "scale": {"run": "gpt", "before": 4, "target": 6, "world_size": 3},
            "drain": {"run": "gpt", "node": "ab12", "replicas": [0]},
            "stop": {"run": "gpt", "step": 120},
            **answers,
        }

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.asked.append((method, *args))
            return self.events_after(*args) if method == "events" else self.answers[method]

        return SimpleNamespace(remote=remote)

    def events_after(self, after: int, wait_s: float) -> dict[str, Any]:
        lines = self.lines[after : after + self.batch]
        following = after + len(lines)
        ended = following == len(self.lines) and '"run_ended"' in self.lines[-1]
        return {"events": lines, "next": following, "ended": ended}


class FakeClient:
    """Ray's job client as far as it is used."""

    def __init__(self, log: str = "", status: str = "SUCCEEDED", exit_code: int = 0) -> None:
        self.jobs: list[SimpleNamespace] = []
        self.submitted: list[dict[str, Any]] = []
        self.log, self.status, self.exit_code = log, status, exit_code

    def add(self, run: str | None, status: str, end_s: float = 0.0, job: str = "job-1") -> None:
        self.jobs.append(
            SimpleNamespace(
                submission_id=job, status=status, metadata={"everstep_run": run} if run else None, start_time=len(self.jobs),
                end_time=end_s * 1000, message="it broke\nmore", driver_exit_code=self.exit_code,
            )
        )  # fmt: skip

    def submit_job(self, **job: Any) -> str:
        self.submitted.append(job)
        name = f"job-{len(self.jobs) + 1}"
        self.add(job["metadata"].get("everstep_run"), self.status, job=name)
        return name

    def list_jobs(self) -> list[SimpleNamespace]:
        return self.jobs

    def get_job_info(self, job: str) -> SimpleNamespace:
        return next(found for found in self.jobs if found.submission_id == job)

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for start in range(0, len(self.log), 7):
            yield self.log[start : start + 7]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The live runs of the cluster, by name."""
    runs: dict[str, Any] = {"gpt": FakeController()}

    def find(run: str) -> Any:
        if run not in runs:
            raise errors.RunNotFound(f"no live run {run!r} on this cluster; live are: {', '.join(runs)}")
        return runs[run]

    monkeypatch.setattr(connect, "connect", lambda address=None: None)
    monkeypatch.setattr(connect, "find_controller", find)
    monkeypatch.setattr(connect, "live_runs", lambda: sorted(runs))
    monkeypatch.setattr(connect, "_get", lambda answer, method, timeout_s: answer)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return runs


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient()
    monkeypatch.setattr(cli_jobs, "_client", lambda address: made)
    return made


def everstep(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_status_lists_all_live_runs(live: dict[str, Any]) -> None:
    live["bert"] = FakeController(
        status={**STATUS, "run": "bert", "eta_s": None, "samples_per_s": None, "total": None}
    )
    result = everstep("status")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "RUN   PHASE    STEP      REPLICAS  WISHED  GENERATION  SAMPLES/S  ETA",
        "bert  running  120       3         4       7           -          -",
        "gpt   running  120/2000  3         4       7           3.2k       0:12:04",
    ]
    assert [status["run"] for status in json.loads(everstep("status", "--json").output)] == ["bert", "gpt"]


def test_status_says_when_nothing_is_live(live: dict[str, Any]) -> None:
    live.clear()
    assert everstep("status").output == "no run is live on this cluster\n"


def test_a_run_that_does_not_answer_does_not_hide_the_others(
    live: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live["mute"] = FakeController()

    def get(answer: Any, method: str, timeout_s: float) -> Any:
        if ("status",) in live["mute"].asked:
            live["mute"].asked.clear()
            raise errors.ControllerUnreachable("no answer")
        return answer

    monkeypatch.setattr(connect, "_get", get)
    lines = everstep("status").output.splitlines()
    assert lines[1].startswith("gpt   running")
    assert lines[2].startswith("mute  no answer")


def test_status_of_one_run_tells_all_of_it(live: dict[str, Any]) -> None:
    output = everstep("status", "gpt").output
    for told in (
        "run gpt: running, generation 7",
        "120/2000  loss 1.2345",
        "3.2k samples/s, ETA 0:12:04",
        "3 of 4 wished (1 to 8), 1 spare ready",
        "draining       ef56ab12\n",
        "3 go on: generation 7 after 84 ms, step 0, 0 steps lost",
        "productive 99.0 %, re form 1.0 %",
        "0        member   0     ab12cd34  h1    17   2       120   200 ms ago  51 ms",
        "3        warming  -     -         -     -    0       -",
    ):
        assert told in output
    assert json.loads(everstep("status", "gpt", "--json").output) == STATUS


def test_commands_ask_the_controller_and_say_who_asked(live: dict[str, Any]) -> None:
    results = [
        everstep("scale", "gpt", "6"),
        everstep("drain", "gpt", "ab12"),
        everstep("stop", "gpt", "--now"),
    ]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert results[0].output == "run gpt: 6 replicas wished, 3 now\n"
    asked = live["gpt"].asked
    assert [call[0] for call in asked] == ["scale", "drain", "stop"]
    assert asked[0][1] == 6 and asked[1][1] == "ab12" and asked[2][2] is True
    assert all("@" in str(call) for call in asked)
    assert json.loads(everstep("scale", "gpt", "6", "--json").output)["target"] == 6


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            ("status", "nope"),
            3,
            "Error: no live run 'nope' on this cluster; live are: gpt; and there is no log of it",
        ),
        (("scale", "nope", "2"), 3, "Error: no live run 'nope'"),
        (("events", "nope"), 3, "no live run 'nope'"),
        (("scale", "gpt", "0"), 2, "0 is not in the range x>=1"),
        (("scale", "gpt", "many"), 2, "'many' is not a valid integer"),
        (("scale", "gpt"), 2, "Missing argument 'N'"),
        (("resize", "gpt"), 2, "No such command 'resize'"),
        (("submit",), 2, "Missing argument 'ENTRYPOINT...'"),
        (("submit", "--nam", "gpt", "--", "python"), 2, "No such option"),
        (("submit", "--runtime-env-json", "{", "--", "python"), 2, "--runtime-env-json is not JSON"),
        (("submit", "--runtime-env", "/no/such.yaml", "--", "python"), 2, "--runtime-env /no/such.yaml"),
    ],
)
def test_each_kind_of_trouble_has_its_exit_code(
    live: dict[str, Any], arguments: tuple[str, ...], code: int, told: str
) -> None:
    result = everstep(*arguments)
    assert result.exit_code == code
    assert told in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("ConfigError", 2),
        ("RunNotFound", 3),
        ("ControllerUnreachable", 3),
        ("RunStopped", 1),
        ("NoSuchKind", 1),
    ],
)
def test_an_error_of_the_controller_comes_out_as_it_was(live: dict[str, Any], kind: str, code: int) -> None:
    live["gpt"] = FakeController(scale={"error": {"type": kind, "message": "9 is above max_replicas = 8"}})
    result = everstep("scale", "gpt", "9")
    assert result.exit_code == code
    assert result.output == "Error: 9 is above max_replicas = 8\n"


def test_a_cluster_that_is_not_there_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = everstep("status", "--address", "127.0.0.1:1")
    assert result.exit_code == 3
    assert "no Ray cluster found at 127.0.0.1:1" in result.output


def test_events_are_sentences_or_json_lines(live: dict[str, Any]) -> None:
    sentences = everstep("events", "gpt").output.splitlines()
    assert [line[21:] for line in sentences] == [
        "run gpt started",
        "generation 1: 2 replicas, step 0",
        "run finished after 3 steps",
    ]
    assert "step 1 committed  loss 0.5000" in everstep("events", "gpt", "--steps").output
    assert everstep("events", "gpt", "--json").output.splitlines() == live["gpt"].lines


def test_events_of_a_running_run_end_at_the_present_and_following_ones_with_the_run(
    live: dict[str, Any],
) -> None:
    live["gpt"] = FakeController(EVENTS[:-1])
    assert len(everstep("events", "gpt", "--json").output.splitlines()) == 5
    live["gpt"] = controller = FakeController(EVENTS[:-1])
    end = EVENTS[-1].to_json()

    def late(after: int, wait_s: float) -> dict[str, Any]:
        answer = FakeController.events_after(controller, after, wait_s)
        if not answer["events"]:
            assert wait_s > 0, "a follower waits at the controller, not here"
            controller.lines.append(end)
        return answer

    controller.events_after = late  # type: ignore[method-assign]
    followed = everstep("events", "gpt", "--follow", "--json").output.splitlines()
    assert followed[-1] == end and len(followed) == 6


def test_a_run_that_has_ended_is_told_from_its_log(live: dict[str, Any], own_storage: Path) -> None:
    log = EventLog(str(own_storage), "old")
    log.add(*EVENTS)
    log.flush()
    assert everstep("events", "old", "--json").output.splitlines() == live["gpt"].lines
    output = everstep("status", "old").output
    assert "run old: finished" in output and "3/3" in output
    assert (
        json.loads(everstep("status", "old", "--json", "--storage", str(own_storage)).output)["outcome"]
        == "finished"
    )


def test_submit_gives_the_job_the_name_and_shows_its_log(live: dict[str, Any], client: FakeClient) -> None:
    client.log = "step 1/3  loss 0.5\nstep 2/3\n"
    result = everstep(
        "submit", "--name", "new", "--working-dir", ".", "--runtime-env-json", '{"env_vars": {"A": "1"}}',
        "--", "python", "train.py", "--note", "two words",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.output.endswith(client.log)
    [job] = client.submitted
    assert job["entrypoint"] == "python train.py --note 'two words'"
    assert job["runtime_env"] == {"working_dir": ".", "env_vars": {"A": "1", "EVERSTEP_RUN_NAME": "new"}}
    assert job["metadata"] == {"everstep_run": "new"}


def test_submit_ends_as_its_job_ends(live: dict[str, Any], client: FakeClient) -> None:
    client.status = "FAILED"
    result = everstep("submit", "--", "python", "train.py")
    assert result.exit_code == 1
    assert "job job-1 failed: it broke\n" in result.output


def test_submit_without_waiting_tells_the_job_to_programs(live: dict[str, Any], client: FakeClient) -> None:
    result = everstep("submit", "--name", "new", "--no-wait", "--json", "--", "python", "train.py")
    assert json.loads(result.output) == {"run": "new", "job": "job-1", "state": "submitted"}


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1), ("stopped", 1)])
def test_submit_attaches_to_a_live_run_of_that_name(
    live: dict[str, Any], client: FakeClient, outcome: str, code: int
) -> None:
    live["gpt"] = FakeController([*EVENTS[:-1], ev.RunEnded(outcome=outcome, step=3)])
    result = everstep("submit", "--name", "gpt", "--", "python", "train.py")
    assert client.submitted == []
    assert "run gpt is live; nothing is submitted" in result.output
    assert f"run {outcome} after 3 steps" in result.output
    assert result.exit_code == code


def test_submit_attaches_to_a_job_that_has_not_started_its_run_yet(
    live: dict[str, Any], client: FakeClient
) -> None:
    client.add("new", "PENDING")
    result = everstep("submit", "--name", "new", "--no-wait", "--json", "--", "python", "train.py")
    assert client.submitted == []
    assert json.loads(result.output) == {"run": "new", "job": "job-1", "state": "live"}


def lost_driver(live: dict[str, Any], client: FakeClient) -> None:
    client.add("gpt", "FAILED", end_s=STATUS["started_at"] + 5)  # type: ignore[operator]


def no_driver(live: dict[str, Any], client: FakeClient) -> None:
    live["gpt"] = FakeController(driver_alive=False)


def ended(live: dict[str, Any], client: FakeClient) -> None:
    live["gpt"] = FakeController(status={**STATUS, "phase": "ended"})


@pytest.mark.parametrize("arrange", [lost_driver, no_driver, ended])
def test_submit_sends_a_new_driver_to_a_run_without_one(
    live: dict[str, Any], client: FakeClient, arrange: Callable[[dict[str, Any], FakeClient], None]
) -> None:
    arrange(live, client)
    assert everstep("submit", "--name", "gpt", "--no-wait", "--", "python", "train.py").exit_code == 0
    assert len(client.submitted) == 1


def test_an_earlier_job_of_the_same_name_does_not_stand_in_the_way(
    live: dict[str, Any], client: FakeClient
) -> None:
    client.add("gpt", "FAILED", end_s=STATUS["started_at"] - 5)  # type: ignore[operator]
    assert "is live" in everstep("submit", "--name", "gpt", "--no-wait", "--", "python", "train.py").output
    assert client.submitted == []


def test_submit_waits_for_a_head_that_is_still_starting(
    live: dict[str, Any], client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [RuntimeError("status code 500: No available agent to submit job, please try again later.")] * 2
    submit = client.submit_job

    def starting(**job: Any) -> str:
        if answers:
            raise answers.pop()
        return submit(**job)

    monkeypatch.setattr(client, "submit_job", starting)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert everstep("submit", "--", "python", "train.py").exit_code == 0
    monkeypatch.setattr(
        client, "submit_job", lambda **_: (_ for _ in ()).throw(RuntimeError("status code 400: no"))
    )
    result = everstep("submit", "--", "python", "train.py")
    assert result.exit_code == 2 and "the cluster refused the job: status code 400: no" in result.output


@pytest.mark.parametrize("by", ["option", "environment"])
def test_where_only_the_job_api_is_reached_the_command_runs_on_the_cluster(
    live: dict[str, Any], client: FakeClient, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    begin = cli_relay._BEGIN
    client.log = (
        f"Runtime env is setting up.\n{begin}\nRunning entrypoint for job x: y\nRUN  PHASE\ngpt  running"
    )
    client.exit_code = 3
    where = ("--address", "http://head:8265") if by == "option" else ()
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    result = everstep("scale", *where, "gpt", "3", "--json")
    assert result.output == "RUN  PHASE\ngpt  running\n"
    assert result.exit_code == 3
    [job] = client.submitted
    assert job["entrypoint"].endswith("&& exec python -m everstep scale gpt 3 --json")
    assert Path(job["runtime_env"]["py_modules"][0], "errors.py").is_file()
    assert live["gpt"].asked == []


def test_an_address_given_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, live: dict[str, Any]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://other:8265")
    assert everstep("status", "--address", "head:6379").output.startswith("RUN")
    assert "RAY_ADDRESS" not in os.environ, "Ray would let it win"


def test_names_of_actors_are_those_that_everybody_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util

    assert connect.controller_name("gpt") == "everstep:gpt:controller"
    assert connect.replica_name("gpt", 3) == "everstep:gpt:replica-3"
    names = [
        ("everstep", connect.controller_name("a.b")),
        ("everstep", connect.replica_name("a.b", 0)),
        ("x", "y"),
    ]
    names.append(("other", connect.controller_name("foreign")))
    monkeypatch.setattr(
        ray.util,
        "list_named_actors",
        lambda all_namespaces: [{"namespace": space, "name": name} for space, name in names],
    )
    assert connect.live_runs() == ["a.b"]


def test_an_error_goes_through_an_answer_and_comes_out_as_itself() -> None:
    with pytest.raises(errors.RunStopped, match="by joe"):
        connect.raise_if_error(connect.error_answer(errors.RunStopped("by joe")))
    connect.raise_if_error({"error": None})
    connect.raise_if_error({"run": "gpt"})
