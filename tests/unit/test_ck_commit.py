"""Killed anywhere, frozen anywhere, told twice: what is loadable is a whole checkpoint, and nobody deletes another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from everstep.checkpoint import catalog, commit
from everstep.checkpoint.catalog import Choice, committed_steps, newest_whole, open_checkpoint, pin, unpin
from everstep.checkpoint.errors import AlreadyCommitted, CheckpointIncomplete, StoreUnusable, Superseded
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.retention import LiveAttempt, Retention, prune
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tree import unflatten
from tests.unit.ck_helpers import (
    NO_WAIT,
    Killed,
    Mortal,
    commit_parts,
    new_store,
    save,
    snapshot_of,
    write_parts,
)


def state(step: int) -> dict[str, Any]:
    """Half of it changes from step to step."""
    return {"m": {"frozen": torch.arange(40.0), "moving": torch.full((40,), float(step))}}


def value_at(store: Store, manifest: Manifest) -> float:
    """Reads all of it, and says of which step it is."""
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    read_tensors(store, manifest, buffers)
    tree = unflatten(manifest.skeleton, buffers)
    assert torch.equal(tree["m"]["frozen"], torch.arange(40.0)) and tree["m"]["moving"].unique().numel() == 1
    return float(tree["m"]["moving"][0])


def newest_value(store: Store) -> tuple[int, Choice]:
    choice = newest_whole(store)
    assert choice.manifest is not None
    assert value_at(store, choice.manifest) == choice.manifest.step
    return choice.manifest.step, choice


def small(url: str) -> Store:
    store = open_store(url, retry=NO_WAIT)
    store.delete([info.key for info in store.listing("")])
    commit.begin(store, 0, "first")
    return store


def kill_everywhere(
    set_up: Callable[[Store], Any], act: Callable[[Store, Any], None], judge: Callable[[Store], None]
) -> int:
    """Run `act` again and again, killed at each of its operations, before it and after; `judge` what is left."""
    number = 0
    while True:
        survived = False
        for after in (False, True):
            store = small("memory://mortal")
            given = set_up(store)
            try:
                act(Mortal(store, number, after=after), given)
                survived = True
            except Killed:
                pass
            judge(store)
        if survived:
            return number
        number += 1


def test_a_save_killed_at_any_operation_leaves_the_newest_committed_one_whole() -> None:
    seen = set()

    def judge(store: Store) -> None:
        step, choice = newest_value(store)
        assert choice.refused == () and step == committed_steps(store)[0]
        seen.add(step)
        # Whoever comes next saves the same step, or finds that it is there.
        commit.begin(store, 1, "next")
        if step == 1:
            save(store, state(2), 2, attempt="i1-0", previous=choice.manifest)
        assert newest_value(store)[0] == 2
        pruned = prune(store, Retention(keep_last=1), incarnation=1, grace_s=-1)
        assert newest_value(store)[0] == 2 and not pruned.kept_damaged
        assert not [info for info in store.listing("steps/2/") if "i1-0" not in info.key and step == 1]

    def act(store: Store, base: Manifest) -> None:
        save(store, state(2), 2, attempt="i0-1", previous=base)

    operations = kill_everywhere(lambda store: save(store, state(1), 1), act, judge)
    assert seen == {1, 2} and operations >= 10


def test_a_save_into_a_folder_killed_at_any_operation_leaves_a_whole_one(tmp_path: Any) -> None:
    number, alive = 0, False
    while not alive:
        store = new_store(tmp_path / str(number))
        base = save(store, state(1), 1, world_size=1)
        try:
            save(Mortal(store, number), state(2), 2, attempt="i0-1", previous=base, world_size=1)
            alive = True
        except Killed:
            pass
        step, choice = newest_value(store)
        assert step == (2 if alive or committed_steps(store)[0] == 2 else 1) and choice.refused == ()
        prune(store, Retention(), incarnation=0, grace_s=-10)
        assert newest_value(store)[0] == step and store.unfinished() == []
        number += 1
    assert number > 8


def test_retention_killed_at_any_operation_leaves_what_stays_whole() -> None:
    def set_up(store: Store) -> None:
        base = None
        for step in range(1, 4):
            base = save(store, state(step), step, attempt=f"i0-{step}", previous=base, world_size=1)
        write_parts(store, snapshot_of(state(9)), 9, attempt="i0-9", world_size=1)  # an orphan

    def act(store: Store, given: Any) -> None:
        prune(store, Retention(keep_last=2), incarnation=0, grace_s=-1)

    def judge(store: Store) -> None:
        assert newest_value(store)[0] == 3
        for step in committed_steps(store):
            assert value_at(store, open_checkpoint(store, step)) == step
        pruned = prune(store, Retention(keep_last=2), incarnation=0, grace_s=-1)
        assert committed_steps(store) == [3, 2] and not pruned.kept_damaged
        assert [value_at(store, open_checkpoint(store, step)) for step in (2, 3)] == [2, 3]
        referred = {held.key for step in (2, 3) for held in open_checkpoint(store, step).objects}
        left = {info.key for info in store.listing("steps/")}
        assert left == referred | {"steps/2/i0-2/manifest.json", "steps/3/i0-3/manifest.json"}
        assert any(
            "steps/1/" in key for key in referred
        )  # what did not change since stays with its first writer

    assert kill_everywhere(set_up, act, judge) > 6


def test_a_retirement_killed_at_any_operation_is_done_or_not_done() -> None:
    def set_up(store: Store) -> None:
        save(store, state(1), 1)
        save(store, state(2), 2, attempt="i0-1")

    def judge(store: Store) -> None:
        assert newest_value(store)[0] in (1, 2)
        commit.retire(store, 2, "damaged", 0)
        commit.retire(store, 2, "told twice", 0)
        assert newest_value(store)[0] == 1 and len(store.listing("retired/")) == 1
        save(store, state(2), 2, attempt="i0-2")
        assert newest_value(store)[0] == 2

    kill_everywhere(set_up, lambda store, given: commit.retire(store, 2, "damaged", 0), judge)


def test_a_commit_record_that_is_no_record_can_be_retired() -> None:
    store = small("memory://retire")
    save(store, state(1), 1)
    store.put("commits/2.json", b"x" * 100_000)
    assert newest_value(store)[1].refused[0].step == 2
    commit.retire(store, 2, "foreign", 0)
    assert committed_steps(store) == [1]


def test_a_commit_that_is_told_twice_is_made_once() -> None:
    store = small("memory://twice")
    snapshot = snapshot_of(state(1))
    parts = write_parts(store, snapshot, 1)
    first = commit_parts(store, snapshot, 1, parts)
    before = store.listing("steps/")
    assert commit_parts(store, snapshot, 1, parts) == first
    assert [info.key for info in store.listing("steps/")] == [info.key for info in before]


def test_the_older_of_two_controllers_is_fenced() -> None:
    store = small("memory://fence")
    snapshot = snapshot_of(state(1))
    parts = write_parts(store, snapshot, 1)
    commit.begin(store, 1, "second")
    for act in (
        lambda: commit_parts(store, snapshot, 1, parts),
        lambda: commit.retire(store, 1, "", 0),
        lambda: prune(store, Retention(), incarnation=0),
        lambda: commit.begin(store, 0, "first"),
    ):
        with pytest.raises(Superseded, match="incarnation 1"):
            act()
    assert committed_steps(store) == [] and not store.listing("retired/")
    commit.begin(store, 1, "second")  # told twice
    with pytest.raises(Superseded, match="belongs to another"):
        commit.begin(store, 1, "third")


def test_of_two_attempts_at_a_step_the_first_commit_stands() -> None:
    store = small("memory://already")
    save(store, state(1), 1, attempt="i0-0")
    with pytest.raises(AlreadyCommitted):
        save(
            store, {"m": {"frozen": torch.arange(40.0), "moving": torch.full((40,), 1.0)}}, 1, attempt="i0-1"
        )
    assert open_checkpoint(store, 1).attempt == "i0-0" and newest_value(store)[0] == 1


class Frozen(Mortal):
    """Stops at one operation, and lets the others act meanwhile."""

    def __init__(self, inner: Store, freezes_at: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner, 1 << 60)
        self.freezes_at, self.meanwhile = freezes_at, meanwhile

    def tick(self, operation: Any) -> Any:
        if self.count == self.freezes_at:
            self.count += 1
            self.meanwhile()
        else:
            self.count += 1
        return operation()


def test_a_controller_frozen_at_any_operation_never_harms_the_one_that_took_over() -> None:
    outcomes, number, reached = set(), 0, True
    while reached:
        store = small("memory://frozen")
        base = save(store, state(1), 1)
        reached = False

        def take_over(store: Store = store, base: Manifest = base) -> None:
            nonlocal reached
            reached = True
            commit.begin(store, 1, "second")
            choice = newest_whole(store)
            assert choice.manifest is not None
            if choice.manifest.step == 1:
                save(store, state(2), 2, attempt="i1-0", previous=base)
            save(store, state(3), 3, attempt="i1-1", previous=choice.manifest)

        older = Frozen(store, number, take_over)
        try:
            save(older, state(2), 2, attempt="i0-1", previous=base)
            prune(older, Retention(keep_last=1), incarnation=0, grace_s=-1)
            outcomes.add("done")
        except (Superseded, AlreadyCommitted) as error:
            outcomes.add(type(error).__name__)
        if reached:
            assert newest_value(store)[0] == 3
            prune(store, Retention(keep_last=2), incarnation=1, grace_s=-1)
            assert newest_value(store)[0] == 3
        for step in committed_steps(store):
            assert value_at(store, open_checkpoint(store, step)) == step
        number += 1
    assert outcomes == {"done", "Superseded", "AlreadyCommitted"}


def frozen_outcomes(act: Callable[[Store], None], look: Callable[[Store], Any]) -> list[tuple[Any, Any]]:
    """What is there when another takes over at each operation of `act`, and what when `act` has ended after it."""
    found: list[tuple[Any, Any]] = []
    while True:
        store = small("memory://overtaken")
        for step in range(1, 5):
            save(store, state(step), step, attempt=f"i0-{step}", world_size=1)
        at_take_over: list[Any] = []

        def take_over(store: Store = store, seen: list[Any] = at_take_over) -> None:
            commit.begin(store, 1, "second")
            seen.append(look(store))

        try:
            act(Frozen(store, len(found), take_over))
        except Superseded:
            pass
        if not at_take_over:
            return found
        found.append((at_take_over[0], look(store)))


def test_a_frozen_controller_commits_after_its_time_only_if_it_froze_at_the_very_commit() -> None:
    snapshot = snapshot_of(state(5))

    def act(store: Store) -> None:
        commit_parts(
            store, snapshot, 5, write_parts(store, snapshot, 5, attempt="i0-5", world_size=1), attempt="i0-5"
        )

    outcomes = frozen_outcomes(act, committed_steps)
    assert sum(before != after for before, after in outcomes) == 1 and len(outcomes) > 8


def test_a_frozen_controller_deletes_after_its_time_one_checkpoint_at_most() -> None:
    def act(store: Store) -> None:
        prune(store, Retention(keep_last=1), incarnation=0)

    outcomes = frozen_outcomes(act, committed_steps)
    assert {len(before) - len(after) for before, after in outcomes} == {0, 1}
    assert all(4 in after for _, after in outcomes)


def test_parts_that_cover_the_state_are_enough() -> None:
    store = small("memory://quorum")
    snapshot = snapshot_of(state(1))
    of_three = write_parts(store, snapshot, 1, world_size=3)
    # The third replica died; two others divided its chunks between them.
    whole = write_parts(store, snapshot, 1, world_size=4, attempt="i0-0", ranks=[]) or of_three
    with pytest.raises(CheckpointIncomplete, match="missing"):
        commit_parts(store, snapshot, 1, whole[:2])
    assert committed_steps(store) == []
    spare = replace(of_three[2], rank=7)
    manifest = commit_parts(store, snapshot, 1, [of_three[0], spare, of_three[1], of_three[2]])
    assert value_at(store, manifest) == 1


def test_parts_that_overlap_by_whole_chunks_are_taken_once() -> None:
    store = small("memory://overlap")
    snapshot = snapshot_of(state(1))
    first = write_parts(store, snapshot, 1, world_size=1)
    again = [replace(one, rank=9) for one in first]
    assert value_at(store, commit_parts(store, snapshot, 1, first + again)) == 1


@pytest.mark.parametrize(
    "change",
    [{"step": 2}, {"generation": 9}, {"attempt": "i0-5"}, {"table": "0" * 16}],
    ids=lambda change: next(iter(change)),
)
def test_parts_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    store = small("memory://foreign")
    snapshot = snapshot_of(state(1))
    parts = write_parts(store, snapshot, 1)
    with pytest.raises(CheckpointIncomplete, match="rank 2"):
        commit_parts(store, snapshot, 1, [*parts[:2], replace(parts[2], **change)])


def test_a_part_whose_object_is_not_there_is_not_committed() -> None:
    store = small("memory://gone")
    snapshot = snapshot_of(state(1))
    parts = write_parts(store, snapshot, 1)
    store.put(parts[1].objects[0].key, b"short")
    with pytest.raises(CheckpointIncomplete, match="has 5 bytes"):
        commit_parts(store, snapshot, 1, parts)
    store.delete([parts[1].objects[0].key])
    with pytest.raises(CheckpointIncomplete, match="is missing"):
        commit_parts(store, snapshot, 1, parts)
    assert committed_steps(store) == []


def test_retention_keeps_the_last_the_every_the_pinned_and_the_base_of_a_live_attempt() -> None:
    store = small("memory://keep")
    for step in range(1, 11):
        save(store, state(step), step, attempt=f"i0-{step}", world_size=1)
    pin(store, 3)
    live = [LiveAttempt(11, "i0-11", base_step=2)]
    pruned = prune(store, Retention(keep_last=2, keep_every=5), incarnation=0, live=live, grace_s=1e6)
    assert committed_steps(store) == [10, 9, 5, 3, 2] and sorted(pruned.steps) == [1, 4, 6, 7, 8]
    # What was deleted with its checkpoint needs no grace.
    assert {info.key.split("/")[1] for info in store.listing("steps/")} == {"10", "9", "5", "3", "2"}
    assert pruned.num_bytes == sum(1 for _ in pruned.objects) * (pruned.num_bytes // len(pruned.objects))
    assert [listed.step for listed in catalog.list_checkpoints(store) if listed.pinned] == [3]
    unpin(store, 3)
    prune(store, Retention(keep_last=1), incarnation=0)
    assert committed_steps(store) == [10]
    prune(store, Retention(keep_last=1), incarnation=0)
    assert newest_value(store)[0] == 10


def test_what_a_live_attempt_or_a_newer_incarnation_writes_is_left_alone() -> None:
    store = small("memory://live")
    save(store, state(1), 1)
    snapshot = snapshot_of(state(2))
    for attempt in ("i0-1", "i0-2", "i3-0"):
        write_parts(store, snapshot, 2, attempt=attempt, world_size=1)
    write_parts(store, snapshot, 3, attempt="i0-1", world_size=1)  # of the same generation, and given up
    foreign = ["steps/2/i00-1/x", "steps/2/readme", "steps/2/i0-1/sub/x", "other"]
    for key in foreign:
        store.put(key, b"?")
    pruned = prune(store, Retention(), incarnation=0, live=[LiveAttempt(2, "i0-1")], grace_s=-1)
    assert pruned.objects == ("steps/2/i0-2/r0000.safetensors", "steps/3/i0-1/r0000.safetensors")
    assert {info.key for info in store.listing("")} >= {
        *foreign,
        "steps/2/i0-1/r0000.safetensors",
        "steps/2/i3-0/r0000.safetensors",
    }
    assert not store.listing("probe/")


def test_what_killed_writers_of_records_and_preflights_left_is_cleared(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    save(store, state(1), 1)
    store.put("probe/x", b"?")
    for key in (
        "commits/2.json",
        "incarnations/7",
        "elsewhere/x",
        "steps/2/i0-1/manifest.json",
        "steps/2/i5-0/x",
    ):
        store.writer(key, 1)  # never ended
    assert prune(store, Retention(), incarnation=0).uploads == 0 and len(store.listing("probe/")) == 1
    assert prune(store, Retention(), incarnation=0, grace_s=-60).uploads == 3 and not store.listing("probe/")
    assert {one.key for one in store.unfinished()} == {"elsewhere/x", "steps/2/i5-0/x"}
    assert newest_value(store)[0] == 1


def test_a_young_orphan_is_left_alone() -> None:
    store = small("memory://young")
    save(store, state(1), 1)
    write_parts(store, snapshot_of(state(2)), 2, attempt="i0-1", world_size=1)
    assert prune(store, Retention(), incarnation=0).objects == ()


def test_a_damaged_checkpoint_stays_and_its_data_too() -> None:
    store = small("memory://damaged")
    base = save(store, state(1), 1)
    for step in (2, 3):
        save(store, state(step), step, attempt=f"i0-{step}", previous=base)
    write_parts(store, snapshot_of(state(9)), 9, attempt="i0-9")
    manifest = store.get("steps/2/i0-2/manifest.json", 1 << 20)
    store.put("steps/2/i0-2/manifest.json", manifest[:-1])
    before = {info.key for info in store.listing("steps/")}
    pruned = prune(store, Retention(keep_last=1), incarnation=0, grace_s=-1)
    # Step 1 is no checkpoint any more, but nobody knows which of its data step 2 needs.
    assert pruned.data_kept and len(pruned.kept_damaged) == 1 and committed_steps(store) == [3, 2]
    assert {info.key for info in store.listing("steps/")} == before - {"steps/1/i0-0/manifest.json"}
    store.put("steps/2/i0-2/manifest.json", manifest)
    assert value_at(store, open_checkpoint(store, 2)) == 2
    # With a readable manifest its data stays, and other data can go.
    missing = next(held.key for held in open_checkpoint(store, 2).objects if "/2/" in held.key)
    store.delete([missing])
    pruned = prune(store, Retention(keep_last=1), incarnation=0, grace_s=-1)
    assert not pruned.data_kept and len(pruned.kept_damaged) == 1
    assert not store.listing("steps/9/") and store.listing("steps/2/") and newest_value(store)[0] == 3
    commit.retire(store, 2, "damaged", 0)
    prune(store, Retention(keep_last=1), incarnation=0, grace_s=-1)
    assert not store.listing("steps/2/") and newest_value(store)[0] == 3


def test_many_controllers_that_commit_one_step_at_once_make_one_checkpoint() -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = small("memory://race")

    def one(number: int) -> str:
        try:
            return save(store, state(1), 1, attempt=f"i0-{number}", world_size=1).attempt
        except AlreadyCommitted:
            return ""

    with ThreadPoolExecutor(8) as threads:
        winners = [attempt for attempt in threads.map(one, range(8)) if attempt]
    assert winners == [open_checkpoint(store, 1).attempt] and newest_value(store)[0] == 1


def test_a_new_place_has_no_checkpoint_and_says_so(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    assert newest_whole(store) == Choice(None, ()) and committed_steps(store) == []
    with pytest.raises(StoreUnusable):
        open_store("relative/path")
