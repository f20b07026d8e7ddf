"""The thinnest whole: a run on a real cluster, a real kill, the same bits."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.harness import Run, config
from tests.cluster.loops import Loop, samples_by_step


def test_a_run_without_faults_ends(name: str, folder: Path) -> None:
    with Run(Loop(folder=str(folder), steps=12), config(name, folder)) as run:
        result = run.finish()
    assert result.steps == 12
    assert len(samples_by_step(folder)) == 12 * 8


def test_a_killed_replica_costs_no_step_and_no_bit(name: str, folder: Path) -> None:
    quiet, hurt = folder / "quiet", folder / "hurt"
    quiet.mkdir()
    hurt.mkdir()
    with Run(Loop(folder=str(quiet), steps=40), config(f"{name}-a", quiet, max_replicas=2)) as run:
        undisturbed = run.finish()
    with Run(Loop(folder=str(hurt), steps=40, compute_s=0.02), config(f"{name}-b", hurt)) as run:
        run.wait_step(5)
        run.kill(run.replicas()[1])
        result = run.finish()
    assert result.digest == undisturbed.digest
    assert samples_by_step(hurt) == samples_by_step(quiet)
    assert any(r.blamed_replica is not None for r in result.recoveries)
