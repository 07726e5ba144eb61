"""Which HTTP servers a node asks."""

import pytest

from echo_swarm.checkpoint.reach import Reach, is_mirror_url, reach_of, reach_of_run


def test_how_near_a_mirror_may_be_follows_from_the_bootstrap():
    assert reach_of_run(["/ip4/127.0.0.1/tcp/1/p2p/x"]) is Reach.LOOPBACK
    assert reach_of_run(["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/192.168.1.4/tcp/1/p2p/x"]) is Reach.PRIVATE
    assert reach_of_run(["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/8.8.8.8/tcp/1/p2p/x"]) is Reach.GLOBAL
    assert reach_of_run(["/dns4/run.example.org/tcp/1/p2p/x"]) is Reach.GLOBAL
    assert reach_of_run(["/ip4/169.254.1.1/tcp/1/p2p/x", "nonsense"]) is Reach.GLOBAL


def test_addresses_that_are_never_asked():
    for address in (
        "169.254.169.254",
        "fe80::1%eth0",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "255.255.255.255",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::7f00:1",
        "nonsense",
        "",
        # Metadata and platform services of clouds: Azure, Oracle, Alibaba, AWS, Google, Scaleway.
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "192.0.0.192",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fd00:42::42",
        # IPv4 addresses in IPv6 ones: NAT64, Teredo, compatible, translated, ISATAP.
        "64:ff9b:1::a00:1",
        "2001:0:102:304::f5ff:fffe",
        "::10.0.0.1",
        "::ffff:0:10.0.0.1",
        "2a00:1:2:3:0:5efe:10.0.0.1",
        "2a00:1:2:3:200:5efe:10.0.0.1",
        # No hosts of the Internet.
        "0.1.2.3",
        "192.0.0.9",
        "192.88.99.1",
        "fec0::1",
        "feff::1",
        "2001:10::1",
        "3fff::1",
        "5f00::1",
        "ff02::1",
    ):
        assert reach_of(address) is Reach.NEVER, address
    for address in ("2001:db8::1", "198.18.0.1", "203.0.113.5", "fc00::1", "2001:2::1", "172.31.0.1"):
        assert reach_of(address) is Reach.PRIVATE, address
    for address in ("168.63.129.17", "2a00:1450:4001:82a::200e", "2620:fe::fe"):
        assert reach_of(address) is Reach.GLOBAL, address
    assert reach_of("::ffff:127.0.0.1") is Reach.LOOPBACK and reach_of("::1") is Reach.LOOPBACK
    assert reach_of("::ffff:10.0.0.1") is Reach.PRIVATE and reach_of("fd00::1") is Reach.PRIVATE
    assert reach_of("100.64.0.1") is Reach.PRIVATE
    assert reach_of("1.1.1.1") is Reach.GLOBAL and reach_of("2606:4700::1111") is Reach.GLOBAL


@pytest.mark.parametrize("url", ["https://files.example.org/echo", "http://10.0.0.1:8080", "http://[::1]:80/a/b"])
def test_plain_urls_are_mirrors(url):
    assert is_mirror_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://x/",
        "https://user:pass@x/",
        "https://x/?a=b",
        "https://x/?",
        "https://x/#a",
        "https://",
        "x",
        "//x/",
        "https://x:99999/",
        "https://x:0/",
        "https://x y/",
        "https://x\\y/",
        "https://x/\r\nHost: y",
        "https://é/",
        "http://[",
    ],
)
def test_others_are_not(url):
    assert not is_mirror_url(url)
