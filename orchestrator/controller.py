"""The controller actor: the hands of the core.

One per run; named, detached, restarted by Ray without limit. It turns what happens (connections, messages, Ray's word
about actors and nodes, users' commands, time) into events for `orchestrator.core`, and performs the commands that come
back. It decides nothing and holds no tensors. What it must remember over its own death is in its constructor's
arguments (Ray gives them again) and in the memo that every replica carries for it.

All of it runs in one asyncio loop in a thread of its own, so that a restarted controller is at work before anybody
calls it. Ray's methods hand over to that loop. Blocking calls (Ray, storage) run in a small thread pool.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import hmac
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from everstep.actors import wire
from everstep.errors import ConfigError, ControllerUnreachable, EverstepError
from everstep.orchestrator import connect
from everstep.orchestrator import events as ev
from everstep.orchestrator.cluster import (
    ClusterView,
    NodeChange,
    cause_of_death,
    create_replica,
)
from everstep.orchestrator.connect import error_answer
from everstep.orchestrator.core import Core, Phase
from everstep.orchestrator.core import model as m
from everstep.orchestrator.keeping import Keeping
from everstep.orchestrator.lines import Lines
from everstep.orchestrator.recorder import Recorder
from everstep.orchestrator.settings import GC_THRESHOLDS, settings_of
from everstep.orchestrator.status import status_of
from everstep.policies.budget import FailureClass

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig

_log = logging.getLogger(__name__)
_NODES_EVERY_S = 1.0
DRIVER_SILENCE_S = 5.0
"""A driver asks for events every two seconds; after this long without it, another one may take its place."""
_SETTLE_S = 8.0
"""How long a command waits for a controller that came back to know who is there; less than callers wait for an answer."""
_FIRST_TRY_S = 5.0
"""How long storage that fails may delay what a driver hears of the end."""
_LAST_WORDS_S = 30.0
"""And the end of the run's controller."""
_LINGER_S = 30.0
"""How long an ended run's controller waits for somebody to read the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSpec:
    """What a controller is made of. Given again by Ray when it restarts it."""

    config: RunConfig
    token: str
    """Secret of the run: who does not know it is not talked to."""


class Controller:
    """See the module. Methods without underscore are what Ray exposes."""

    def __init__(self, spec: ControllerSpec, train: bytes) -> None:
        """`train`: the user's function, pickled; only replicas open it, so that the controller stays light."""
        with warnings.catch_warnings():  # Ray's own use of a deprecated name
            warnings.simplefilter("ignore")
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._spec = spec
        self._train = train
        self._config = spec.config
        self._started_wall, self._started_mono = time.time(), time.monotonic()
        self._incarnation = time.time_ns() // 1_000_000
        self._core = Core(settings_of(spec.config))
        self._lines = Lines(self._on_line, self._on_line_lost)
        self._actors: dict[int, Any] = {}
        self._recorder = Recorder(spec.config, self._incarnation, restarted=restarted)
        self._keeping = Keeping(spec.config, spec.token, self._feed)
        self._driver_seen = time.monotonic()
        self._ready = threading.Event()
        self._ended_at: float | None = None
        self._collected = False
        self._cluster = ClusterView()
        self._store: Any = None
        self._nodes: set[str] = set()
        """On which replicas have been."""
        self._settled = asyncio.Event()
        """It is known who is there."""
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=8, thread_name_prefix="everstep-ray")
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._launches: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(
            target=self._run, args=(restarted,), name="everstep-controller", daemon=True
        )
        self._thread.start()

    # ---- what Ray exposes

    async def endpoint(self) -> tuple[str, int]:
        """Where replicas connect."""
        await asyncio.to_thread(self._ready.wait, 30.0)
        return self._lines.address

    async def status(self) -> dict[str, Any]:
        """A picture of the run; see `orchestrator.status`."""
        return await self._inside(self._status)

    async def scale(self, n: int, by: str) -> dict[str, Any]:
        """Wish for `n` replicas."""
        return await self._inside(lambda: self._scale(n, by), settled=True)

    async def drain(self, node: str, by: str) -> dict[str, Any]:
        """Let a node's replicas leave at the next step boundary. `node`: id, prefix of it, host name or address."""
        return await self._inside(lambda: self._drain(node, by), settled=True)

    async def stop(self, by: str, now: bool = False) -> dict[str, Any]:
        """End the run."""
        return await self._inside(lambda: self._stop(by, now), settled=not now)

    async def events(self, after: int, wait_s: float, driver: bool = False) -> dict[str, Any]:
        """Events from number `after` on, as JSON lines; waits up to `wait_s` for the first of them."""
        if driver:
            self._driver_seen = time.monotonic()
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._recorder.after(after, min(wait_s, 30.0)), self._loop)
        )

    async def driver_alive(self) -> bool:
        """True if a driver has asked for events lately."""
        return time.monotonic() - self._driver_seen < DRIVER_SILENCE_S

    async def part(self, report: dict[str, Any]) -> None:
        """A keeper has written a replica's part of a checkpoint."""
        await self._inside(lambda: self._part(report))

    async def result(self) -> dict[str, Any] | None:
        """Outcome and numbers of an ended run; None while it goes on. Reading it lets the controller go."""
        answer = await self._inside(self._result)
        return answer or None

    # ---- the loop

    def _run(self, restarted: bool) -> None:
        asyncio.set_event_loop(self._loop)
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            self._loop.run_until_complete(self._main(restarted))
        except BaseException:  # the supervisor: a controller without its loop is deaf  # noqa: BLE001
            _log.exception("run %s: the controller failed; Ray restarts it", self._config.name)
            os._exit(1)

    async def _main(self, restarted: bool) -> None:
        host = await self._loop.run_in_executor(self._pool, _own_address, self._config.network)
        await self._lines.start(host)
        await self._begin(restarted)
        # torch is needed for the rendezvous store alone; it is imported while the replicas import theirs.
        self._store, self._core.store = await self._loop.run_in_executor(self._pool, _start_store, host)
        self._ready.set()
        if self._config.checkpoint.wanted:
            self._spawn(self._keeping.open(self._incarnation, first=not restarted))
        self._spawn(self._watch_nodes())
        self._spawn(self._recorder.flush_forever())
        await self._tick_forever()

    async def _begin(self, restarted: bool) -> None:
        prefix = connect.replica_name(self._config.name, 0)[:-1]
        found = await self._loop.run_in_executor(self._pool, _named_replicas, prefix)
        wanted = self._config.checkpoint.wanted
        if not restarted and not found:
            self._feed(m.Start(incarnation=self._incarnation, search=wanted))
            self._record(ev.RunStarted(incarnation=self._incarnation, config=self._config.to_public_dict()))
            return
        for replica in found:
            self._actors[replica] = await self._loop.run_in_executor(
                self._pool,
                functools.partial(ray.get_actor, f"{prefix}{replica}", namespace=connect.NAMESPACE),
            )
        self._feed(m.Adopt(incarnation=self._incarnation, replicas=tuple(found), search=wanted))
        for replica, actor in self._actors.items():
            self._watch(replica, actor.watch.remote())

    async def _tick_forever(self) -> None:
        while self._core.phase is not Phase.ENDED:
            self._feed(m.Tick())
            delay = max(self._core.next_deadline_s() - self._now(), 0.005)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), delay)
            self._wake.clear()
            self._check_driver()
        await self._end()

    async def _end(self) -> None:
        if self._launches:  # what is being created now would outlive us
            await asyncio.wait(self._launches, timeout=_LAST_WORDS_S)
        for replica in list(self._actors):
            await self._kill(replica, "the run is over")
        if self._config.checkpoint.wanted:
            await self._keeping.close()
        self._lines.close()
        written = await self._recorder.flush_until(_FIRST_TRY_S)
        self._ended_at = time.monotonic()  # from now on readers are told so
        self._recorder.close()
        if not written:
            await self._recorder.flush_until(_LAST_WORDS_S)
        linger_s = 0.0 if self._driver_gone() else _LINGER_S
        while not self._collected and time.monotonic() - self._ended_at < linger_s:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 1.0)
        await asyncio.sleep(0.2)  # the answer that was collected leaves first
        os._exit(0) if not await self._exit_for_good() else None

    async def _exit_for_good(self) -> bool:
        """End this actor so that Ray does not restart it."""
        own = await self._loop.run_in_executor(
            self._pool,
            lambda: ray.get_actor(connect.controller_name(self._config.name), namespace=connect.NAMESPACE),
        )
        await self._loop.run_in_executor(self._pool, ray.kill, own)
        await asyncio.sleep(10.0)
        return False

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_over)
        return task

    def _task_over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._launches.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("run %s: a background task failed", self._config.name, exc_info=error)

    def _now(self) -> float:
        """Wall time at the start plus time elapsed: comparable over restarts, deaf to clock jumps."""
        return self._started_wall + time.monotonic() - self._started_mono

    # ---- events in, commands out

    def _feed(self, event: m.CoreEvent) -> None:
        before = self._core.phase
        for command in self._core.handle(event, self._now()):
            self._perform(command)
        if self._core.phase is not before:
            self._wake.set()
        if self._core.started and self._core.phase is not Phase.ADOPTING:
            self._settled.set()

    def _perform(self, command: m.Command) -> None:
        if isinstance(command, m.Send):
            self._lines.send(command.replicas, command.message)
        elif isinstance(command, m.Launch):
            self._launches.add(self._spawn(self._launch(command)))
        elif isinstance(command, m.Kill):
            self._spawn(self._kill(command.replica, command.reason))
        elif isinstance(command, m.Emit):
            self._record(command.event)
        elif isinstance(command, m.CommitCheckpoint):
            self._spawn(self._keeping.commit(command))
        else:
            self._spawn(self._keeping.find(command))

    def _record(self, event: ev.Event) -> None:
        self._recorder.add(event.stamped(self._now(), self._config.name))
        if isinstance(event, ev.StepCommitted) and self._config.checkpoint.wanted:
            self._keeping.have_keepers(self._nodes)

    async def _launch(self, command: m.Launch) -> None:
        try:
            actor, alive = await self._loop.run_in_executor(
                self._pool,
                lambda: create_replica(
                    self._config,
                    command.replica,
                    self._spec.token,
                    self._lines.address,
                    self._train,
                    command.avoid_nodes,
                ),
            )
        except (ValueError, RuntimeError, ray.exceptions.RayError) as error:
            self._feed(
                m.ReplicaDied(
                    replica=command.replica,
                    cause=f"could not be created: {error}",
                    failure=FailureClass.UNKNOWN,
                )
            )
            return
        self._actors[command.replica] = actor
        self._watch(command.replica, alive)
        if command.replica not in self._core.replicas or self._core.phase is Phase.ENDED:
            await self._kill(command.replica, "not needed any more")  # it was let go while it was created

    def _watch(self, replica: int, reference: Any) -> None:
        """Learn of its death from the call that never returns."""

        def over(future: concurrent.futures.Future[Any]) -> None:
            error = future.exception()
            with contextlib.suppress(RuntimeError):  # our loop is closed: nothing to learn any more
                self._loop.call_soon_threadsafe(self._actor_over, replica, error)

        reference.future().add_done_callback(over)

    def _actor_over(self, replica: int, error: BaseException | None) -> None:
        if error is None:  # the call returned: the replica has nothing to do any more, but its process lives
            self._spawn(self._kill(replica, "it has left the run"))
        else:
            self._actors.pop(replica, None)
        if self._core.phase is Phase.ENDED:
            return
        cause, failure = cause_of_death(error)
        self._feed(m.ReplicaDied(replica=replica, cause=cause, failure=failure))

    async def _kill(self, replica: int, reason: str) -> None:
        actor = self._actors.get(replica)
        if actor is None:
            return
        _log.info("run %s: ending replica %s: %s", self._config.name, replica, reason)
        with contextlib.suppress(ray.exceptions.RayError):
            await self._loop.run_in_executor(self._pool, lambda: ray.kill(actor, no_restart=True))

    # ---- replicas' connections

    def _on_line(self, replica: int | None, message: wire.Message) -> int | None:
        """A message came. Returns the replica's id for a good first message, None to hang up."""
        if replica is None:
            return self._admit(message)
        if isinstance(message, wire.Stacks):
            _log.warning("run %s: stacks of replica %s:\n%s", self._config.name, replica, message.text)
        if getattr(message, "replica", replica) != replica:
            return None
        self._feed(message)
        return replica

    def _admit(self, message: wire.Message) -> int | None:
        if not isinstance(message, wire.Hello) or message.run != self._config.name:
            return None
        if not hmac.compare_digest(message.token.encode(), self._spec.token.encode()):
            return None
        self._nodes.add(message.node)
        return message.replica

    def _on_line_lost(self, replica: int) -> None:
        known = self._core.replicas.get(replica)
        if known is not None and self._core.phase is not Phase.ENDED:
            self._spawn(self._probe(replica, known.transfer))

    async def _probe(self, replica: int, address: tuple[str, int]) -> None:
        """Its connection ended. If its host refuses another one, the process is gone: no need to wait for a timeout."""
        refused = False
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), 1.0)
            writer.close()
        except ConnectionRefusedError:
            refused = True
        except (OSError, TimeoutError):
            pass  # unreachable: heartbeats and Ray will tell
        self._feed(m.LinkLost(replica=replica, refused=refused))

    # ---- the cluster

    async def _watch_nodes(self) -> None:
        while self._core.phase is not Phase.ENDED:
            try:
                change = await self._loop.run_in_executor(self._pool, self._cluster.look)
            except Exception as error:  # noqa: BLE001 - whatever Ray's control store answers, the next look may succeed
                _log.warning("run %s: the cluster's nodes cannot be seen: %r", self._config.name, error)
                change = NodeChange(draining=(), gone=())
            for node, deadline_s in change.draining:
                self._feed(m.Drain(node=node, by="the cluster", deadline_s=deadline_s))
            for node in change.gone:
                self._feed(m.NodeGone(node=node))
            await asyncio.sleep(_NODES_EVERY_S)

    # ---- the driver

    def _driver_gone(self) -> bool:
        grace_s = self._config.detection.driver_grace_s
        return grace_s is not None and time.monotonic() - self._driver_seen > grace_s

    def _check_driver(self) -> None:
        if self._driver_gone():
            grace_s = self._config.detection.driver_grace_s
            self._feed(m.Stop(by=f"the controller: no driver for {grace_s:g} s", now=True))

    # ---- commands

    async def _inside(self, work: Callable[[], dict[str, Any]], *, settled: bool = False) -> dict[str, Any]:
        """Run in the controller's loop; errors of the family become answers. `settled`: not before it is known who is
        there, for what is promised earlier would be lost if this controller died too."""

        async def call() -> dict[str, Any]:
            try:
                if settled:
                    await self._until_settled()
                return work()
            except EverstepError as error:
                return error_answer(error)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    async def _until_settled(self) -> None:
        try:
            await asyncio.wait_for(self._settled.wait(), _SETTLE_S)
        except TimeoutError:
            raise ControllerUnreachable(
                f"the controller of run {self._config.name!r} has just come back and still hears its replicas; "
                "nothing was changed, try again in a moment"
            ) from None

    def _status(self) -> dict[str, Any]:
        picture = status_of(self._core, self._config, self._now(), self._started_wall)
        return {**picture, "pid": os.getpid(), "collected": self._collected}

    def _scale(self, n: int, by: str) -> dict[str, Any]:
        limits = self._config.scaling
        if type(n) is not int:
            raise ConfigError(f"scale to {n!r}: the number of replicas must be a whole number")
        if not limits.min_replicas <= n <= limits.max_replicas:
            raise ConfigError(
                f"scale to {n}: run {self._config.name!r} takes {limits.min_replicas} to {limits.max_replicas} "
                "replicas (ScalingConfig.min_replicas, max_replicas)"
            )
        before = self._core.target
        if n != before:
            self._feed(m.Scale(replicas=n, by=str(by)))
        return {"run": self._config.name, "before": before, "target": n, "world_size": self._world_size()}

    def _drain(self, node: str, by: str) -> dict[str, Any]:
        if not isinstance(node, str):
            raise ConfigError(f"drain: {node!r} is no node; give its id, host name or address as text")
        matches = self._cluster.find(node)
        if len(matches) != 1:
            known = ", ".join(self._cluster.names()) or "none"
            what = "matches no node" if not matches else f"matches {len(matches)} nodes"
            raise ConfigError(f"drain: {node!r} {what} of the cluster; nodes: {known}")
        self._feed(m.Drain(node=matches[0], by=str(by)))
        there = [r.replica for r in self._core.replicas.values() if r.node == matches[0]]
        return {"run": self._config.name, "node": matches[0], "replicas": there}

    def _stop(self, by: str, now: bool) -> dict[str, Any]:
        self._feed(m.Stop(by=str(by), now=bool(now)))
        return {"run": self._config.name, "step": self._core.step}

    def _part(self, report: dict[str, Any]) -> dict[str, Any]:
        self._feed(m.PartWritten(report=report))
        return {}

    def _world_size(self) -> int:
        return len(self._core.generation.members) if self._core.generation else 0

    def _result(self) -> dict[str, Any]:
        if self._ended_at is None:
            return {}
        core = self._core
        self._collected = True
        self._wake.set()
        return {
            "run": self._config.name,
            "outcome": core.outcome,
            "reason": core.reason,
            "steps": core.step,
            "metrics": core.metrics,
            "value": core.value,
            "digest": core.digest,
            "generations": core.counts["generations"],
            "buckets": dict(core.clock.seconds),
        }


def _own_address(network: str | None) -> str:
    from everstep.actors.address import address_in

    return address_in(network) or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]


def _start_store(host: str) -> tuple[Any, tuple[str, int]]:
    from everstep.actors.groups import RendezvousServer

    server = RendezvousServer(host)
    return server, (host, server.port)


def _named_replicas(prefix: str) -> list[int]:
    """Ids of the run's replicas that exist on the cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ids = [
        a["name"][len(prefix) :]
        for a in named
        if a["namespace"] == connect.NAMESPACE and a["name"].startswith(prefix)
    ]
    return sorted(int(i) for i in ids if i.isdigit())
