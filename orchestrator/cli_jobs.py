"""Ray's job API as the command line needs it: submit, find by run, show a log, wait for the end.

Called by cli_submit.py and cli_relay.py. All errors of Ray's client leave here as ours; every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import ConfigError, ControllerUnreachable
from everstep.orchestrator import environment

RUN_METADATA = "everstep_run"
"""Job metadata that holds the run's name."""
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_CHATTY = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers of Ray that tell of each upload and each closed socket."""
_TRY_AGAIN_S = 60.0
_OUTCOME_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as it stands."""

    job: str
    """Ray's submission id."""
    state: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    reason: str
    exit_code: int | None
    """Of the job's process, where it ran."""
    ended_at: float
    """Unix seconds; 0.0 while it goes on."""

    @property
    def ended(self) -> bool:
        """Whether it will change no more."""
        return self.state in _ENDED


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, address: str | None) -> None:
        """`address`: as `ray job submit` takes it; None: where Ray finds one. Raises ControllerUnreachable."""
        try:
            self._client = _client(address)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            tried = address or ", ".join(environment.ray_addresses().values()) or "this machine"
            raise ControllerUnreachable(
                f"no job API found at {tried} ({_first_line(error)}); start a cluster with `ray start --head`, or name "
                "one with --address"
            ) from error

    def submit(
        self,
        entrypoint: str,
        *,
        runtime_env: Mapping[str, Any],
        run: str | None = None,
        job: str | None = None,
    ) -> str:
        """Starts a shell command as a job and returns the job's id.

        Raises ControllerUnreachable when the cluster does not take it within a minute, and ConfigError when it refuses.
        """
        deadline = time.monotonic() + _TRY_AGAIN_S
        while True:
            try:
                return str(
                    self._client.submit_job(
                        entrypoint=entrypoint,
                        runtime_env=dict(runtime_env),
                        submission_id=job,
                        metadata={RUN_METADATA: run} if run else {},
                    )
                )
            except ValueError as error:
                raise ConfigError(f"the job cannot be submitted: {error}") from error
            except RuntimeError as error:
                # A head that has just started has no agent to run jobs yet, and asks to come back.
                if "try again" not in str(error):
                    raise ConfigError(f"the cluster refused the job: {_first_line(error)}") from error
                if time.monotonic() > deadline:
                    raise ControllerUnreachable(f"the cluster takes no job: {_first_line(error)}") from error
            time.sleep(1.0)

    def latest(self, run: str) -> JobState | None:
        """The job that was submitted last for a run, None when there is none. Raises ControllerUnreachable."""
        with _reaching("list jobs"):
            jobs = [job for job in self._client.list_jobs() if (job.metadata or {}).get(RUN_METADATA) == run]
        last = max(jobs, key=lambda job: job.start_time or 0, default=None)
        return None if last is None else _state(last)

    def show_log(self, job: str, show: Callable[[str], None]) -> None:
        """Hands the job's output to `show` in pieces, from its beginning until the job ends.

        Raises ControllerUnreachable when the connection breaks before.
        """

        import asyncio

        async def tail() -> None:
            async for piece in self._client.tail_job_logs(job):
                show(piece)

        try:
            asyncio.run(tail())
        except (ConnectionError, OSError, RuntimeError) as error:
            again = f"the job goes on; see it again with `ray job logs --follow {job}`"
            raise ControllerUnreachable(
                f"the log of job {job} broke off ({_first_line(error)}); {again}"
            ) from error

    def outcome(self, job: str) -> JobState:
        """The last state of a job whose log has ended. Raises ControllerUnreachable."""
        deadline = time.monotonic() + _OUTCOME_TIMEOUT_S
        while time.monotonic() < deadline:
            with _reaching(f"tell of job {job}"):
                found = _state(self._client.get_job_info(job))
            if found.ended:
                return found
            time.sleep(0.1)  # the job API has no call that waits
        raise ControllerUnreachable(
            f"job {job} closed its log but did not end within {_OUTCOME_TIMEOUT_S:g} s"
        )

    def stop(self, job: str) -> None:
        """Asks the job to end. Raises ControllerUnreachable."""
        with _reaching(f"stop job {job}"):
            self._client.stop_job(job)


def _client(address: str | None) -> Any:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return client


def _state(details: Any) -> JobState:
    # Ray repeats the log's end in its message.
    reason = (details.message or "no reason given").partition(", last available logs")[0]
    return JobState(
        job=str(details.submission_id),
        state=str(getattr(details.status, "value", details.status)),
        reason=reason.partition("\n")[0],
        exit_code=details.driver_exit_code,
        ended_at=(details.end_time or 0) / 1000,
    )


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, RuntimeError) as error:
        raise ControllerUnreachable(f"the job API did not {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
