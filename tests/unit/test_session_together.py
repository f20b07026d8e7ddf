"""Sessions of several replicas: what each must know of a step, and what it must not do twice. See `scripted`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everstep.actors import wire
from everstep.actors.session import Session
from everstep.errors import Fenced, GroupBroken, LoopError, TransferFailed
from tests.unit.scripted import Cast, Peer, play, run_config
from tests.unit.test_session_like_torch import Points
from tests.waiting import wait_until

EVEN = ((0, 1), (2, 3))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Loop:
    """Two steps. Keeps each replica's metrics of each step."""

    def __init__(self, steps: int = 2, names: dict[int, str] | None = None) -> None:
        self.steps, self.names = steps, names or {}
        self.metrics: dict[tuple[int, int], dict[str, float]] = {}

    def __call__(self, run: Session) -> None:
        model, optimizer = model_and_optimizer()
        run.register(model=model, optimizer=optimizer)
        for step in run.steps(Points(), total=self.steps):
            for x, y in step.batches():
                out = model(x)
                step.record(**{self.names.get(run.replica, "accuracy"): (out.argmax(1) == y).float().mean()})
                step.backward(F.cross_entropy(out, y))
            if step.commit(metrics={"loss": step.mean_loss, "share": 0.5}):
                self.metrics[run.replica, step.number] = step.metrics


def lose_the_vote(peer: Peer) -> Any:
    """The vote of its first step is counted, but the replica does not see the result."""
    whole, calls = peer.session._vote, []

    def vote(*args: Any) -> Any:
        total = whole(*args)
        calls.append(1)
        if len(calls) == 1:
            raise GroupBroken("cut off")
        return total

    return mock.patch.object(peer.session, "_vote", vote)


def test_a_replica_without_a_batch_hears_the_metrics_of_the_others() -> None:
    loop = Loop()
    with play(2, loop) as cast:
        cast.form(1, (0, 1), ((0, 1, 2, 3), ()))
        assert cast.peers[0].end() == cast.peers[1].end()
    assert loop.metrics[0, 0].keys() == {"loss", "accuracy", "share"}
    assert loop.metrics[0, 0]["share"] == 0.5
    assert [loop.metrics[1, step] for step in (0, 1)] == [loop.metrics[0, step] for step in (0, 1)]


def test_replicas_that_record_different_names_are_told_so() -> None:
    with play(2, Loop(names={1: "acc"})) as cast:
        cast.form(1, (0, 1), EVEN)
        for peer, name in zip(cast.peers, ("accuracy", "acc"), strict=True):
            with pytest.raises(LoopError, match=rf"the metrics \['{name}', 'loss', 'share'\]"):
                peer.end()


def split_vote(cast: Cast) -> tuple[wire.Status, wire.Status]:
    """Generation 1: the first step is history at replica 0, and reduced at replica 1."""
    cast.form(1, (0, 1), EVEN)
    cast.peers[1].heard(wire.Fault)
    cast.peers[0].heard(wire.Committed)
    ahead, behind = (peer.abort(1) for peer in cast.peers)
    assert (ahead.applied, behind.applied, behind.reduced) == (1, 0, True)
    return ahead, behind


def rest(status: wire.Status, shards: tuple[int, ...]) -> dict[str, Any]:
    """What replica 0 may have computed of the second step already, and who computes what is left."""
    kept = tuple(s for s in (*status.kept, status.current) if s >= 0)
    return {"held": (kept, ()), "todo": (tuple(s for s in shards if s not in kept), (2, 3))}


def test_a_step_that_is_rolled_forward_has_its_metrics_too() -> None:
    loop = Loop()
    with play(2, loop) as cast, lose_the_vote(cast.peers[1]):
        ahead, _ = split_vote(cast)
        cast.form(2, (0, 1), step=1, roll_forward=(1,), vote=ahead.vote, **rest(ahead, (0, 1)))
        assert cast.peers[0].end() == cast.peers[1].end()
    assert loop.metrics[0, 0] == loop.metrics[1, 0] != {}


def test_so_has_one_whose_state_is_fetched_instead() -> None:
    loop = Loop()
    with play(2, loop) as cast, lose_the_vote(cast.peers[1]):
        ahead, _ = split_vote(cast)
        sources = (cast.peers[0].server.address,)
        cast.form(2, (0, 1), step=1, fetch=(1,), sources=sources, vote=ahead.vote, **rest(ahead, (0, 1)))
        assert cast.peers[0].end() == cast.peers[1].end()
    assert loop.metrics[0, 0] == loop.metrics[1, 0] != {}


def test_a_promise_made_before_a_roll_forward_is_kept() -> None:
    """The abort of the generation that orders it comes at the last moment: the step is applied once, later."""
    loop = Loop()
    with play(2, loop) as cast, lose_the_vote(cast.peers[1]):
        ahead, _ = split_vote(cast)
        late = cast.peers[1]
        begin, promised = late.member.begin_roll_forward, []

        def aborted_first(*args: Any) -> None:
            if not promised:
                promised.append(late.abort(2))
            begin(*args)

        with mock.patch.object(late.member, "begin_roll_forward", aborted_first):
            cast.form(2, (0, 1), step=1, roll_forward=(1,), vote=ahead.vote, **rest(ahead, (0, 1)))
            after = cast.peers[0].abort(2)
            wait_until(lambda: promised)
            assert (promised[0].applied, promised[0].reduced) == (0, True)
            cast.form(3, (0, 1), step=1, roll_forward=(1,), vote=ahead.vote, **rest(after, (0, 1)))
            assert cast.peers[0].end() == late.end()


def test_what_is_offered_is_withdrawn_before_it_changes() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    parameters: dict[int, torch.Tensor] = {}

    def train(run: Session) -> None:
        model, optimizer = model_and_optimizer()
        parameters[run.replica] = model.weight  # type: ignore[assignment]
        run.register(model=model, optimizer=optimizer)
        for step in run.steps(Points(), total=1):
            before = parameters[run.replica].detach().clone()
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y))
            with mock.patch.object(
                run._server, "withdraw",
                lambda: seen.append((before, parameters[run.replica].detach().clone())),  # noqa: B023
            ):  # fmt: skip
                step.commit()

    with play(1, train) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),))
        cast.peers[0].end()
    assert seen and all(torch.equal(before, then) for before, then in seen)


# ---- the member alone


@pytest.fixture
def peer() -> Any:
    """A replica that waits for its first generation."""
    with play(1, Loop()) as cast:
        yield cast.peers[0]


def generation(number: int, members: tuple[int, ...] = (0, 1)) -> wire.Form:
    size = len(members)
    made = wire.Generation(
        number=number, incarnation=1, history=0, step=0, members=members, ranges=((0, 1),) * size, held=((),) * size,
        todo=((0,),) * size, store=("127.0.0.1", 1),
    )  # fmt: skip
    return wire.Form(generation=made, memo={})


def test_how_the_users_function_ended_is_said_again_on_a_new_connection(peer: Peer) -> None:
    peer.member.user_failed("ValueError: x", "trace", fatal=False)
    peer.member.finished("d", None)
    peer.order(wire.Welcome(incarnation=1, known_step=0))
    kinds = [type(m) for m in peer.line.said if isinstance(m, wire.UserFailed | wire.Finished)]
    assert kinds == [wire.UserFailed, wire.Finished, wire.Finished]
    peer.member.user_failed("ValueError: x", "trace", fatal=False)
    peer.order(wire.Welcome(incarnation=1, known_step=0))
    assert [type(m) for m in peer.line.said[-2:]] == [wire.UserFailed] * 2


def test_a_fault_of_an_old_generation_says_nothing_of_the_new_one(peer: Peer) -> None:
    peer.order(wire.Abort(generation=1, incarnation=1))
    with mock.patch.object(peer.member, "_form"):
        peer.order(generation(2))
        peer.member.fault(1, GroupBroken("late"))
        assert not peer.line.said or not isinstance(peer.line.said[-1], wire.Fault)
        assert not peer.member._hello().faulted
        peer.member.fault(2, GroupBroken("now"))
        assert isinstance(peer.line.said[-1], wire.Fault) and peer.member._hello().faulted
        peer.order(wire.Abort(generation=2, incarnation=1))
        peer.order(generation(3))
        assert not peer.member._hello().faulted


def test_an_order_that_failed_is_not_tried_again_and_again(peer: Peer) -> None:
    tries: list[int] = []

    def enter(order: Any) -> bool:
        tries.append(order.generation.number)
        raise TransferFailed("all sources are lost") if order.generation.number == 1 else Fenced("over")

    with mock.patch.object(peer.session, "_enter", enter), mock.patch.object(peer.member, "_form"):
        peer.order(generation(1))
        peer.heard(wire.Fault)
        peer.order(wire.Abort(generation=1, incarnation=1))
        peer.order(generation(2))
        peer.heard(wire.Fault, 2)
        peer.order(wire.Abort(generation=2, incarnation=1))
    assert tries == [1, 2]


def test_a_state_that_was_fetched_too_late_is_not_believed(peer: Peer) -> None:
    made = generation(1).generation
    peer.order(wire.Abort(generation=1, incarnation=1))
    with pytest.raises(Fenced):
        peer.member.adopt_state(made)
    assert (peer.member.applied, peer.member._status().fresh) == (0, True)


def test_a_lease_counts_from_when_the_answered_heartbeat_was_sent(peer: Peer) -> None:
    renewed: list[float] = []
    peer.member._renew_lease = renewed.append
    peer.member._asked.extend([(1, 10.0), (2, 20.0), (3, 30.0)])
    for seq in (2, 1, 9):
        peer.order(wire.Ack(seq=seq, known_step=0))
    assert renewed == [20.0]
    assert list(peer.member._asked) == [] or peer.member._asked[0][0] > 9


# ---- loops that end otherwise than announced


def test_who_goes_on_after_the_others_have_left_is_told_why_it_cannot() -> None:
    with play(2, Loop(steps=5)) as cast:
        cast.form(1, (0, 1), EVEN)
        statuses = [cast.peers[0].heard(wire.Committed) and peer.abort(1) for peer in cast.peers]
        reached = max(status.applied for status in statuses)
        last = next(status for status in statuses if status.applied == reached)
        behind = tuple(i for i, status in enumerate(statuses) if status.applied < reached)
        cast.form(2, (0, 1), ((), ()), step=reached, final=True, roll_forward=behind, vote=last.vote)
        for peer in cast.peers:
            if reached < 5:
                with pytest.raises(LoopError, match=rf"left the loop after {reached} steps"):
                    peer.end()


def test_a_function_that_trains_nothing_is_told_so() -> None:
    def nothing(run: Session) -> None:
        peer.session.check_trained()

    peer = Peer(0, run_config(), nothing)
    peer.thread.start()
    with pytest.raises(LoopError, match=r"without `for step in run.steps"):
        peer.end()
    peer.member.close()
    peer.server.close()

    def left_at_once(run: Session) -> None:
        run.register(model=model_and_optimizer()[0])
        for _ in run.steps(Points(), total=2):
            break
        run.check_trained()

    with play(1, left_at_once) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),))
        with pytest.raises(LoopError, match="before its first step was committed"):
            cast.peers[0].end()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss": "high"}, r"metric 'loss': 'high' is no number"),
        ({"grid": torch.zeros(2)}, r"metric 'grid': tensor\(\[0., 0.\]\) is no number"),
        ({"": 1.0}, r"metric '': the name"),
        ({7: 1.0}, r"metric 7: the name"),
        ({f"m{i}": 1.0 for i in range(20)}, "21 metrics in one step; at most 16"),
        ({"m" * 2000: 1.0}, "have 2005 bytes in all; at most 1024"),
    ],
)
def test_a_metric_that_cannot_be_reported_is_named(metrics: dict[Any, Any], told: str) -> None:
    def train(run: Session) -> None:
        model, optimizer = model_and_optimizer()
        run.register(model=model, optimizer=optimizer)
        for step in run.steps(Points(), total=1):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y))
            step.commit(metrics=metrics)

    with play(1, train) as cast:
        cast.form(1, (0,), ((0, 1, 2, 3),))
        with pytest.raises(LoopError, match=told):
            cast.peers[0].end()
