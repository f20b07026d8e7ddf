"""A group that may still be forming, for a replica that has something to compute meanwhile.

Made by the session for each generation that it enters. Whoever needs the group waits for it: connecting is hidden behind
the shards that the replica computes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from everstep.actors.groups.base import Group, Parcel, Work
from everstep.errors import Fenced, GroupBroken


class PendingGroup(Group):
    """Stands for the group that `resolve` waits for; all but `abort`, `close`, `check` and `watch` wait with it.

    `resolve` returns the group, or raises GroupBroken or Fenced when there will be none; it must end by itself when the
    generation is over.
    """

    def __init__(self, rank: int, world_size: int, resolve: Callable[[], Group]) -> None:
        super().__init__(rank, world_size)
        self._resolve = resolve
        self._resolving = threading.Lock()
        self._changed = threading.Lock()  # guards the three below
        self._group: Group | None = None
        self._aborted = False
        self._callback: Callable[[GroupBroken], None] | None = None

    @property
    def ordered_launch(self) -> bool:  # type: ignore[override]
        """The group's own."""
        return self._formed().ordered_launch

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        return self._formed().exchange(sends, receives, channel=channel)

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        return self._formed().all_reduce(tensor, async_op=async_op)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        *, async_op: bool = False,
    ) -> Work | None:  # fmt: skip
        return self._formed().all_to_all(output, input, output_splits, input_splits, async_op=async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        return self._formed().all_gather(output, input, async_op=async_op)

    def settle(self) -> None:
        self._formed().settle()

    def watch(self, callback: Callable[[GroupBroken], None]) -> None:
        with self._changed:
            self._callback, group = callback, self._group
        if group is not None:
            group.watch(callback)

    def check(self) -> None:
        with self._changed:
            group, aborted = self._group, self._aborted
        if aborted:
            raise GroupBroken("the group was aborted")
        if group is not None:
            group.check()

    def abort(self) -> None:
        with self._changed:
            self._aborted, group = True, self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()
        if self._group is not None:
            self._group.close()

    def _formed(self) -> Group:
        with self._resolving:  # several threads may need it first
            group = self._group
            if group is None:
                group = self._wait()
                self._take(group)
        return group

    def _wait(self) -> Group:
        self.check()
        try:
            return self._resolve()
        except Fenced as error:
            raise GroupBroken(str(error)) from error

    def _take(self, group: Group) -> None:
        with self._changed:
            self._group, aborted, callback = group, self._aborted, self._callback
        if aborted:
            group.abort()
        elif callback is not None:
            group.watch(callback)
