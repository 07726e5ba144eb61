"""Hosts with links of a known rate: network namespaces joined by one bridge.

    host 0 (coordinator) ──veth──┐
    host 1 ──────────────────────┤ bridge, in a namespace of its own
    host N ──────────────────────┘
    tbf on both ends of each veth: the host's end is its uplink, the bridge's end its downlink

Needs root. Nothing is touched outside the namespaces, whose names carry this process' id: those of a process that
was killed are removed by the next one.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

PREFIX = "echo-bench"
BURST = "32kb"
CONGESTION_CONTROL = "cubic"
"""Of TCP on all hosts: what home machines have, whatever this one's default is."""
QUEUE = "100ms"
"""What waits for a link at most, as in a home router."""
COMMAND_S = 30.0


def lacking() -> str:
    """Return what is missing for making links, or nothing."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "root (for network namespaces)"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} (iproute2)" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one host has sent and received since it exists, bytes on the wire."""

    sent: int
    received: int


class Net:
    """The hosts. Obtained from `open_net`."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._pid = os.getpid()

    def name(self, host: int) -> str:
        """Name of a host's namespace; -1 is the bridge's."""
        return f"{PREFIX}-{self._pid}-{'bridge' if host < 0 else host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Return what to put in front of a command, so that it runs on a host. The process id stays the same."""
        return ["ip", "netns", "exec", self.name(host)]

    def make(self) -> None:
        """Make bridge and hosts."""
        for host in range(-1, self.hosts):
            _run("ip", "netns", "add", self.name(host))
            _run("ip", "-n", self.name(host), "link", "set", "lo", "up")
        bridge = self.name(-1)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for host in range(self.hosts):
            here, port = self.name(host), f"port{host}"
            _run("ip", "link", "add", port, "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", here)
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", here, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", here, "link", "set", "eth0", "up")
            near = ["10.77.0.0/24", "dev", "eth0", "proto", "kernel", "scope", "link", "src", self.address(host)]
            _run("ip", "-n", here, "route", "replace", *near, "congctl", CONGESTION_CONTROL)
            _run("ip", "-n", here, "route", "add", "default", "via", self.address(0 if host else 1))

    def shape(self, rate_mbit: float | None) -> None:
        """Give every link a rate in each direction; None: as fast as the machine is."""
        for host in range(self.hosts):
            for namespace, device in ((self.name(host), "eth0"), (self.name(-1), f"port{host}")):
                where = ["tc", "-n", namespace, "qdisc"]
                if rate_mbit is None:
                    subprocess.run([*where, "del", "dev", device, "root"], capture_output=True, check=False)
                else:
                    rate = f"{rate_mbit * 1000:.0f}kbit"
                    shaped = ["root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
                    _run(*where, "replace", "dev", device, *shaped)

    def traffic(self) -> list[Traffic]:
        """Return each host's counters, in order."""
        found: list[Traffic] = []
        for host in range(self.hosts):
            (link,) = json.loads(_run("ip", "-n", self.name(host), "-s", "-j", "link", "show", "eth0"))
            counters = link["stats64"]
            found.append(Traffic(sent=counters["tx"]["bytes"], received=counters["rx"]["bytes"]))
        return found

    def remove(self) -> None:
        """Remove everything; the processes inside should have ended."""
        for host in range(-1, self.hosts):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True, check=False)


@contextmanager
def open_net(hosts: int) -> Generator[Net]:
    """Make `hosts` hosts for the length of the block, and remove what killed benchmarks left behind."""
    sweep()
    net = Net(hosts)
    try:
        net.make()
        yield net
    finally:
        net.remove()


def sweep() -> None:
    """Remove the namespaces of benchmarks that no longer run."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"({PREFIX}-(\d+)-\S+)", line)
        if found and not psutil.pid_exists(int(found[2])):
            subprocess.run(["ip", "netns", "del", found[1]], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
