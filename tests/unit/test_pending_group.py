"""A group that is still forming: computing goes on, collectives wait, and an end of the generation frees them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from everstep.actors.groups.base import Group, LocalGroup
from everstep.actors.groups.pending import PendingGroup
from everstep.errors import Fenced, GroupBroken


class Forming:
    """Forms when it is told to, or fails."""

    def __init__(self) -> None:
        self.group, self.asked, self.done = LocalGroup(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num_asked = 0

    def __call__(self) -> Group:
        self.num_asked += 1
        self.asked.set()
        assert self.done.wait(10)
        if self.error is not None:
            raise self.error
        return self.group


def test_a_collective_waits_for_the_group_and_all_threads_get_the_same_one() -> None:
    forming = Forming()
    pending = PendingGroup(0, 1, forming)
    pending.check()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(pending.all_reduce, torch.ones(2)) for _ in range(3)]
        assert forming.asked.wait(10) and not any(call.done() for call in calls)
        pending.check()  # neither this nor an abort waits
        forming.done.set()
        assert [call.result(10) for call in calls] == [None] * 3
    assert forming.num_asked == 1


@pytest.mark.parametrize("error", [Fenced("generation 3 is over"), GroupBroken("a peer is gone")])
def test_a_group_that_never_stands_is_a_broken_group(error: Exception) -> None:
    forming = Forming()
    forming.error = error
    forming.done.set()
    with pytest.raises(GroupBroken, match=str(error)):
        PendingGroup(0, 2, forming).exchange((), (), channel=0)


def test_an_abort_while_it_forms_holds_for_the_group_that_comes() -> None:
    forming = Forming()
    pending = PendingGroup(0, 1, forming)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pending.all_reduce, torch.ones(2))
        assert forming.asked.wait(10)
        pending.abort()
        with pytest.raises(GroupBroken):
            pending.check()
        forming.done.set()
        with pytest.raises(GroupBroken):
            call.result(10)
    with pytest.raises(GroupBroken):
        forming.group.check()


def test_an_aborted_one_is_not_waited_for_any_more() -> None:
    pending = PendingGroup(0, 1, Forming())
    pending.close()
    with pytest.raises(GroupBroken):
        pending.all_reduce(torch.ones(2))


def test_whoever_watches_is_told_of_the_group_that_came() -> None:
    class Watched(LocalGroup):
        def watch(self, callback: object) -> None:
            self.callback = callback

    forming = Forming()
    forming.group = Watched()
    forming.done.set()
    pending, calls = PendingGroup(0, 1, forming), []
    pending.watch(calls.append)
    pending.all_reduce(torch.ones(2))
    assert forming.group.callback == calls.append  # type: ignore[attr-defined]
