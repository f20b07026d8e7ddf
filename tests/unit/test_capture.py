"""From the live state to storage and back: what replicas copy, what the keeper writes, what is read again."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import everstep
from everstep.actors import capture, keeper, keeper_line, wire
from everstep.actors.capture import Capture, Staging, Ticket
from everstep.actors.places import checkpoints_url
from everstep.checkpoint.catalog import newest_whole
from everstep.checkpoint.chunks import cut, divide
from everstep.checkpoint.part import views_of
from everstep.checkpoint.state import Snapshot
from everstep.errors import ConfigError, StateMismatch
from everstep.orchestrator.core import model as m
from everstep.orchestrator.vault import Vault
from tests.unit.ck_helpers import odd_state, snapshot_of, trained
from tests.unit.scripted import TOKEN, play
from tests.unit.test_session_like_torch import Points
from tests.unit.test_session_together import EVEN, Loop, lose_the_vote, rest, split_vote
from tests.waiting import wait_until

NODE = "n"  # that of `scripted`


class LoneKeeper(keeper.Keeper):
    """A keeper without a controller: what it would tell is kept here."""

    reports: list[dict[str, Any]]

    def __init__(self, spec: keeper.KeeperSpec) -> None:
        with mock.patch.object(keeper.os, "nice"):
            super().__init__(spec)

    def _tell(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    def _live_with_the_controller(self) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> everstep.RunConfig:
    return everstep.RunConfig(
        name="scripted", scaling=everstep.ScalingConfig(max_replicas=4),
        batch=everstep.BatchConfig(global_batch_size=16, logical_shards=4), storage=str(tmp_path),
        checkpoint=everstep.CheckpointConfig(every_s=None, every_steps=2),
    )  # fmt: skip


@pytest.fixture
def lone(config: everstep.RunConfig) -> Iterator[LoneKeeper]:
    LoneKeeper.reports = []
    spec = keeper.KeeperSpec(
        run=config.name, name="", token=TOKEN, node=NODE, url=checkpoints_url(config), storage_options={}, bytes_per_s=None,
        controller="", namespace="", lease_s=5.0,
    )  # fmt: skip
    made = LoneKeeper(spec)
    yield made
    made.close()


def bytes_of(snapshot: Snapshot, world_size: int, rank: int) -> bytes:
    layout = snapshot.plan()
    view = views_of(layout, snapshot.tensors)
    return b"".join(bytes(view(chunk)) for chunk in divide(cut(layout), world_size)[rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["odd", "trained"])
def test_each_replica_copies_its_own_part_and_nothing_else(kind: str, world_size: int) -> None:
    snapshot = snapshot_of(odd_state()) if kind == "odd" else trained()[2].capture()
    layout = snapshot.plan()
    with mock.patch.object(capture, "cut", lambda layout: cut(layout, 64)):
        for rank in range(world_size):
            staging = Staging()
            chunks = divide(cut(layout, 64), world_size)[rank]
            staging.make_room(sum(chunk.nbytes for chunk in chunks))
            for offset, source in capture._pieces(layout, chunks, snapshot.tensors):
                staging.put(offset, source)
            view = views_of(layout, snapshot.tensors)
            expected = b"".join(bytes(view(chunk)) for chunk in chunks)
            assert staging._space is not None
            assert staging._space.numpy().tobytes()[: len(expected)] == expected


def identity() -> Any:
    return type("Id", (), {"token": TOKEN, "node": NODE, "replica": 0})()


def ticket(step: int = 1) -> Ticket:
    return Ticket(step=step, attempt="i1-1", generation=1, rank=0, world_size=1)


def test_what_may_change_at_once_is_copied_at_once_and_the_rest_before_settle_returns(
    lone: LoneKeeper, config: everstep.RunConfig
) -> None:
    steady, restless = torch.arange(1000.0), torch.arange(10.0)
    snapshot = snapshot_of({"a": steady, "b": restless})
    expected = bytes_of(snapshot, 1, 0)
    taken = Capture(identity(), lambda ticket, why: pytest.fail(why))
    held = threading.Event()
    put = Staging.put

    def slow_put(staging: Staging, offset: int, source: torch.Tensor) -> None:
        if source.numel() == 4000:
            held.wait(10.0)
        put(staging, offset, source)

    with mock.patch.object(Staging, "put", slow_put):
        taken.take(ticket(), snapshot, [steady])
        restless.zero_()
        threading.Timer(0.1, held.set).start()
        taken.settle()
    assert held.is_set() and taken.busy
    steady.zero_()
    assert taken.wait(30.0)
    assert taken._staging._space is not None
    assert taken._staging._space.numpy().tobytes() == expected
    [report] = lone.reports
    assert (report["step"], report["rank"]) == (1, 0)
    taken.close()


def test_without_a_keeper_the_part_is_missing_and_the_next_one_may_be_taken() -> None:
    missing: list[str] = []
    with mock.patch.object(capture, "_KEEPER_S", 0.3):
        taken = Capture(identity(), lambda ticket, why: missing.append(why))
        for _ in range(2):
            taken.take(ticket(), snapshot_of({"a": torch.ones(3)}), [])
            assert taken.wait(30.0) and not taken.busy
    assert len(missing) == 2 and "no keeper answers" in missing[0]
    taken.close()


def test_a_keeper_talks_to_nobody_who_does_not_know_the_runs_secret(lone: LoneKeeper) -> None:
    with mock.patch.object(keeper_line, "proof", lambda token, node: "0" * 64):
        stranger = keeper_line.address(TOKEN, NODE)
        assert keeper_line.address("other", NODE) != stranger
    with (
        mock.patch.object(keeper_line.hmac, "compare_digest", lambda a, b: False),
        pytest.raises(keeper_line.KeeperGone),
    ):
        keeper_line.call(TOKEN, NODE, 0)
    keeper_line.call(TOKEN, NODE, 0).close()


def test_checkpoints_of_a_run_are_read_by_another_number_of_replicas(
    lone: LoneKeeper, config: everstep.RunConfig
) -> None:
    """Written by two replicas after the second of three steps, read by one of three, fetched by the others."""
    vault = Vault(config)
    assert vault.open(1, True) == 0
    options = {"storage": config.storage, "checkpoint": config.checkpoint}
    loop = Loop(steps=3)
    with play(2, loop, **options) as cast:
        cast.form(1, (0, 1), EVEN)
        ends = [peer.end() for peer in cast.peers]
        wait_until(lambda: len(lone.reports) == 2, 30.0)
        records = [r.record for p in cast.peers for r in p.line.said if isinstance(r, wire.Committed)]
    assert [r.snapshot for r in records] == ["", "i1-1", ""]
    parts = tuple(sorted(lone.reports, key=lambda report: report["rank"]))
    answer = vault.commit(m.CommitCheckpoint(step=2, attempt="i1-1", parts=parts))
    assert answer.problem == "" and answer.written_bytes > 0
    assert Vault(config).open(1, True) == 2
    anew = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="never"))
    with pytest.raises(ConfigError, match=r"resume = 'never'.* checkpoint of step 2; choose another name"):
        Vault(anew).open(1, True)
    assert Vault(anew).open(1, False) == 2, "a controller that comes back goes on with what its own run wrote"
    again = Loop(steps=3)
    with play(3, again, **options) as cast:
        sources = (cast.peers[0].server.address,)
        shares = ((0, 1), (2,), (3,))
        cast.form(1, (0, 1, 2), shares, step=2, restore=(0,), fetch=(1, 2), sources=sources)
        assert [peer.end() for peer in cast.peers] == [ends[0]] * 3
    assert again.metrics.keys() == {(0, 2), (1, 2), (2, 2)}
    assert again.metrics[0, 2] == loop.metrics[0, 2]


def test_who_rolls_the_step_of_a_snapshot_forward_writes_its_part_too(
    lone: LoneKeeper, config: everstep.RunConfig
) -> None:
    checkpoint = everstep.CheckpointConfig(every_s=None, every_steps=1, at_end=False)
    with play(2, Loop(), storage=config.storage, checkpoint=checkpoint) as cast, lose_the_vote(cast.peers[1]):
        ahead, _ = split_vote(cast)
        cast.form(2, (0, 1), step=1, roll_forward=(1,), vote=ahead.vote, **rest(ahead, (0, 1)))
        for peer in cast.peers:
            peer.end()
    wanted = {(1, "i1-1", 0), (1, "i1-1", 1)}
    wait_until(lambda: wanted <= {(r["step"], r["attempt"], r["rank"]) for r in lone.reports}, 30.0)


def test_a_damaged_checkpoint_is_told_to_the_controller(lone: LoneKeeper, config: everstep.RunConfig) -> None:
    vault = Vault(config)
    vault.open(1, True)
    options = {"storage": config.storage, "checkpoint": config.checkpoint}
    with play(1, Loop(steps=3), **options) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),))
        cast.peers[0].end()
        wait_until(lambda: lone.reports, 30.0)
    vault.commit(m.CommitCheckpoint(step=2, attempt="i1-1", parts=tuple(lone.reports)))
    [file] = Path(config.storage).rglob("r0000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with play(1, Loop(steps=3), **options) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),), step=2, restore=(0,))
        refused = cast.peers[0].heard(wire.Refused)
        assert refused.step == 2 and "r0000.safetensors" in refused.reason
        cast.peers[0].heard(wire.Fault)
    assert vault.find_other(2, refused.reason) == 0
    assert newest_whole(vault._store).manifest is None


def test_a_checkpoint_of_another_model_is_named_with_the_way_out(
    lone: LoneKeeper, config: everstep.RunConfig
) -> None:
    vault = Vault(config)
    vault.open(1, True)
    options = {"storage": config.storage, "checkpoint": config.checkpoint}
    with play(1, Loop(steps=3), **options) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),))
        cast.peers[0].end()
        wait_until(lambda: lone.reports, 30.0)
    vault.commit(m.CommitCheckpoint(step=2, attempt="i1-1", parts=tuple(lone.reports)))

    def other(run: Any) -> None:
        run.register(other=torch.nn.Linear(2, 2))
        list(run.steps(Points(), total=3))

    with play(1, other, **options) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),), step=2, restore=(0,))
        with pytest.raises(StateMismatch, match=r"checkpoint of step 2 in .* another name or storage"):
            cast.peers[0].end()
