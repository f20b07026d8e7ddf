"""The one file that reads the process environment. Called by config (defaults) and the command line.

Values are read at the moment of the call, never at import and never kept. Imports neither ray nor torch.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from pathlib import Path

RUN_NAME = "EVERSTEP_RUN_NAME"
"""Set by `everstep submit --name` for the job, so that script and command line mean one run."""
STORAGE = "EVERSTEP_STORAGE"
"""Where runs keep their event log when their config does not say."""


def submitted_run_name() -> str | None:
    """The name given to `everstep submit --name`, or None outside such a job."""
    return os.environ.get(RUN_NAME) or None


def default_storage() -> str:
    """`EVERSTEP_STORAGE`, else the folder `everstep` in the home directory."""
    return os.environ.get(STORAGE) or "~/everstep"


def expand_home(path: str) -> str:
    """`path` with a leading `~` replaced by the home directory of this process; URLs pass unchanged."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def ray_addresses() -> Mapping[str, str]:
    """The variables by which Ray itself finds a cluster when no address is given, as far as they are set."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def who_asks() -> str:
    """`user@host`, written into the events that a command causes."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without an entry in the user database
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def forget_ray_addresses() -> None:
    """Takes those variables out of this process: Ray lets them win over an address that was given."""
    for name in ray_addresses():
        del os.environ[name]


def cluster_address(given: str | None) -> str:
    """The address that holds: the given one, else what Ray reads from the environment, else empty."""
    return given or next(iter(ray_addresses().values()), "")


def is_job_api(address: str) -> bool:
    """Whether an address is that of Ray's job API, and not of its control store."""
    return address.startswith(("http://", "https://"))
