"""What a backend's child leaves in its temporary folder goes with it, however it ended."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from echo_node.backends.child import start_backend
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.temporary import MAX_PATH_BYTES, own_temporary_folder
from echo_swarm.errors import BackendFailed

pytestmark = pytest.mark.anyio


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A short folder in place of /tmp."""
    assert tmp_path.exists()  # Made before, so that it lies elsewhere.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def within(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def pid_of_one_that_is_gone() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return ended.pid


async def test_a_killed_childs_folder_is_removed_and_children_use_it(base: Path, tmp_path: Path) -> None:
    with anyio.fail_after(120):
        async with start_backend(ScriptedOptions(), log_path=tmp_path / "log", nice=0) as backend:
            (name,) = within(base)
            folder = base / name
            assert f"TMPDIR={folder}".encode() in environment_of(backend.pid)
            (folder / "vllm_dist_0123").write_text("left")
            os.kill(backend.pid, signal.SIGKILL)
            with pytest.raises(BackendFailed):
                await backend.next_outcome()
        assert within(base) == set()


async def test_what_a_killed_parent_left_is_removed_at_the_next_start_and_nothing_else(base: Path) -> None:
    gone = pid_of_one_that_is_gone()
    ours, others = f"echo-backend-{os.getpid()}-abcdefgh", ("echo-backend-x", "other")
    for name in (f"echo-backend-{gone}-abcdefgh", ours, *others):
        (base / name).mkdir()
    (base / f"echo-backend-{gone}-abcdefgh" / "model").write_text("large")
    async with own_temporary_folder() as variables:
        folder = Path(variables["TMPDIR"])
        assert within(base) == {ours, *others, folder.name}
        # Room for a library's own folder and a socket in it.
        assert len(os.fsencode(folder)) <= MAX_PATH_BYTES < 107 - len("/pymp-12345678/listener-12345678")
    assert folder.name not in within(base)


async def test_where_the_path_would_be_too_long_another_folder_is_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with own_temporary_folder() as variables:
        assert Path(variables["TMPDIR"]).parent == Path("/tmp")
    assert within(long) == set()
