"""Reading ahead: nothing wanted is read twice, and everything asked for arrives, however the deal changes."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.actors.data_plan import FetchPlan


class Loader:
    """What torch's DataLoader does with a sampler: `depth` tasks in flight, results in the order of the tasks."""

    def __init__(self, plan: FetchPlan, depth: int) -> None:
        self.plan = plan
        self.depth = depth
        self.queue: deque[tuple[int, int, int]] = deque()
        self.fence = (0, 0)
        self.read: list[tuple[int, int]] = []
        self.reads_while_wanted: Counter[tuple[int, int]] = Counter()

    def deal(self, step: int, now: list[int], later: list[int], until: int) -> None:
        if self.plan.deal(step, now, later, until):
            self.fence = (self.plan.next_serial, step)
        for key in list(self.reads_while_wanted):
            if not (self.plan.wants(key) or key in self.plan.kept):
                del self.reads_while_wanted[key]

    def put(self) -> None:
        task = self.plan.issue()
        if task is not None:
            key = task[1:]
            assert key not in self.plan.ready
            assert key not in self.plan.kept
            assert key not in [other[1:] for other in self.queue]
            self.queue.append(task)

    def receive(self) -> None:
        if not self.queue:
            for _ in range(self.depth):
                self.put()
        serial, step, shard = self.queue.popleft()
        self.put()  # torch asks for the next task before it hands over what came
        if serial < self.fence[0] and step > self.fence[1]:
            self.plan.given_back(serial)
        else:
            self.read.append((step, shard))
            self.reads_while_wanted[step, shard] += self.plan.wants((step, shard))
            assert self.reads_while_wanted[step, shard] <= 1
            self.plan.arrived(serial, f"{step}/{shard}")

    def get(self, step: int, shard: int) -> str:
        if (step, shard) in self.plan.kept:
            return str(self.plan.kept[step, shard].batch)
        self.plan.ask((step, shard))
        for _ in range(4 * self.depth + 4):
            if (step, shard) in self.plan.ready:
                return str(self.plan.hand_out((step, shard)))
            self.receive()
        raise AssertionError(f"{step}/{shard} never came")


SHARDS, UNTIL = 6, 6
masks = st.integers(1, 2**SHARDS - 1)


def chosen(mask: int) -> list[int]:
    return [v for v in range(SHARDS) if mask >> v & 1]


@given(st.integers(1, 5), masks, st.lists(st.tuples(st.integers(0, 4), masks, masks), max_size=10))
@settings(max_examples=100, deadline=None)
def test_every_batch_comes_and_none_is_read_twice_while_wanted(
    depth: int, first: int, deals: list[tuple[int, int, int]]
) -> None:
    """Each deal: after how many batches it comes, what is owned from then on, what is missing of the step at hand."""
    plan = FetchPlan(lambda step, shard: (step + shard) % 5, lookahead_steps=4 * depth + 1)
    loader = Loader(plan, depth)
    later = chosen(first)
    loader.deal(0, later, later, UNTIL)
    gets = 0
    for step in range(UNTIL):
        todo = deque(later)
        while todo:
            shard = todo.popleft()
            if (step + shard) % 5:
                assert loader.get(step, shard) == f"{step}/{shard}"
                gets += 1
            if deals and gets >= deals[0][0]:  # a new generation in the middle of the step
                _, owned, missing = deals.pop(0)
                gets, later, todo = 0, chosen(owned), deque(chosen(missing))
                loader.deal(step, list(todo), later, UNTIL)
        plan.committed(step)
        assert all(key[0] > step for key in (*plan.ready, *plan.kept))


def test_after_a_new_deal_the_missing_shards_of_the_step_come_first() -> None:
    plan = FetchPlan(lambda step, shard: 1, lookahead_steps=100)
    loader = Loader(plan, depth=4)
    loader.deal(3, [0, 1], [0, 1], 10)
    assert loader.get(3, 0) == "3/0"
    loader.deal(3, [1, 4], [0, 1, 4], 10)
    assert loader.get(3, 1) == "3/1"
    assert loader.get(3, 4) == "3/4"
    assert loader.read == [(3, 0), (3, 1), (3, 4)]  # 4/0 and 4/1 were queued before it and gave way
    for _ in range(6):
        loader.receive()
    assert [(4, 0) in plan.ready, (4, 1) in plan.ready] == [
        True,
        True,
    ]  # read ahead again, without being asked for


def test_the_same_deal_again_disturbs_nothing() -> None:
    plan = FetchPlan(lambda step, shard: 1, lookahead_steps=100)
    loader = Loader(plan, depth=4)
    loader.deal(0, [0, 1], [0, 1], 10)
    loader.get(0, 0)
    assert not plan.deal(0, [1], [0, 1], 10)


def test_nothing_is_read_past_the_end_or_before_the_front() -> None:
    plan = FetchPlan(lambda step, shard: 1, lookahead_steps=100)
    plan.deal(2, [0], [0, 1], 4)
    plan.committed(2)
    issued = [plan.issue() for _ in range(5)]
    assert [task[1:] for task in issued if task is not None] == [(3, 0), (3, 1)]
    assert plan.issue() is None


def test_the_search_ends_where_all_owned_shards_are_empty() -> None:
    plan = FetchPlan(lambda step, shard: 0, lookahead_steps=9)
    plan.deal(0, [5], [5], 10**12)
    assert plan.issue() is None
