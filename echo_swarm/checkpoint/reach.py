"""Which HTTP servers may be asked for pieces: plain URLs, and addresses that are no nearer than the run itself.

A run's manifest names mirrors, and mirrors redirect. Neither may lead into the networks of the machine that asks, so
that what counts is the address that is dialled, after names were resolved (`Reach`).
"""

import ipaddress
from collections.abc import Iterable
from enum import IntEnum
from urllib.parse import urlsplit

from echo_swarm.identity import PeerId

_EMBEDDING = tuple(ipaddress.IPv6Network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
"""IPv6 networks whose addresses stand for IPv4 ones."""


class Reach(IntEnum):
    """How near an address is. Who allows one allows those before it."""

    GLOBAL = 0
    PRIVATE = 1
    LOOPBACK = 2
    NEVER = 3
    """Link-local (the metadata services of clouds), multicast, unspecified, reserved."""


def reach_of(text: str) -> Reach:
    """Return the reach of an IP address; NEVER for what is none."""
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return Reach.NEVER
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif any(address in network for network in _EMBEDDING):
            return Reach.NEVER
    if address.is_loopback:
        return Reach.LOOPBACK
    if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        return Reach.NEVER
    return Reach.GLOBAL if address.is_global else Reach.PRIVATE


def reach_of_run(bootstrap: Iterable[str]) -> Reach:
    """Return how near mirrors of a run may be: as near as the farthest of its bootstrap multiaddresses.

    A run with one public address, or a name, has public mirrors; one on loopback (a test) may have them there.
    """
    found = Reach.LOOPBACK
    for address in bootstrap:
        _, kind, host, *_ = address.split("/", 3) if address.count("/") > 2 else ("", "", "")
        reach = reach_of(host) if kind in ("ip4", "ip6") else Reach.GLOBAL
        found = min(found, Reach.GLOBAL if reach is Reach.NEVER else reach)
    return found


def is_mirror(source: PeerId) -> bool:
    """Whether a source of pieces is a mirror, named by its URL; no peer id has these characters."""
    return "://" in source


def is_mirror_url(url: str) -> bool:
    """Whether `url` is a base that may be asked: http or https, a host, and neither user, query nor fragment."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    bare = parts.username is None and parts.password is None and "?" not in url and "#" not in url
    return plain and bare and port_fits and parts.scheme in ("http", "https") and bool(parts.hostname)
