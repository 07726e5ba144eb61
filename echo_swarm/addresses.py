"""Multiaddresses that people write into settings and flags, checked before anything is started with them."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from echo_swarm.wire import Address

EXAMPLE = "/ip4/0.0.0.0/tcp/21000"
_FORM = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]+)/(tcp|udp)/(\d{1,5})((?:/[^/\s]+)*)")


def multiaddress(text: str) -> str:
    """Return `text`. Raises ValueError unless it names a machine and a port."""
    found = _FORM.fullmatch(text)
    if found is None or int(found[4]) > 65_535 or not _is_host(found[1], found[2]):
        raise ValueError(f"{text!r} is no multiaddress such as {EXAMPLE}")
    return text


def listen_address(text: str) -> str:
    """Return `text`. Raises ValueError unless one can listen there: on an address of this machine, as nobody."""
    kind = multiaddress(text).split("/")[1]
    if kind not in ("ip4", "ip6"):
        raise ValueError(f"{text!r} is a name; listen on an address such as {EXAMPLE}")
    if "/p2p/" in text:
        raise ValueError(f"{text!r} names a peer; listen on an address such as {EXAMPLE}")
    return text


def peer_address(text: str) -> str:
    """Return `text`. Raises ValueError unless it is a multiaddress that ends in a peer id."""
    if not re.search(r"/p2p/\w+$", multiaddress(text)):
        raise ValueError(f"{text!r} does not end in /p2p/<peer id>")
    return text


def network_of(address: str) -> str:
    """Return what machines that share a connection have in common: an IPv4 address, or the /64 of an IPv6 one.

    Empty for what says nothing about who is there: loopback, relays, names, and what is no multiaddress.
    """
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return ""
    try:
        found = ipaddress.ip_address(parts[2].partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    if found.is_loopback:
        return ""
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", host) is not None
    try:
        (ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address)(host)
    except ValueError:
        return False
    return True


Multiaddress = Annotated[Address, AfterValidator(multiaddress)]
ListenAddress = Annotated[Address, AfterValidator(listen_address)]
PeerAddress = Annotated[Address, AfterValidator(peer_address)]
