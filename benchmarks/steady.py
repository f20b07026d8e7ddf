"""What Everstep costs while nothing fails: its step beside that of plain DDP, both reductions.

    python -m benchmarks.steady [--json] [--seconds N]

Three contenders with four workers each live side by side: plain DDP (AdamW, default buckets, zero_grad(set_to_none=True)),
Everstep with `fast` and Everstep with `ordered` reduction, the latter two as whole runs on a local Ray cluster. All train
the same 10-million-parameter MLP on CPU over gloo, one thread per worker, 32 samples per worker and step, data read by the
training process itself.

They take turns in blocks of some steps, the others waiting meanwhile at a socket, in another order each round: a machine
that becomes slower or faster does so for all of them. A step is measured from the top of the loop to the top of the loop
(data, forward, backward, reduction, optimizer, and for Everstep the commit). The first steps of a block are left out.

fast_over_ddp and ordered_over_ddp are ratios of the medians over all steps. The spread is that of the ratios of single
rounds. With --json the last line is one JSON object; times in seconds. Takes under three minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _common as common
from benchmarks._everstep import EverstepRun
from benchmarks._processes import Household, free_port, ray_cluster
from benchmarks._turns import Referee

CONTENDERS = ("ddp", "fast", "ordered")
LIMITS = {"fast": 1.02, "ordered": 1.05}
BLOCK = 12
_LEFT_OUT = 2
_LEAST_ROUNDS = 3
_START_TIMEOUT_S = 240.0

Rounds = list[dict[str, list[float]]]
"""Per round and contender: seconds of each measured step."""


def measure(seconds: float) -> Rounds:
    """Rounds for about that long, after one that is not counted."""
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder,
        Household(Path(folder)) as house,
        ray_cluster(nodes=common.WORLD, cpus_per_node=2) as address,
        Referee() as referee,
        EverstepRun(house, address, "fast", reduction="fast", turns=referee.address, block=BLOCK),
        EverstepRun(house, address, "ordered", reduction="ordered", turns=referee.address, block=BLOCK),
    ):
        _start_ddp(house, referee.address)
        try:
            referee.gather(len(CONTENDERS) * common.WORLD, _START_TIMEOUT_S)
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{house.last_words(15)}") from None
        return _rounds(referee, seconds)


def _start_ddp(house: Household, referee: tuple[str, int]) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(common.WORLD)}
    arguments = [
        "--folder",
        str(house.folder),
        "--turns",
        f"{referee[0]}:{referee[1]}",
        "--block",
        str(BLOCK),
    ]
    for rank in range(common.WORLD):
        house.module("benchmarks.peers.ddp", *arguments, env={**place, "RANK": str(rank)})


def _rounds(referee: Referee, seconds: float) -> Rounds:
    rounds: Rounds = []
    begin = time.monotonic()
    while len(rounds) <= _LEAST_ROUNDS or time.monotonic() - begin < seconds:
        first = len(rounds) % len(CONTENDERS)
        order = CONTENDERS[first:] + CONTENDERS[:first]
        rounds.append({name: referee.block(name)[_LEFT_OUT:] for name in order})
        if len(rounds) == 1:  # warms up
            begin = time.monotonic()
    return rounds[1:]


def evaluate(rounds: Rounds) -> dict[str, Any]:
    """The JSON object."""
    steps = {name: [s for r in rounds for s in r[name]] for name in CONTENDERS}
    medians = {name: statistics.median(times) for name, times in steps.items()}
    result: dict[str, Any] = {
        f"{name}_over_ddp": medians[name] / medians["ddp"] for name in ("fast", "ordered")
    }
    for name in ("fast", "ordered"):
        ratios = [statistics.median(r[name]) / statistics.median(r["ddp"]) for r in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[f"{name}_by_round"] = {"lower_quartile": low, "median": middle, "upper_quartile": high}
    return {
        **result,
        "median_step_s": medians,
        "step_quartiles_s": {name: list(statistics.quantiles(times, n=4)) for name, times in steps.items()},
        "rounds": len(rounds),
        "steps_each": len(steps["ddp"]),
    }


def report(result: Mapping[str, Any]) -> None:
    rows = [["", "median step", "quartiles", "over DDP", "by round: median", "quartiles", "limit", ""]]
    for name in CONTENDERS:
        low, _, high = result["step_quartiles_s"][name]
        row = [name, f"{result['median_step_s'][name]:.4f} s", f"{low:.4f}–{high:.4f}"]
        if name in LIMITS:
            ratio, by_round = result[f"{name}_over_ddp"], result[f"{name}_by_round"]
            row += [f"{ratio:.3f}", f"{by_round['median']:.3f}", _range(by_round), f"{LIMITS[name]:.2f}"]
            row += ["held" if ratio <= LIMITS[name] else "NOT HELD"]
        rows.append(row)
    common.say(common.table(rows))
    common.say(f"  {result['rounds']} rounds, {result['steps_each']} steps of each")


def _range(quartiles: Mapping[str, float]) -> str:
    return f"{quartiles['lower_quartile']:.3f}–{quartiles['upper_quartile']:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seconds", type=float, default=100.0, help="of measuring (default: %(default)g)")
    options = parser.parse_args(arguments)
    common.prepare_environment()
    setting = common.setting()
    common.say(setting)
    result = {**evaluate(measure(options.seconds)), "setting": setting}
    report(result)
    if options.json:
        print(json.dumps(common.rounded(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
