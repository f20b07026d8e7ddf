"""Runs a command of ours on the cluster itself, for users who reach nothing of it but the job API.

Called by cli.py for addresses such as http://HOST:8265. The command becomes a small job, which brings this very
version of the package along; its output is shown here and its exit code is ours.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import click

import everstep
from everstep.orchestrator.cli_jobs import Jobs

_BEGIN = "--- everstep output ---"
"""Printed before the command: Ray writes lines of its own into the log before it."""
_BY_RAY = "Running entrypoint for job "
"""This one of them may also come later: the job's process and its supervisor write to one file."""


def run_there(address: str, arguments: Sequence[str]) -> int:
    """Runs `everstep ARGUMENTS` on the cluster. Returns its exit code; raises ControllerUnreachable."""
    jobs = Jobs(address)
    command = shlex.join(["python", "-m", "everstep", *without_address(arguments)])
    job = jobs.submit(
        f"echo {shlex.quote(_BEGIN)} && exec {command}",
        runtime_env={"py_modules": [str(Path(everstep.__file__).parent)]},
    )
    output = CommandOutput(click.echo)
    try:
        jobs.show_log(job, output.feed)
        output.close()
    except KeyboardInterrupt:
        jobs.stop(job)
        raise
    end = jobs.outcome(job)
    if end.exit_code is None:
        click.echo(f"the command could not be run on the cluster: {end.reason}", err=True)
        return 3
    return end.exit_code


def without_address(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--address X` and `--address=X`: on the cluster Ray finds itself."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--address" and not argument.startswith("--address="):
            kept.append(argument)
        skip = argument == "--address"
    return kept


class CommandOutput:
    """Picks the command's own lines out of a job's log, which comes in pieces of any length."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._begun = False
        self._rest = ""

    def feed(self, piece: str) -> None:
        """Shows the lines that are whole now."""
        *lines, self._rest = (self._rest + piece).split("\n")
        for line in lines:
            self._line(line)

    def close(self) -> None:
        """Shows a last line without a line break."""
        if self._rest:
            self._line(self._rest)

    def _line(self, line: str) -> None:
        if self._begun and not line.startswith(_BY_RAY):
            self._show(line)
        self._begun = self._begun or line == _BEGIN
