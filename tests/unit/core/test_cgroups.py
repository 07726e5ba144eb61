"""Limits of cgroups, read from trees as both versions of them lay them out."""

from pathlib import Path

import pytest

from echo_swarm.cgroups import cpu_count, cpu_quota, memory_room_bytes


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "membership"


def test_version_2_gives_the_tightest_limit_on_the_way_up(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/user/app\n")
    write(tmp_path / "user" / "app", memory__max="max", cpu__max="150000 100000")
    write(tmp_path / "user", memory__max="3000", memory__current="1000", memory__stat="anon 5\ninactive_file 100")
    write(tmp_path / "user", cpu__max="100000 100000")
    assert memory_room_bytes(tmp_path, membership) == 2100
    assert cpu_quota(tmp_path, membership) == 1.0
    write(tmp_path / "user", memory__max="900", cpu__max="max 100000")
    assert memory_room_bytes(tmp_path, membership) == 0
    assert cpu_quota(tmp_path, membership) == 1.5


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path, membership: Path) -> None:
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/box\n1:name=systemd:/\n0::/\n")
    write(tmp_path / "memory" / "box", memory__limit_in_bytes=str(1 << 63))
    write(tmp_path / "cpu" / "x", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory_room_bytes(tmp_path, membership) is None and cpu_quota(tmp_path, membership) is None
    write(tmp_path / "memory" / "box", memory__limit_in_bytes="5000", memory__usage_in_bytes="4000")
    write(tmp_path / "memory" / "box", memory__stat="inactive_file 10\ntotal_inactive_file 300")
    write(tmp_path / "cpu" / "x", cpu__cfs_quota_us="50000")
    assert memory_room_bytes(tmp_path, membership) == 1300 and cpu_quota(tmp_path, membership) == 0.5


def test_with_both_at_once_version_2_lies_below_unified(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/\n0::/app\n")
    write(tmp_path / "memory", memory__limit_in_bytes="5000", memory__usage_in_bytes="0")
    write(tmp_path / "unified" / "app", cpu__max="200000 100000")
    assert memory_room_bytes(tmp_path, membership) == 5000 and cpu_quota(tmp_path, membership) == 2.0


def test_a_container_that_sees_its_own_group_as_the_top_finds_its_limit_there(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/docker/0123\n3:cpu:/docker/0123\n")
    write(tmp_path / "memory", memory__limit_in_bytes="5000", memory__usage_in_bytes="1000")
    write(tmp_path / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert memory_room_bytes(tmp_path, membership) == 4000 and cpu_quota(tmp_path, membership) == 3.0


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path, membership: Path) -> None:
    assert memory_room_bytes(tmp_path, membership) is None and cpu_quota(tmp_path, membership) is None
    membership.write_text("nonsense\n0::/app\n7:memory\n")
    write(tmp_path / "app", memory__max="lots", cpu__max="some")
    assert memory_room_bytes(tmp_path, membership) is None and cpu_quota(tmp_path, membership) is None
    assert cpu_count() >= 1
