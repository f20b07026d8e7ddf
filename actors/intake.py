"""How a joiner takes the state in: room for it while the replica warms up, then the transfer from its peers.

Made by the session, for its training thread. The transfer itself is `actors.transfer`'s.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from everstep.actors.transfer import Fetch, FetchResult, ask_shape
from everstep.errors import StateError, StateMismatch

if TYPE_CHECKING:
    from everstep.actors.member import Member
    from everstep.actors.order import Order
    from everstep.actors.registry import Registry

_log = logging.getLogger(__name__)
_DEADLINE_S = 600.0


class Intake:
    """One per session."""

    def __init__(self, member: Member, registry: Registry) -> None:
        self._member, self._registry = member, registry
        self._fetch: Fetch | None = None

    def make_room(self) -> None:
        """Allocate what will be received now, while nobody waits for it; as the peers' state is, if they can tell."""
        shape = ask_shape(self._member.peers, self._token())
        if shape is None:
            return
        fetch = Fetch("", self._registry.state, self._token())
        try:
            fetch.prepare(shape)
        except (StateError, StateMismatch) as error:
            _log.warning("room for the state of the peers cannot be made: %s", error)
        else:
            self._fetch = fetch

    def fetch(self, order: Order) -> FetchResult:
        """Put the state with which the order's generation begins into the live objects.

        What a former order has received of the same state is kept. Raises TransferFailed, StateMismatch.
        """
        generation = order.generation
        if self._fetch is None:
            self._fetch = Fetch(generation.version, self._registry.state, self._token())
        elif self._fetch.version != generation.version:
            self._fetch.retarget(generation.version)
        sources = [a for a in generation.sources if a != self._member.identity.transfer]
        result = self._fetch.run(
            sources, order.cancel, _DEADLINE_S, moved=partial(self._member.moved, "fetch")
        )
        self._fetch.load()
        self._fetch = None
        return result

    def _token(self) -> bytes:
        return self._member.identity.token.encode()
