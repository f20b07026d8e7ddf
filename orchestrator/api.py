"""`run(train, config)`: what a driver script calls.

It starts the run's controller, or attaches to one whose driver was lost, shows what happens until the end, and
returns the result. The run itself does not depend on this process: see `DetectionConfig.driver_grace_s`.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep import errors
from everstep.actors.places import checkpoints_url
from everstep.errors import (
    ConfigError,
    ControllerUnreachable,
    EverstepError,
    RunNameTaken,
    RunStopped,
    TrainingError,
)
from everstep.orchestrator import connect
from everstep.orchestrator.config import RunConfig
from everstep.orchestrator.eventlog import check_storage
from everstep.orchestrator.events import Event, Recovery, parse
from everstep.orchestrator.live import live_view

if TYPE_CHECKING:
    from everstep.actors.session import Session

_POLL_S = 2.0
_ANSWER_S = 30.0
_INTERRUPTED_S = 2.0
"""For what a driver still does after SIGTERM; Ray's job API kills it after three seconds."""
_SILENCE_S = 120.0
"""How long the controller may be unreachable (Ray restarts it meanwhile) before the driver gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a run."""

    run: str
    steps: int
    """Steps committed."""
    metrics: Mapping[str, float]
    """Metrics of the last step."""
    value: Any
    """What the train function returned, as far as it is JSON-safe."""
    digest: str
    """xxh3_128 (hex) of the final state: equal for two runs iff their final states are bit for bit the same."""
    generations: int
    """Number of memberships the run had."""
    recoveries: Sequence[Recovery] = field(default_factory=tuple)
    """Every change of membership, planned or not, with its phases in seconds."""
    buckets: Mapping[str, float] = field(default_factory=dict)
    """Seconds of wall time by what they were used for; they sum to the run's wall time."""


def run(train: Callable[[Session], Any], config: RunConfig, *, address: str | None = None) -> Result:
    """Train on a Ray cluster until the last step, whatever happens to its machines on the way.

    Args:
        train: called in every replica with its `Session`. Must be picklable (a function of an importable module or
            of the driver script); returns numbers or other JSON-safe values.
        config: see `RunConfig`.
        address: of the Ray cluster; None: the one Ray finds by itself, as inside `ray job submit`.

    Raises:
        ConfigError: `train` is no function, or cannot be pickled.
        RunNameTaken: a run of that name is live and has a driver.
        TrainingError: user code failed; the message begins with its traceback.
        BudgetExhausted, RunStopped, CannotStart: as their names say.
    """
    connect.connect(address, log_to_driver=True)
    pickled = _pickled(train)
    controller = _start_or_attach(pickled, config)
    with _stop_on_signal(controller):
        return _follow(controller, config)


def _pickled(train: Callable[[Session], Any]) -> bytes:
    """Raises ConfigError for what replicas could not call."""
    import ray

    if not callable(train):
        raise ConfigError(
            f"train = {train!r:.80}: it must be a function that takes the session: def train(run): ..."
        )
    try:
        return bytes(ray.cloudpickle.dumps(train))  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the objects it refers to raise
        raise ConfigError(
            f"train = {train!r:.80} cannot be sent to the replicas: {error}. It, and what it refers to, must be picklable; "
            "make models, locks and open files inside of it"
        ) from error


def _start_or_attach(train: bytes, config: RunConfig) -> Any:
    import ray

    deadline = time.monotonic() + _ANSWER_S
    while True:
        with contextlib.suppress(errors.RunNotFound):
            existing = connect.find_controller(config.name)
            if _attachable(existing, config, deadline):
                return existing
            continue
        try:
            return _create(train, config)
        except ValueError as error:  # somebody was faster: look again
            if time.monotonic() > deadline:
                raise ControllerUnreachable(f"run {config.name!r} cannot be started: {error}") from error
        except ray.exceptions.RayError as error:
            raise errors.CannotStart(
                f"run {config.name!r}: its controller cannot be created: {error}"
            ) from error


def _attachable(controller: Any, config: RunConfig, deadline: float) -> bool:
    """True: go on with this controller. False: it is about to be gone, look again."""
    try:
        if _has_driver(controller):
            raise RunNameTaken(
                f"a run named {config.name!r} is live on this cluster and has a driver. Choose another name, follow it "
                f"with `everstep events {config.name} --follow`, or end it with `everstep stop {config.name}`"
            )
        status = connect.ask(controller, "status")
        if status["phase"] not in ("ending", "ended"):
            return True
        if status["outcome"] == "finished" and not status["collected"]:
            return True  # its driver was lost before it could read the result: here it is
        while connect.ask(controller, "result") is None and time.monotonic() < deadline:
            threading.Event().wait(0.2)
        _wait_gone(config.name, deadline)
        return False
    except errors.RunNotFound:
        return False


def _has_driver(controller: Any) -> bool:
    """A driver that was just killed seems alive for some seconds: ask until that is over."""
    from everstep.orchestrator.controller import DRIVER_SILENCE_S

    deadline, pause = time.monotonic() + DRIVER_SILENCE_S + 1.0, threading.Event()
    while connect.ask(controller, "driver_alive"):
        if time.monotonic() > deadline:
            return True
        pause.wait(0.5)
    return False


def _wait_gone(name: str, deadline: float) -> None:
    """An ended controller leaves within moments of having been asked for its result."""
    pause = threading.Event()
    while time.monotonic() < deadline:
        try:
            connect.find_controller(name)
        except errors.RunNotFound:
            return
        pause.wait(0.2)
    raise ControllerUnreachable(f"the ended run {name!r} still holds its name; try again in a minute")


def _create(train: bytes, config: RunConfig) -> Any:
    import ray

    from everstep.orchestrator.controller import Controller, ControllerSpec

    # Behind a Ray client this machine may see other folders than the cluster.
    if not ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
        check_storage(config.storage, config.name, config.checkpoint.storage_options)
        if config.checkpoint.wanted:
            from everstep.checkpoint.store import open_store

            open_store(checkpoints_url(config), config.checkpoint.storage_options).check()
    options: dict[str, Any] = {
        "name": connect.controller_name(config.name),
        "namespace": connect.NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 1000,
        "num_cpus": 0,
        # On the head, the node that outlives the others.
        "resources": {"node:__internal_head__": 0.001},
    }
    spec = ControllerSpec(config=config, token=secrets.token_hex(32))
    actor: Any = ray.remote(Controller).options(**options).remote(spec, train)
    with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        ray.get(actor.endpoint.remote(), timeout=_ANSWER_S)  # raises what its start raised
    return actor


@contextlib.contextmanager
def _stop_on_signal(controller: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM (`ray job stop`) end the run, not only this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(EverstepError):
            _stop_now(controller)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop_now(controller: Any) -> None:
    """End the run, and read its result, which nobody else does: then the controller leaves at once."""
    deadline, pause = time.monotonic() + _INTERRUPTED_S, threading.Event()
    connect.ask(controller, "stop", "the driver: interrupted", True, timeout_s=_INTERRUPTED_S)
    while connect.ask(controller, "result", timeout_s=0.5) is None and time.monotonic() < deadline:
        pause.wait(0.1)


def _follow(controller: Any, config: RunConfig) -> Result:
    view = live_view(sys.stdout, config.log_every_s)
    recoveries: list[Recovery] = []
    after, heard = 0, time.monotonic()
    try:
        while True:
            try:
                answer = connect.ask(controller, "events", after, _POLL_S, True, timeout_s=_ANSWER_S)
                heard = time.monotonic()
            except ControllerUnreachable:
                if time.monotonic() - heard > _SILENCE_S:
                    raise
                threading.Event().wait(0.5)
                continue
            batch = [parse(line) for line in answer["events"]]
            after = answer["next"]
            recoveries += [e for e in batch if isinstance(e, Recovery)]
            view.show(batch)
            if answer["ended"]:
                return _result(connect.ask(controller, "result"), recoveries, batch)
    finally:
        view.close()


def _result(answer: Mapping[str, Any], recoveries: Sequence[Recovery], last: Sequence[Event]) -> Result:
    if answer["outcome"] == "finished":
        return Result(
            run=answer["run"],
            steps=answer["steps"],
            metrics=answer["metrics"],
            value=answer["value"],
            digest=answer["digest"],
            generations=answer["generations"],
            recoveries=tuple(recoveries),
            buckets=answer["buckets"],
        )
    reason = str(answer["reason"])
    where = f"run {answer['run']!r} {answer['outcome']} after step {answer['steps']}"
    if answer["outcome"] == "stopped":
        raise RunStopped(f"{where}: {reason}")
    raise _kind_of(reason)(f"{reason}\n{where}")


def _kind_of(reason: str) -> type[EverstepError]:
    """The exception that a reason names: its last line that begins with one of the family."""
    for line in reversed(reason.splitlines()):
        kind = getattr(errors, line.split(":")[0].split(" ")[0], None)
        if isinstance(kind, type) and issubclass(kind, EverstepError):
            return kind
    return TrainingError
