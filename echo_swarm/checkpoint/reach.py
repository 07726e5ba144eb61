"""How near addresses are, and how near those may be that others name: no nearer than the run itself.

A run's manifest names mirrors, mirrors redirect, and peers say where they and others can be dialled. None of these may
lead into the networks of the machine that dials (`docs/adr/0023-near-addresses.md`). Of mirrors the address counts that
is dialled, after names were resolved; names that peers give are not dialled at all.
"""

from collections.abc import Iterable
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from echo_swarm.identity import PeerId

_EMBEDDING = ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "::ffff:0:0:0/96")
"""IPv6 networks whose addresses stand for IPv4 ones: NAT64, 6to4, Teredo, compatible and translated addresses."""
_METADATA = (
    "168.63.129.16/32",
    "192.0.0.192/32",
    "100.100.100.200/32",
    "fd00:ec2::/32",
    "fd20:ce::/32",
    "fd00:42::/32",
)
"""Where clouds answer their own machines with credentials, beside link-local addresses: Azure, Oracle, Alibaba, AWS,
Google, Scaleway."""
_LINK_LOCAL_METADATA = ("169.254.169.254", "169.254.170.2", "fe80::a9fe:a9fe")
_NOWHERE = ("0.0.0.0/8", "192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "2001:10::/28", "3fff::/20", "5f00::/16")
"""No hosts of the Internet, whatever the version of Python says of them: this network, protocol assignments, 6to4's
relays, site-local addresses, ORCHID, documentation, segment routing."""
_NEVER_4 = tuple(IPv4Network(net) for net in (*_METADATA, *_NOWHERE) if "." in net)
_NEVER_6 = tuple(IPv6Network(net) for net in (*_EMBEDDING, *_METADATA, *_NOWHERE) if "." not in net)
_UNICAST_6 = IPv6Network("2000::/3")
"""All that was ever given out to hosts of the Internet."""
_ISATAP = (0x00005EFE, 0x02005EFE)
"""The upper half of an interface identifier whose lower half is an IPv4 address."""


class Reach(IntEnum):
    """How near an address is. Who allows one allows those before it."""

    GLOBAL = 0
    PRIVATE = 1
    LOOPBACK = 2
    NEVER = 3
    """Link-local and metadata services of clouds, multicast, reserved, and what embeds an IPv4 address."""


def reach_of(text: str) -> Reach:
    """Return the reach of an IP address; NEVER for what is none, or stands for another in a way that hides it."""
    try:
        address = ip_address(text.split("%")[0])
    except ValueError:
        return Reach.NEVER
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return Reach.LOOPBACK
    if isinstance(address, IPv4Address):
        never, outside = any(address in network for network in _NEVER_4), False
    else:
        never = any(address in network for network in _NEVER_6) or int(address) >> 32 & 0xFFFFFFFF in _ISATAP
        outside = address not in _UNICAST_6
    if never or address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        return Reach.NEVER
    return Reach.GLOBAL if address.is_global and not outside else Reach.PRIVATE


def reach_of_run(bootstrap: Iterable[str]) -> Reach:
    """Return how near mirrors and peers of a run may be: as near as the farthest of its bootstrap multiaddresses.

    A run with one public address, or a name, has public mirrors; one on loopback (a test) may have them there.
    """
    found = Reach.LOOPBACK
    for address in bootstrap:
        _, kind, host, *_ = address.split("/", 3) if address.count("/") > 2 else ("", "", "")
        reach = reach_of(host) if kind in ("ip4", "ip6") else Reach.GLOBAL
        found = min(found, Reach.GLOBAL if reach is Reach.NEVER else reach)
    return found


def nearness(address: str | None) -> Reach:
    """Return how near an address must be, rising: anywhere, in the same private network, on this machine, nowhere.

    Names, and whatever else begins with no plain IP address, are nowhere.
    """
    parts = (address or "").split("/")
    if len(parts) > 1 and parts[1] == "memory":
        return Reach.GLOBAL  # A network inside this process.
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return Reach.NEVER
    try:
        ip = ip_address(parts[2].partition("%")[0])
    except ValueError:
        return Reach.NEVER
    if ip.is_unspecified:
        return Reach.LOOPBACK
    if ip.is_link_local and str(ip) not in _LINK_LOCAL_METADATA:
        return Reach.PRIVATE  # Machines on one cable without a router find each other there.
    return reach_of(str(ip))


def near_enough(addresses: Iterable[str], near: Reach, *, names: bool = False) -> list[str]:
    """Return those of some multiaddresses that are no nearer than `near`; `names`: and those that begin with a name."""
    return [a for a in addresses if nearness(a) <= near or (names and a.startswith("/dns"))]


def nearest(addresses: Iterable[str | None]) -> Reach:
    """Return how near addresses may be for one that is known at these: as near as the farthest of them.

    Who is known by a name, which the run's owner or this machine's gave, counts as far away.
    """
    known = list(addresses)
    if any(not (address or "").startswith(("/ip4/", "/ip6/")) for address in known):
        return Reach.GLOBAL
    return min((near for near in map(nearness, known) if near != Reach.NEVER), default=Reach.GLOBAL)


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
