"""`everstep submit`: a thin layer over Ray's job API that knows runs by name. Called by cli.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from everstep.errors import ConfigError, RunNotFound
from everstep.orchestrator import connect, environment
from everstep.orchestrator.cli_jobs import Jobs, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What is to be submitted, and how to tell of it."""

    run: str | None
    entrypoint: tuple[str, ...]
    runtime_env: Mapping[str, Any]
    job: str | None
    wait: bool
    as_json: bool


def submit(wish: Submission, address: str | None) -> int:
    """Submits, or attaches to what is live under the name. Returns the exit code.

    Raises ControllerUnreachable, ConfigError.
    """
    if address:
        environment.forget_ray_addresses()
    jobs = Jobs(address)
    earlier = jobs.latest(wish.run) if wish.run else None
    controller = _live_controller(wish.run, address)
    live = controller is not None and _has_driver(controller, earlier)
    starting = earlier is not None and not earlier.ended
    if not live and not starting:
        return _submit_new(jobs, wish)
    if not wish.wait:
        return _told(wish, earlier.job if earlier else None, "live")
    click.echo(f"run {wish.run} is live; nothing is submitted, its events follow", err=True)
    if live:
        return _attached(wish, controller)
    assert earlier is not None
    return _log_until_end(jobs, wish, earlier.job)


def runtime_environment(
    run: str | None, working_dir: str | None, file: str | None, text: str | None
) -> dict[str, Any]:
    """Ray's runtime environment from the options, as `ray job submit` reads them. Raises ConfigError."""
    if file and text:
        raise ConfigError("--runtime-env and --runtime-env-json exclude each other: give one of them")
    found = _yaml_file(file) if file else _json_text(text) if text else {}
    if not isinstance(found, dict):
        raise ConfigError(f"the runtime environment must be a mapping, not {type(found).__name__}")
    if working_dir:
        found["working_dir"] = working_dir
    if run:
        found["env_vars"] = {**found.get("env_vars", {}), environment.RUN_NAME: run}
    return found


def _submit_new(jobs: Jobs, wish: Submission) -> int:
    entrypoint = shlex.join(wish.entrypoint)
    job = jobs.submit(entrypoint, runtime_env=wish.runtime_env, run=wish.run, job=wish.job)
    if not wish.as_json:
        run = wish.run or "RUN"
        click.echo(f"job {job} submitted" + (f" for run {wish.run}" if wish.run else ""))
        click.echo(f"  everstep status {run}   everstep scale {run} N   everstep stop {run}\n")
    return _log_until_end(jobs, wish, job) if wish.wait else _told(wish, job, "submitted")


def _log_until_end(jobs: Jobs, wish: Submission, job: str) -> int:
    # With --json standard output is for the one object at the end.
    try:
        jobs.show_log(job, lambda piece: click.echo(piece, nl=False, err=wish.as_json))
    except KeyboardInterrupt:
        click.echo(f"\nthe job goes on; see it again with `ray job logs --follow {job}`", err=True)
        raise
    end = jobs.outcome(job)
    _told(wish, job, end.state.lower())
    if end.state == "SUCCEEDED":
        return 0
    click.echo(f"job {job} {end.state.lower()}: {end.reason}", err=True)
    return 1


def _attached(wish: Submission, controller: Any) -> int:
    from everstep.orchestrator import cli_watch

    try:
        return cli_watch.attach(str(wish.run), controller)
    except KeyboardInterrupt:
        click.echo(f"\nthe run goes on; see it again with `everstep events --follow {wish.run}`", err=True)
        raise


def _told(wish: Submission, job: str | None, state: str) -> int:
    if wish.as_json:
        click.echo(json.dumps({"run": wish.run, "job": job, "state": state}))
    elif state == "live":
        click.echo(f"run {wish.run} is live; nothing is submitted")
    return 0


def _live_controller(run: str | None, address: str | None) -> Any:
    if run is None or environment.is_job_api(environment.cluster_address(address)):
        return None  # over the job API alone only its jobs can be seen
    connect.connect(address)
    try:
        return connect.find_controller(run)
    except RunNotFound:
        return None


def _has_driver(controller: Any, job: JobState | None) -> bool:
    """False for a run that ends, or whose driver is lost: there a new job starts it anew, or takes it over."""
    status = connect.ask(controller, "status")
    if status["phase"] in ("ending", "ended"):
        return False
    if job is not None and job.ended and job.ended_at > (status.get("started_at") or 0.0):
        return False
    return bool(connect.ask(controller, "driver_alive"))


def _yaml_file(file: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--runtime-env {file}: {error}") from None


def _json_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--runtime-env-json is not JSON: {error}") from None
