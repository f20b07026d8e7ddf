"""A keeper as a process of its own, without Ray: `python -m benchmarks._lone_keeper URL`. Started by benchmarks.checkpoint.

Prints `ready`, then one JSON line per part that it has written. Ends when its standard input is closed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from everstep.actors.keeper import Keeper, KeeperSpec

NODE, TOKEN = "bench-node", "bench-token"


class LoneKeeper(Keeper):
    """Tells its standard output what it would tell the controller."""

    def _tell(self, report: dict[str, Any]) -> None:
        # Short: not every line is read at once, and a full pipe would stop the keeper.
        print(json.dumps({key: report[key] for key in ("step", "seconds")}), flush=True)

    def _live_with_the_controller(self) -> None:
        pass


def main() -> None:
    LoneKeeper(
        KeeperSpec(
            run="bench", name="", token=TOKEN, node=NODE, url=sys.argv[1], storage_options={}, bytes_per_s=None, controller="",
            namespace="", lease_s=60.0,
        )
    )  # fmt: skip
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
