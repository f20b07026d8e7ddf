"""The replica: one Ray actor, one process, one device, the user's function in its main thread.

Created by the controller actor as a detached, named actor. `live` never returns while the run goes on: the controller
holds that call, and it fails when Ray sees the process die. `watch` is the same for a controller that came back: the
actor runs one method at a time, so the call queues behind `live` and fails just the same. All orders come over the
control connection (`actors.link`), never as actor calls.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from everstep.actors.address import address_in
from everstep.errors import EverstepError, UserError

# torch and what needs it are imported in the replica's own process: the controller imports this module too.
if TYPE_CHECKING:
    import torch

    from everstep.actors.session import Session
    from everstep.orchestrator.config import RunConfig

_log = logging.getLogger(__name__)
_LOCATE_TIMEOUT_S = 5.0
_EXIT_GRACE_S = 5.0
_NO_VERDICT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What the controller gives a replica on its way."""

    config: RunConfig
    replica: int
    token: str
    controller: str
    """Name of the controller actor."""
    namespace: str
    endpoint: tuple[str, int]
    """Where the controller listens at the moment; it is asked again when that fails."""


class Replica:
    """See the module. Made into an actor by the controller, with one method running at a time."""

    def __init__(self, spec: ReplicaSpec) -> None:
        from everstep.actors.identity import Identity
        from everstep.actors.lease import Lease
        from everstep.actors.member import Member
        from everstep.actors.transfer import StateServer

        self._spec = spec
        detection = spec.config.detection
        self._device = _device(spec.config)
        context = ray.get_runtime_context()
        ip = address_in(spec.config.network) or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._server = StateServer(ip, spec.token.encode())
        self._lease = Lease(detection.lease_s)
        self._first_endpoint: tuple[str, int] | None = spec.endpoint
        self._member = Member(
            Identity(
                run=spec.config.name,
                replica=spec.replica,
                token=spec.token,
                pid=os.getpid(),
                node=context.get_node_id(),
                host=socket.gethostname(),
                ip=ip,
                transfer=(ip, self._server.port),
            ),
            device=self._device,
            locate=self._locate,
            renew_lease=self._lease.renew,
            heartbeat_s=detection.heartbeat_s,
            form_timeout_s=detection.form_timeout_s,
            on_release=self._released,
        )
        self._lease.renew()
        self._member.start()

    def live(self, train: bytes) -> None:
        """Run the user's function (pickled) until the run is over for this replica."""
        from everstep.actors.member import ReleasedFromRun
        from everstep.actors.session import Session

        self._listen_for_sigterm()
        session = Session(
            config=self._spec.config, member=self._member, server=self._server, device=self._device
        )
        try:
            function: Callable[[Session], Any] = ray.cloudpickle.loads(train)
            value = function(session)
            session.check_trained()
            session.checkpoint_at_end()
            self._member.loop_done()
            self._member.finished(session.state_digest(), *_json_safe(value))
            self._wait_until_released()
        except ReleasedFromRun:
            pass
        except SystemExit as stop:
            self._report(RuntimeError(f"the train function called sys.exit({stop.code!r})"), fatal=False)
        except UserError as error:
            self._report(error, fatal=True)
        except EverstepError as error:
            self._report(error, fatal=False)
        except Exception as error:  # noqa: BLE001 - the supervisor of user code: all of it is reported, then we end
            session.explain(error)
            self._report(error, fatal=False)
        finally:
            session.close()
            self._leave()

    def watch(self) -> None:
        """Never starts while `live` runs."""

    def _wait_until_released(self) -> None:
        # The lease bounds this: without a controller the kernel ends the process.
        while not self._member.wait_release(_NO_VERDICT_S):
            _log.info("run %s: finished, waiting for the other replicas", self._spec.config.name)

    def _report(self, error: BaseException, *, fatal: bool) -> None:
        text = "".join(traceback.format_exception(error))
        self._member.user_failed(f"{type(error).__name__}: {error}", text, fatal=fatal)
        # The controller answers by releasing or killing us; give it the time to read first.
        self._member.wait_release(_EXIT_GRACE_S)

    def _released(self, reason: str) -> None:
        """In the control thread: whatever the training thread does, the process ends soon."""
        timer = threading.Timer(_EXIT_GRACE_S, os._exit, args=(0,))
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        """`live` returns, which tells the controller, and it ends the process. Should there be no controller any more,
        the lease does, which nobody renews from here on."""
        self._member.close()
        self._server.close()

    def _locate(self) -> tuple[str, int] | None:
        endpoint, self._first_endpoint = self._first_endpoint, None
        if endpoint is not None:
            return endpoint
        try:
            controller: Any = ray.get_actor(self._spec.controller, namespace=self._spec.namespace)
            host, port = ray.get(controller.endpoint.remote(), timeout=_LOCATE_TIMEOUT_S)
        except (ValueError, ray.exceptions.RayError):
            return None
        return (host, port)

    def _listen_for_sigterm(self) -> None:
        """SIGTERM asks to leave at the next boundary. Read from a pipe by a thread, because a handler in Python runs
        only when the main thread comes back to Python, and a collective may hold it for long."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "the train function does not run in the main thread: SIGTERM ends this replica at once"
            )
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(
            target=self._await_sigterm, args=(read,), name="everstep-sigterm", daemon=True
        ).start()

    def _await_sigterm(self, read: int) -> None:
        while data := os.read(read, 1):
            if data[0] == signal.SIGTERM:
                self._member.leave("SIGTERM")


def _device(config: RunConfig) -> torch.device:
    import torch

    wish = config.device
    if wish == "auto":
        wish = "cuda" if config.scaling.resources_per_replica.get("GPU") else "cpu"
    return torch.device("cuda", 0) if wish == "cuda" else torch.device("cpu")


def _json_safe(value: Any) -> tuple[Any, str]:
    """The value as it survives JSON, or None and the reason: a train function returns numbers, not models."""
    try:
        return json.loads(json.dumps(value)), ""
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"the value that the train function returned is dropped, as it is not JSON-safe: {error}"
