"""Replicas of one run in threads of one process, and a controller that says what the test tells it to.

Sessions, members, groups and state servers are the real ones; only the line to the controller is cut: what a replica
says is kept in `said`, orders are given by hand. Models must not use random numbers: the threads share the generators.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import everstep
from everstep.actors import member as member_module
from everstep.actors import wire
from everstep.actors.groups import RendezvousServer
from everstep.actors.identity import Identity
from everstep.actors.member import Member, ReleasedFromRun
from everstep.actors.session import Session
from everstep.actors.transfer import StateServer
from tests.waiting import wait_until

SHARDS, BATCH, DEADLINE_S = 4, 16, 30.0
TOKEN = secrets.token_hex(8)
"""Of this process alone: keepers of two runs on one machine must not meet."""
Train = Callable[[Session], Any]


class Line:
    """Stands in for `actors.link.Link`."""

    def __init__(self, locate: object, hello: object, receive: object) -> None:
        self.said: list[wire.Message] = []

    def start(self) -> None:
        pass

    def send(self, message: wire.Message) -> bool:
        self.said.append(message)
        return True

    def close(self) -> None:
        pass


class Peer:
    """One replica."""

    def __init__(self, replica: int, config: everstep.RunConfig, train: Train) -> None:
        self.replica = replica
        self.server = StateServer("127.0.0.1", TOKEN.encode())
        with mock.patch.object(member_module, "Link", Line):
            self.member = Member(
                Identity(
                    run="scripted", replica=replica, token=TOKEN, pid=0, node="n", host="h", ip="127.0.0.1",
                    transfer=self.server.address,
                ),
                device=torch.device("cpu"), locate=lambda: None, renew_lease=lambda since_s: None, heartbeat_s=1.0,
                form_timeout_s=DEADLINE_S, on_release=lambda reason: None,
            )  # fmt: skip
        self.line: Any = self.member._link
        self.session = Session(
            config=config, member=self.member, server=self.server, device=torch.device("cpu")
        )
        self.error: BaseException | None = None
        self.digest = ""
        self._train = train
        self.thread = threading.Thread(target=self._run, name=f"replica-{replica}", daemon=True)

    def _run(self) -> None:
        try:
            self._train(self.session)
            self.digest = self.session.state_digest()
        except ReleasedFromRun:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.session.close()

    def heard(self, kind: type[wire.Message], count: int = 1) -> Any:
        """The `count`-th message of this kind, as soon as it was said."""

        def found() -> list[wire.Message]:
            if self.error is not None:
                raise AssertionError(f"replica {self.replica} failed") from self.error
            messages = [m for m in self.line.said if isinstance(m, kind)]
            return messages[count - 1 : count]

        return wait_until(found, DEADLINE_S, lambda: f"replica {self.replica} said {self.line.said}")[0]

    def order(self, message: wire.Message) -> None:
        self.member._receive(message)

    def abort(self, number: int) -> wire.Status:
        """What it promises."""
        before = sum(isinstance(m, wire.Parked) for m in self.line.said)
        self.order(wire.Abort(generation=number, incarnation=1))
        parked: wire.Parked = self.heard(wire.Parked, before + 1)
        return parked.status

    def end(self) -> str:
        """Wait for the end of its loop; the digest of its state."""
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), f"replica {self.replica} is still at it: {self.member.phase}"
        if self.error is not None:
            raise self.error
        return self.digest


def run_config(**changes: Any) -> everstep.RunConfig:
    return everstep.RunConfig(
        name="scripted", scaling=everstep.ScalingConfig(max_replicas=SHARDS),
        batch=everstep.BatchConfig(global_batch_size=BATCH, logical_shards=SHARDS), **changes,
    )  # fmt: skip


class Cast:
    """All replicas, and the words of the controller."""

    def __init__(self, count: int, train: Train, **changes: Any) -> None:
        self.rendezvous = RendezvousServer("127.0.0.1")
        config = run_config(**changes)
        self.peers = [Peer(i, config, train) for i in range(count)]
        for peer in self.peers:
            peer.thread.start()
            peer.heard(wire.Ready)

    def form(
        self,
        number: int,
        members: Sequence[int],
        todo: Sequence[Sequence[int]],
        *,
        step: int = 0,
        **more: Any,
    ) -> None:
        """Send a generation out. Later steps are dealt evenly."""
        size = len(members)
        generation = wire.Generation(
            number=number, incarnation=1, history=0, step=step, members=tuple(members),
            ranges=tuple((SHARDS * r // size, SHARDS * (r + 1) // size) for r in range(size)),
            held=more.pop("held", ((),) * size), todo=tuple(map(tuple, todo)),
            store=(self.rendezvous.host, self.rendezvous.port), **more,
        )  # fmt: skip
        for i in members:
            self.peers[i].order(wire.Form(generation=generation, memo={}))


@contextmanager
def play(count: int, train: Train, **changes: Any) -> Iterator[Cast]:
    """Replicas that are ready; at the end all of them are released."""
    cast = Cast(count, train, **changes)
    try:
        yield cast
    finally:
        for peer in cast.peers:
            peer.order(wire.Release(reason="the test is over"))
        deadline = time.monotonic() + DEADLINE_S
        for peer in cast.peers:
            peer.thread.join(max(deadline - time.monotonic(), 0.0))
            peer.member.close()
            peer.server.close()
        cast.rendezvous.close()
        assert not any(peer.thread.is_alive() for peer in cast.peers)
