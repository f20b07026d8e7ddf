"""`everstep checkpoints`: what a run has in storage, whether it is whole, and how it leaves and enters.

Called by cli.py. Works on storage alone: no cluster and no live run is needed. torch is imported when
a command needs it.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.errors import ConfigError
from everstep.orchestrator import cli_options as options
from everstep.orchestrator import environment
from everstep.orchestrator.cli_show import table
from everstep.orchestrator.words import amount_bytes, count

if TYPE_CHECKING:
    from everstep.checkpoint.manifest import Manifest
    from everstep.checkpoint.store import Store

_COLUMNS = ("STEP", "WRITTEN", "GENERATION", "STATE")


@click.group()
def checkpoints() -> None:
    """List, check, export and import the checkpoints of a run."""


@checkpoints.command("ls")
@click.argument("run")
@options.storage
@options.as_json
def list_them(run: str, storage: str | None, as_json: bool) -> None:
    """Show the checkpoints of RUN, newest first."""
    from everstep.checkpoint.catalog import list_checkpoints

    found = list_checkpoints(_store(run, storage))
    if as_json:
        lines = [
            {"step": one.step, "modified_s": one.modified_s, "pinned": one.pinned, "damage": one.damage}
            for one in found
        ]
        click.echo(json.dumps(lines))
        return
    if not found:
        click.echo(f"run {run} has no checkpoint there")
        return
    rows = []
    for one in found:
        state = one.damage or ("pinned" if one.pinned else "committed")
        when = datetime.fromtimestamp(one.modified_s).strftime("%Y-%m-%d %H:%M:%S")
        rows.append(
            (str(one.step), when, str(one.commit.generation) if one.commit is not None else "-", state)
        )
    click.echo(table(_COLUMNS, rows))


@checkpoints.command()
@click.argument("run")
@options.step
@options.storage
@options.as_json
def inspect(run: str, step: int | None, storage: str | None, as_json: bool) -> None:
    """Show what is in one checkpoint of RUN: every tensor's name, dtype and shape."""
    _, manifest = _open(run, storage, step)
    facts = {
        "run": manifest.run, "step": manifest.step, "generation": manifest.generation,
        "replicas": manifest.world_size, "bytes": manifest.total_bytes, "objects": len(manifest.objects),
        "chunks": len(manifest.chunks),
    }  # fmt: skip
    if as_json:
        tensors = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
            for t in manifest.tensors
        ]
        click.echo(json.dumps({**facts, "tensors": tensors}))
        return
    click.echo("\n".join(f"{name:<11}{value}" for name, value in facts.items()))
    rows = [(t.name, t.dtype, str(list(t.shape)), amount_bytes(t.nbytes)) for t in manifest.tensors]
    click.echo(table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), rows))


@checkpoints.command()
@click.argument("run")
@options.step
@options.storage
@options.as_json
@click.pass_context
def verify(ctx: click.Context, run: str, step: int | None, storage: str | None, as_json: bool) -> None:
    """Read every byte of one checkpoint of RUN. Exit code 1 if it is not what was written."""
    from everstep.checkpoint.verify import verify as check

    store = _store(run, storage)
    step = step if step is not None else _newest(store, run)
    found = check(store, step)
    if as_json:
        click.echo(json.dumps({"step": step, "bytes": found.num_bytes, "problems": list(found.problems)}))
    elif found.whole:
        click.echo(f"checkpoint of step {step} is whole: {amount_bytes(found.num_bytes)} read and compared")
    else:
        click.echo(f"checkpoint of step {step} is damaged:\n" + "\n".join(found.problems), err=True)
    ctx.exit(0 if found.whole else 1)


@checkpoints.command("export")
@click.argument("run")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--to", "kind", type=click.Choice(["safetensors", "dcp"]), default="safetensors", show_default=True
)
@options.step
@options.storage
def export_to(run: str, folder: Path, kind: str, step: int | None, storage: str | None) -> None:
    """Write one checkpoint of RUN to FOLDER, for other programs."""
    from everstep.checkpoint.convert import export_safetensors
    from everstep.checkpoint.convert_dcp import export_dcp

    store, manifest = _open(run, storage, step)
    (export_safetensors if kind == "safetensors" else export_dcp)(store, manifest, folder)
    click.echo(f"step {manifest.step}, {amount_bytes(manifest.total_bytes)}, written to {folder}")


@checkpoints.command("import")
@click.argument("run")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step that RUN then begins with.")
@click.option("--name", help="The registered object that these tensors are the state of, such as model.")
@click.option("--trust-pickle", is_flag=True, help="For DCP, whose metadata is a pickle: run the code in it.")
@options.storage
def import_from(
    run: str, source: Path, step: int, name: str | None, trust_pickle: bool, storage: str | None
) -> None:
    """Make SOURCE (a safetensors file or folder, or a DCP folder) a checkpoint of RUN, which must have none."""
    from everstep.checkpoint.convert import import_safetensors
    from everstep.checkpoint.convert_dcp import import_dcp

    store = _store(run, storage)
    now = time.time()
    if source.is_dir() and (source / ".metadata").exists():
        import_dcp(source, store, step=step, run=run, trust_pickle=trust_pickle, name=name, created_s=now)
    else:
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        import_safetensors(files, store, step=step, run=run, name=name, created_s=now)
    click.echo(f"run {run} begins with step {step} now")


@checkpoints.command()
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="So many of the newest stay.")
@options.storage
def prune(run: str, keep_last: int, storage: str | None) -> None:
    """Delete older checkpoints of RUN, and what dead writers left more than an hour ago."""
    from everstep.checkpoint.commit import newest_incarnation
    from everstep.checkpoint.retention import Retention
    from everstep.checkpoint.retention import prune as delete

    store = _store(run, storage)
    # In the name of the newest controller, so that a live one is not fenced. What it writes now is too young to be deleted.
    done = delete(store, Retention(keep_last=keep_last), incarnation=max(newest_incarnation(store), 0))
    click.echo(
        f"{count(len(done.steps), 'checkpoint')} and {count(len(done.objects), 'object')} deleted, "
        f"{amount_bytes(done.num_bytes)}"
    )


def _store(run: str, storage: str | None) -> Store:
    from everstep.checkpoint.store import open_store

    root = environment.expand_home(storage or environment.default_storage())
    return open_store(f"{root.rstrip('/')}/{run}/checkpoints")


def _newest(store: Store, run: str) -> int:
    from everstep.checkpoint.catalog import committed_steps

    steps = committed_steps(store)
    if not steps:
        raise ConfigError(f"run {run!r} has no checkpoint in {store.url}")
    return steps[0]


def _open(run: str, storage: str | None, step: int | None) -> tuple[Store, Manifest]:
    from everstep.checkpoint.catalog import open_checkpoint

    store = _store(run, storage)
    return store, open_checkpoint(store, step if step is not None else _newest(store, run))
