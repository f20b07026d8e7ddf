"""Looking at runs: what `status`, `events` and an attached `submit` read, live from controllers or out of the log.

Called by cli.py, which imports it when one of these commands runs and not for its help. Imports neither ray nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from everstep.errors import ControllerUnreachable, EverstepError, RunNotFound
from everstep.orchestrator import cli_show, connect, environment, eventlog
from everstep.orchestrator.events import Event, RunEnded, StepCommitted, parse
from everstep.orchestrator.live import live_view

_LOG_EVERY_S = 5.0
"""Between progress lines when attached to a run from a pipe."""
_ONE_OF_MANY_S = 3.0
"""For the status of one run among all: a mute one must not hide the others for long."""


def all_statuses() -> list[dict[str, Any]]:
    """The status of each live run, by name. A run that does not answer has only its name and a word for that."""
    return [_status_or_silence(run) for run in connect.live_runs()]


def status_of(run: str, storage: str | None, join: Callable[[], None]) -> dict[str, Any]:
    """The status of a run, from its log when it is not live. `join` joins the cluster.

    Raises RunNotFound or ControllerUnreachable when there is no log of it either.
    """
    try:
        join()
        found: dict[str, Any] = connect.ask(connect.find_controller(run), "status")
    except (RunNotFound, ControllerUnreachable) as error:
        return cli_show.logged_status(run, _logged(run, storage, error))
    return found


def event_texts(
    run: str, storage: str | None, join: Callable[[], None], *, follow: bool, steps: bool, as_json: bool
) -> Iterator[str]:
    """The lines that `everstep events` prints. Raises as `status_of`."""
    for line in _event_lines(run, storage, join, follow):
        event = parse(line)
        if as_json:
            yield line
        elif steps or not isinstance(event, StepCommitted):
            yield cli_show.event_line(event)


def attach(run: str, controller: Any) -> int:
    """Shows a live run until it has ended; returns the exit code of its outcome."""
    total = connect.ask(controller, "status").get("total")
    view = live_view(sys.stdout, _LOG_EVERY_S, total)
    outcome = None
    try:
        for lines in connect.event_lines(controller, follow=True):
            batch = [parse(line) for line in lines]
            view.show(batch)
            outcome = next((event.outcome for event in batch if isinstance(event, RunEnded)), outcome)
    finally:
        view.close()
    return 0 if outcome == "finished" else 1


def _event_lines(run: str, storage: str | None, join: Callable[[], None], follow: bool) -> Iterator[str]:
    try:
        join()
        controller = connect.find_controller(run)
    except (RunNotFound, ControllerUnreachable) as error:
        yield from (event.to_json() for event in _logged(run, storage, error))
        return
    for lines in connect.event_lines(controller, follow=follow):
        yield from lines


def _logged(run: str, storage: str | None, error: EverstepError) -> tuple[Event, ...]:
    """The events of a run that is not live, out of its log; `error`, which says so, when there is none."""
    place = environment.expand_home(storage or environment.default_storage())
    try:
        history = eventlog.read_history(place, run)
    except (OSError, ValueError, ImportError) as trouble:
        raise type(error)(f"{error}; and its log in {place} cannot be read: {trouble}") from error
    if not history.events:
        raise type(error)(f"{error}; and there is no log of it in {place}") from error
    if history.damaged:
        click.echo(f"{history.damaged} unreadable lines of the log in {place} are left out", err=True)
    return history.last_run()


def _status_or_silence(run: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = connect.ask(connect.find_controller(run), "status", timeout_s=_ONE_OF_MANY_S)
    except ControllerUnreachable:
        return {"run": run, "phase": "no answer"}
    except RunNotFound:
        return {"run": run, "phase": "ended"}
    return answer
