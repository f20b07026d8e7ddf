"""Which of its own addresses a machine uses for the run. Used by replicas and controller; light to import."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

from everstep.errors import CannotStart


def address_in(network: str | None) -> str | None:
    """This machine's own address in a CIDR network; None without one. Raises CannotStart if it has none there."""
    if network is None:
        return None
    wanted = ipaddress.ip_network(network)
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(address.address.split("%")[0]) in wanted:
                    return str(address.address)
    raise CannotStart(f"RunConfig.network={network!r}, but {socket.gethostname()} has no address in it")
