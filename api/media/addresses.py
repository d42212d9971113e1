"""Which hosts a client's link may lead to: a server that fetches for strangers must not expose hosts that only it can reach.

Used by `download.py` in the api process. A name is resolved once, all its addresses are checked, and the connection goes to one
of these addresses, so that a later answer of the name service has no effect.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from api.media.fetch_slots import FetchSlot

_INNER_NETWORKS = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT
            "192.0.0.0/24",
            "192.88.99.0/24",  # 6to4 relays
            "240.0.0.0/4",
            "::/96",  # IPv4 in IPv6, in four notations
            "::ffff:0:0/96",
            "64:ff9b::/96",
            "64:ff9b:1::/48",
            "2001::/32",  # Teredo
            "2002::/16",  # 6to4
            "fc00::/7",
            "fec0::/10",
        ),
    )
)

Address = IPv4Address | IPv6Address


class ForbiddenAddressError(Exception):
    """A host has a forbidden address. The message does not contain the address, which the client may not know."""


class Addresses:
    """`allowed`: networks that are reachable despite the rules (`--allowed-media-networks`)."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = [ip_network(network) for network in allowed]

    def may_reach(self, address: Address) -> bool:
        if any(address in network for network in self._allowed):
            return True
        is_inner = any(address in network for network in _INNER_NETWORKS)
        return address.is_global and not (is_inner or address.is_multicast or address.is_reserved)

    async def resolve(self, host: str, port: int, is_trusted: bool, slot: FetchSlot) -> list[str]:
        """Return all addresses of a host, best first. Raises ForbiddenAddressError if one is forbidden (unless the host is
        trusted), and OSError if there is none. Runs in a thread of `slot`, because the loop has few threads and a slow name
        would delay all."""
        found = await slot.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not addresses:
            raise OSError(f"{host} has no address")
        if not is_trusted and not all(self.may_reach(ip_address(address.partition("%")[0])) for address in addresses):
            raise ForbiddenAddressError
        return addresses
