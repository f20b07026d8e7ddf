"""The `everstep` command. Imports neither ray nor torch until a command needs the cluster: help answers at once.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or config, 3 the run or its cluster was not found.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

import everstep
from everstep.errors import ConfigError, ControllerUnreachable, EverstepError, RunNotFound
from everstep.orchestrator import cli_options as options
from everstep.orchestrator import cli_relay, cli_submit, connect, environment
from everstep.orchestrator.cli_checkpoints import checkpoints
from everstep.orchestrator.words import count


class Failure(click.ClickException):
    """One of our exceptions as click shows it: its message on stderr, and an exit code."""


class WrongConfig(Failure):
    """The command line or a config cannot work."""

    exit_code = 2


class NotReached(Failure):
    """There is no such run, or its cluster or controller does not answer."""

    exit_code = 3


_FAILURES = ((RunNotFound, NotReached), (ControllerUnreachable, NotReached), (ConfigError, WrongConfig))


class Commands(click.Group):
    """Lists the commands in the order of a run's life, and knows how our exceptions end."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; keeps the arguments as they came, for a command that is relayed to the cluster."""
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click does, with our exceptions turned into click's."""
        try:
            return super().invoke(ctx)
        except EverstepError as error:
            failure = next((to for kind, to in _FAILURES if isinstance(error, kind)), Failure)
            raise failure(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(everstep.__version__, prog_name="everstep")
def cli() -> None:
    """Train through failure: submit a run to a Ray cluster, watch it, and change it while it goes.

    Each command takes --address: the job API as http://HOST:8265, or the control store as HOST:6379. Without it Ray's
    own rules hold: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, else a cluster on this machine.
    """


def main() -> None:
    """Entry point of `everstep` and `python -m everstep`."""
    cli()


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="RUN", help="Name of the run; the script's RunConfig then needs none.")
@options.address
@click.option(
    "--working-dir", metavar="DIR", help="Folder that is copied to the cluster; the script runs in it."
)
@click.option("--runtime-env", metavar="FILE", help="YAML file with Ray's runtime environment.")
@click.option("--runtime-env-json", metavar="JSON", help="The same as JSON text.")
@click.option("--submission-id", metavar="ID", help="Ray's id for the job; made up when left out.")
@click.option("--no-wait", is_flag=True, help="Return when the job is submitted, instead of showing its log.")
@options.as_json
@click.argument("entrypoint", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    name: str | None,
    address: str | None,
    working_dir: str | None,
    runtime_env: str | None,
    runtime_env_json: str | None,
    submission_id: str | None,
    no_wait: bool,
    as_json: bool,
    entrypoint: tuple[str, ...],
) -> None:
    """Submit a training script, and show its log until it ends.

    \b
    everstep submit --name gpt --working-dir . -- python train.py --layers 12

    When a run of that name is live, its events are shown and nothing is submitted. Ctrl-C leaves the run running.
    """
    wish = cli_submit.Submission(
        run=name,
        entrypoint=entrypoint,
        runtime_env=cli_submit.runtime_environment(name, working_dir, runtime_env, runtime_env_json),
        job=submission_id,
        wait=not no_wait,
        as_json=as_json,
    )
    sys.exit(cli_submit.submit(wish, address))


@cli.command()
@click.argument("run", required=False)
@options.address
@options.as_json
@options.storage
def status(run: str | None, address: str | None, as_json: bool, storage: str | None) -> None:
    """Show all live runs, or everything about RUN."""
    from everstep.orchestrator import cli_show, cli_watch

    if run is None:
        _at_cluster(address)
        statuses = cli_watch.all_statuses()
        click.echo(json.dumps(statuses) if as_json else cli_show.runs_table(statuses))
    else:
        found = cli_watch.status_of(run, storage, lambda: _at_cluster(address))
        click.echo(json.dumps(found) if as_json else cli_show.run_text(found))


@cli.command()
@click.argument("run")
@click.argument("replicas", metavar="N", type=click.IntRange(min=1))
@options.address
@options.as_json
def scale(run: str, replicas: int, address: str | None, as_json: bool) -> None:
    """Let RUN have N replicas from its next step on, as soon as the cluster has room."""
    _at_cluster(address)
    answer = connect.ask(connect.find_controller(run), "scale", replicas, environment.who_asks())
    _report(answer, as_json, f"run {run}: {count(replicas, 'replica')} wished" + _now(answer))


@cli.command()
@click.argument("run")
@click.argument("node")
@options.address
@options.as_json
def drain(run: str, node: str, address: str | None, as_json: bool) -> None:
    """Let RUN leave NODE at its next step. NODE is a node id of Ray, its first digits, or a host name."""
    _at_cluster(address)
    answer = connect.ask(connect.find_controller(run), "drain", node, environment.who_asks())
    _report(answer, as_json, f"run {run}: its replicas leave node {node} at the next step")


@cli.command()
@click.argument("run")
@click.option("--now", is_flag=True, help="Do not finish the step that is being computed.")
@options.address
@options.as_json
def stop(run: str, now: bool, address: str | None, as_json: bool) -> None:
    """End RUN after its current step."""
    _at_cluster(address)
    answer = connect.ask(connect.find_controller(run), "stop", environment.who_asks(), now)
    _report(answer, as_json, f"run {run}: stops {'now' if now else 'after its current step'}")


@cli.command()
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until the run has ended.")
@click.option("--steps", is_flag=True, help="Show every committed step too; JSON always has them.")
@options.address
@options.as_json
@options.storage
def events(
    run: str, follow: bool, steps: bool, address: str | None, as_json: bool, storage: str | None
) -> None:
    """Show what happened to RUN, also after it has ended."""
    from everstep.orchestrator import cli_watch

    for text in cli_watch.event_texts(
        run, storage, lambda: _at_cluster(address), follow=follow, steps=steps, as_json=as_json
    ):
        click.echo(text)


cli.add_command(checkpoints)


def _at_cluster(address: str | None) -> None:
    """Joins the cluster; where only its job API can be reached, runs the whole command there and exits."""
    if address:
        environment.forget_ray_addresses()
    place = environment.cluster_address(address)
    if environment.is_job_api(place):
        sys.exit(cli_relay.run_there(place, click.get_current_context().find_root().obj))
    connect.connect(address)


def _now(answer: Any) -> str:
    size = answer.get("world_size") if isinstance(answer, dict) else None
    return f", {size} now" if size is not None else ""


def _report(answer: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(answer) if as_json else text)
