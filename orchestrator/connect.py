"""The one place that knows how to reach Ray: the cluster, a run's controller by name, and its answers.

Called by the driver and by the command line. Ray is imported at the first call, never at import. Every wait has a
deadline, and every refusal is one of the project's own exceptions.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from everstep import errors
from everstep.errors import ControllerUnreachable, EverstepError, InternalError, RunNotFound
from everstep.orchestrator import environment

NAMESPACE = "everstep"
"""Ray namespace of all named actors, so that driver and commands meet whatever namespace their jobs have."""
ANSWER_TIMEOUT_S = 10.0
"""A controller that is alive answers in milliseconds; one that Ray is restarting needs a few seconds."""
_REACH_TIMEOUT_S = 5.0
_POLL_S = 10.0


def controller_name(run: str) -> str:
    """The controller actor of a run."""
    return f"everstep:{run}:controller"


def replica_name(run: str, replica: int) -> str:
    """The actor of one replica of a run."""
    return f"everstep:{run}:replica-{replica}"


def keeper_name(run: str, node: str) -> str:
    """The actor that writes a node's parts of a run's checkpoints."""
    return f"everstep:{run}:keeper-{node}"


def connect(address: str | None = None, *, log_to_driver: bool = False) -> None:
    """Joins a running cluster; does nothing in a process that has joined one.

    `address`: `host:port` of the head's control store or `ray://host:port`. None: what Ray finds by itself, which is
    the cluster of the job that we are in, `RAY_ADDRESS`, or one started on this machine. Never starts a cluster.
    Raises ControllerUnreachable.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        found = address or _address_by_ray()
        _check_open(found)
        ray.init(
            address=found,
            namespace=NAMESPACE,
            log_to_driver=log_to_driver,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ControllerUnreachable(_no_cluster(address, error)) from error


def live_runs() -> list[str]:
    """Names of the runs that have a controller on this cluster, sorted."""
    import ray.util

    named = ray.util.list_named_actors(all_namespaces=True)
    start, end = controller_name("|").split("|")
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    return sorted(
        name[len(start) : -len(end)] for name in names if name.startswith(start) and name.endswith(end)
    )


def find_controller(run: str) -> Any:
    """The actor handle of a run's controller. Raises RunNotFound, which lists the runs that are live."""
    import ray

    try:
        return ray.get_actor(controller_name(run), namespace=NAMESPACE)
    except ValueError:
        live = live_runs()
        there = f"live are: {', '.join(live)}" if live else "no run is live"
        raise RunNotFound(f"no live run {run!r} on this cluster; {there}") from None


def ask(controller: Any, method: str, *args: object, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Calls a method of a controller and returns its answer.

    Raises the exception that the answer carries, ControllerUnreachable when none comes within `timeout_s`, and
    RunNotFound when the controller is gone, as it is after the end of its run.
    """
    answer = _get(getattr(controller, method).remote(*args), method, timeout_s)
    raise_if_error(answer)
    return answer


def event_lines(
    controller: Any, *, after: int = 0, follow: bool = False, patience_s: float = 60.0
) -> Iterator[list[str]]:
    """The run's events as JSON lines, one list per poll, oldest first; with `follow` until the run has ended.

    A poll that brings nothing yields an empty list; a following one takes 10 s for that. A controller that does not
    answer a follower is asked again for `patience_s`, as Ray may be restarting it. Raises what `ask` raises.
    """
    wait_s = _POLL_S if follow else 0.0
    heard, first = time.monotonic(), 0
    while True:
        try:
            answer = ask(controller, "events", after, wait_s, timeout_s=wait_s + ANSWER_TIMEOUT_S)
        except ControllerUnreachable:
            if not follow or time.monotonic() - heard > patience_s:
                raise
            continue
        heard, after, lines = time.monotonic(), answer["next"], list(answer["events"])
        yield lines
        # Without `follow` a run that commits fast must not keep us: less than a full batch is the present.
        if answer["ended"] or (not follow and len(lines) < max(first, 1)):
            return
        first = first or len(lines)


def error_answer(error: EverstepError) -> dict[str, Any]:
    """What a controller answers instead of raising through Ray, which would wrap the exception."""
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def raise_if_error(answer: object) -> None:
    """Raises the exception of an `error_answer`; an unknown type becomes a plain EverstepError."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    if isinstance(error, Mapping) and "message" in error:
        kind = getattr(errors, str(error.get("type")), EverstepError)
        known = isinstance(kind, type) and issubclass(kind, EverstepError)
        raise (kind if known else EverstepError)(error["message"])


def _get(reference: Any, method: str, timeout_s: float) -> Any:
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise ControllerUnreachable(
            f"the controller did not answer `{method}` within {timeout_s:g} s; it may be restarting: try again"
        ) from None
    except ActorUnavailableError as error:
        raise ControllerUnreachable(f"the controller cannot be reached just now: {error}") from error
    except RayTaskError as error:
        raise InternalError(f"the controller failed in `{method}`: {error}") from error
    except RayActorError as error:
        raise RunNotFound("the run has ended: its controller is gone") from error


def _address_by_ray() -> str:
    from ray._private.services import get_ray_address_from_environment

    return str(get_ray_address_from_environment("auto", None))


def _check_open(address: str) -> None:
    """Raises OSError when nobody listens there. Ray itself tries a dead address for two minutes."""
    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "ray"):
        raise ValueError("that is the job API; here the control store is needed, as host:port")
    host, _, port = place.rpartition(":")
    if host and port.isdigit():
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=_REACH_TIMEOUT_S)):
            return


def _no_cluster(address: str | None, error: Exception) -> str:
    found = ", ".join(f"{name}={value}" for name, value in environment.ray_addresses().items())
    tried = f"at {address}" if address else f"by {found}" if found else "on this machine"
    what = str(error).strip().partition("\n")[0]
    return f"no Ray cluster found {tried} ({what}); start one with `ray start --head`, or name one with --address"
