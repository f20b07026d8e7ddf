"""What a killed worker costs: Everstep beside plain DDP, torchrun elastic and Ray Train elastic, in one go.

    python -m benchmarks.recovery [--json] [--only everstep,ddp,torchrun,ray_train] [--kills N]

All train the same 10-million-parameter MLP (AdamW, synthetic regression, global batch 128) with four workers on CPU over
gloo, one thread each. Measured for each: the median step; seconds from SIGKILL of one worker to the next step that is
new, that is beyond all steps reached before; steps done again.

  everstep   on a local Ray cluster (a head and four one-CPU nodes), `ordered` reduction, four logical shards. Killed five
             times at 10, 30, 50, 70 and 90 % of a step, another rank each time; each phase of the recovery is shown. The
             next step is the first that the survivors commit in a generation without the dead one. Then scaled to three
             and back to four: how long the three stand still while the fourth joins, which is the time between the
             commits around a join, less a usual step of three.
  ddp        plain DDP, checkpoint every ten steps; at a death a launcher kills all, restarts all, reloads. Twice.
  torchrun   four elastic agents, as on four nodes: `torch.distributed.run --nnodes=1:4 --nproc-per-node=1
             --max-restarts=100`, same checkpoints. Twice.
  ray_train  TorchTrainer with num_workers=(1, 4), max_failures=-1, same checkpoints, on the same Ray cluster. Once.

The peers are killed halfway between two checkpoints. With --json the last line is one JSON object; seconds and bytes.
Exit code 1 when Everstep could not be measured. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _common as common
from benchmarks._everstep import EverstepRun, RunFailed, faults_in_order
from benchmarks._processes import Household, ray_cluster
from benchmarks.peers import measure as peers
from benchmarks.peers.measure import PeerResult
from everstep.errors import EverstepError

CONTENDERS = ("everstep", "ddp", "torchrun", "ray_train")
_QUIET_STEPS = 30
_PEER_KILLS = 2
_PHASES = ("detect", "notice", "decide", "connect", "transfer", "redo")


def measure_everstep(house: Household, address: str, kills: int) -> dict[str, Any]:
    """Raises RunFailed."""
    with EverstepRun(house, address, "recovery") as run:
        run.wait_steps(3, common.WORLD, timeout_s=90.0)
        step_s = _median_gap(run.wait_steps(_QUIET_STEPS, common.WORLD))
        hits = []
        for number in range(kills):
            hits.append(run.kill(number % common.WORLD, (number + 0.5) / kills, step_s))
            run.wait_steps(5, common.WORLD)  # the replacement has joined
        run.scale(common.WORLD - 1)
        three_s = _median_gap(run.wait_steps(15, common.WORLD - 1))
        run.scale(common.WORLD)
        since = len(run.events)
        run.wait_steps(3, common.WORLD)
        scaled = run.join_gaps(run.commits(since))
        commits = run.commits()
        joins = [
            r for r in run.recoveries() if r.world_size_after > r.world_size_before and r.bytes_transferred
        ]
    phases = [{name: hit.phases.get(name, 0.0) for name in _PHASES} for hit in hits]
    return {
        "median_step_s": step_s,
        "median_step_3_s": three_s,
        "kill_to_commit_s": statistics.median(h.kill_to_commit_s for h in hits),
        "kill_to_commit_all_s": [h.kill_to_commit_s for h in hits],
        "kill_at_share_of_step": [h.progress for h in hits],
        "causes": [h.recovery.cause for h in hits],
        "steps_committed_between": [h.steps_between for h in hits],
        "shards_recomputed": [h.recovery.shards_recomputed for h in hits],
        "phases": {name: statistics.median(p[name] for p in phases) for name in _PHASES},
        "phases_all": phases,
        "steps_lost": sum(h.recovery.steps_lost for h in hits) + faults_in_order(commits),
        "steps_committed": len(commits),
        "join_stall_scaled_s": statistics.median(scaled) - three_s,
        "join_stalls_s": [gap - three_s for gap in run.join_gaps(commits)],
        "join_stalls_over_four_s": [gap - step_s for gap in run.join_gaps(commits)],
        "join_bytes": [r.bytes_transferred for r in joins],
        "join_phases": [dict(r.phases) for r in joins],
    }


def _median_gap(commits: list[Any]) -> float:
    times: list[float] = [c.time for c in commits]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def measure(
    wanted: Sequence[str], kills: int
) -> tuple[dict[str, Any], dict[str, PeerResult], dict[str, str]]:
    """(Everstep's numbers, the peers' by name, what went wrong by name)."""
    own: dict[str, Any] = {}
    others: dict[str, PeerResult] = {}
    problems: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder,
        Household(Path(folder)) as house,
        contextlib.ExitStack() as later,
    ):
        own["state_bytes"] = common.state_bytes()
        # Those that need no Ray first, so that no cluster runs beside them.
        if "ddp" in wanted:
            with _telling("ddp"):
                others["ddp"] = peers.ddp_by_hand(house, _PEER_KILLS)
        if "torchrun" in wanted:
            with _telling("torchrun"):
                others["torchrun"] = peers.torchrun(house, _PEER_KILLS)
        address = ""
        if {"everstep", "ray_train"} & set(wanted):
            with _telling("start of a Ray cluster of five nodes"):
                address = later.enter_context(ray_cluster(nodes=common.WORLD))
        # Around Everstep's part, whose joins are judged by it.
        loopback = common.loopback_rates()
        if "everstep" in wanted:
            with _telling("everstep"):
                try:
                    own |= measure_everstep(house, address, kills)
                except (RunFailed, EverstepError) as error:
                    problems["everstep"] = f"{type(error).__name__}: {error}"
            loopback += common.loopback_rates()
        own["loopback_bytes_per_s"] = statistics.median(loopback)
        if "ray_train" in wanted:
            with _telling("ray_train"):
                others["ray_train"] = peers.ray_train(house, 1, address)
    problems |= {name: result.problem for name, result in others.items() if result.problem}
    return own, others, problems


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Says what was done, and how long it took."""
    begin = time.monotonic()
    yield
    common.say(f"  … {what}: {time.monotonic() - begin:.0f} s")


def report(
    own: Mapping[str, Any], others: Mapping[str, PeerResult], problems: Mapping[str, str]
) -> dict[str, Any]:
    """Prints the tables; returns the JSON object."""
    peers = {name: result.new_step_s for name, result in others.items()}
    kill_s = own.get("kill_to_commit_s")
    ratios = {name: value / kill_s for name, value in peers.items() if value and kill_s}
    rows = [
        ["", "median step", "SIGKILL to new step", "to any step", "steps lost", "kills", "times Everstep"]
    ]
    if kill_s is not None:
        kills = len(own["kill_to_commit_all_s"])
        rows.append(
            ["everstep", common.seconds(own["median_step_s"]), common.seconds(kill_s), common.seconds(kill_s),
             str(own["steps_lost"]), str(kills), "1.0"]
        )  # fmt: skip
    for name, result in others.items():
        if result.problem:
            continue
        restarts = result.restarts
        rows.append(
            [name, common.seconds(result.median_step_s), common.seconds(result.new_step_s),
             common.seconds(common.median([r.first_step_s for r in restarts])),
             ", ".join(str(r.steps_lost) for r in restarts), str(len(restarts)),
             f"{ratios[name]:.1f}" if name in ratios else "–"]
        )  # fmt: skip
    common.say("\nA killed worker (seconds; medians over the kills)")
    common.say(common.table(rows))
    for name, problem in problems.items():
        common.say(f"  {name}: {problem}")
    if kill_s is not None:
        _report_everstep(own, ratios)
    keys = ("kill_to_commit_s", "median_step_s", "steps_lost")
    return {
        **{key: own.get(key) for key in keys}, "peers": peers,
        "join_stall_s": common.median(own.get("join_stalls_s", [])), "state_bytes": own["state_bytes"],
        "loopback_bytes_per_s": own["loopback_bytes_per_s"], "ratios": ratios,
        "everstep": {k: v for k, v in own.items() if k not in keys},
        "peer_details": {
            name: {
                "median_step_s": result.median_step_s,
                "first_step_s": [r.first_step_s for r in result.restarts],
                "new_step_s": [r.new_step_s for r in result.restarts],
                "steps_lost": [r.steps_lost for r in result.restarts],
            }
            for name, result in others.items()
        },
        "problems": dict(problems),
    }  # fmt: skip


def _report_everstep(own: Mapping[str, Any], ratios: Mapping[str, float]) -> None:
    common.say(
        "\nEverstep, each kill (milliseconds; detect: from SIGKILL to the first sign at the controller;"
    )
    common.say("notice: until all survivors have reported; redo: the lost shard, reduction and commit)")
    rows = [["killed at", *_PHASES, "sum", "shards computed again", "cause"]]
    columns = ("kill_at_share_of_step", "phases_all", "kill_to_commit_all_s", "shards_recomputed", "causes")
    for at, phases, total, shards, cause in zip(*(own[name] for name in columns), strict=True):
        times = [*(_ms(phases[n]) for n in _PHASES), _ms(total)]
        rows.append([f"{at:.0%} of a step", *times, str(shards), cause[:60]])
    rows.append(["median", *(_ms(own["phases"][n]) for n in _PHASES), _ms(own["kill_to_commit_s"]), ""])
    common.say(common.table(rows))
    bandwidth, size = own["loopback_bytes_per_s"], own["state_bytes"]
    common.say("\nA fourth replica joins three")
    stalls = own["join_stalls_s"]
    listed = ", ".join(_ms(s) for s in stalls)
    common.say(
        f"  the three stand still: {_ms(common.median(stalls))} ms (median of {len(stalls)}: {listed})"
    )
    common.say(
        f"  after `scale 4`: {_ms(own['join_stall_scaled_s'])} ms; against a step of four ({_ms(own['median_step_s'])} ms) "
        f"instead of three ({_ms(own['median_step_3_s'])} ms): {_ms(common.median(own['join_stalls_over_four_s']))} ms"
    )
    common.say(
        f"  state {size / 1e6:.1f} MB; loopback TCP {bandwidth / 1e9:.2f} GB/s, so one copy takes {_ms(size / bandwidth)} ms"
    )
    common.say(
        f"  bytes each joiner received: {', '.join(f'{b / 1e6:.1f} MB' for b in own['join_bytes']) or '–'}"
    )
    common.say("\nGoals")
    _goal("next commit within a median step + 0.1 s", own["kill_to_commit_s"], own["median_step_s"] + 0.1)
    stall = common.median(stalls)
    if stall is not None:
        _goal("join stall within 1.5 × state / loopback + 0.1 s", stall, 1.5 * size / bandwidth + 0.1)
    if ratios:
        _goal(
            "next commit within 1/5 of the best peer",
            own["kill_to_commit_s"],
            min(ratios.values()) * own["kill_to_commit_s"] / 5,
        )
    _goal("steps lost", own["steps_lost"], 0, unit="")


def _goal(what: str, value: float, limit: float, unit: str = " s") -> None:
    verdict = "held" if value <= limit else "NOT HELD"
    common.say(f"  {what}: {value:.3g}{unit}, limit {limit:.3g}{unit}: {verdict}")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="some of the contenders, separated by commas"
    )
    parser.add_argument(
        "--kills", type=int, default=5, help="SIGKILLs of Everstep's replicas (default: %(default)s)"
    )
    options = parser.parse_args()
    wanted = [name.strip() for name in options.only.split(",")]
    if unknown := set(wanted) - set(CONTENDERS):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; there are {', '.join(CONTENDERS)}")
    if options.kills < 1:
        parser.error(f"--kills: {options.kills} must be at least 1")
    common.prepare_environment()
    setting = common.setting()
    common.say(setting)
    own, others, problems = measure(wanted, options.kills)
    result = {**report(own, others, problems), "setting": setting}
    if options.json:
        print(json.dumps(common.rounded(result)), flush=True)
    return 1 if "everstep" in problems else 0


if __name__ == "__main__":
    sys.exit(main())
