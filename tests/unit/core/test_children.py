"""Child processes, for real: what a parent sees of crash and silence, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import psutil
import pytest

from echo_swarm import codec
from echo_swarm.child_log import MAX_LOG_BYTES, put_aside
from echo_swarm.children import Child, describe_exit, last_line, start_child
from echo_swarm.errors import BackendFailed

pytestmark = pytest.mark.anyio
PATIENCE_S = 120.0


def program(name: str, folder: Path, *, grace_s: float = 5.0) -> AbstractAsyncContextManager[Child]:
    return start_child(
        "child_programs",
        [name],
        name=f"the {name} child",
        log_path=folder / "logs" / f"{name}.log",
        grace_s=grace_s,
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again: what the kernel does to other processes gives us no event to wait for."""
    with anyio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def ended(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody reaps has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_frames_of_any_size_make_the_round_trip(tmp_path: Path) -> None:
    async with program("echo", tmp_path) as child:
        for size in (0, 1, 70_000, 3_000_000):
            message = {"data": os.urandom(size), "ids": codec.pack_u32(range(10)), "nested": [{"a": None}, 1.5, "é"]}
            await child.send(message)
            assert await child.receive(timeout_s=PATIENCE_S) == message
        pid = child.pid
    assert ended(pid)


async def test_concurrent_senders_do_not_mix_their_frames(tmp_path: Path) -> None:
    async with program("echo", tmp_path) as child, anyio.create_task_group() as senders:
        for i in range(20):
            senders.start_soon(child.send, {"number": i, "data": bytes([i]) * 50_000})
        seen = [await child.receive(timeout_s=PATIENCE_S) for _ in range(20)]
        assert sorted(message["number"] for message in seen) == list(range(20))
        assert all(message["data"] == bytes([message["number"]]) * 50_000 for message in seen)


async def test_a_stray_print_in_the_child_goes_to_its_log(tmp_path: Path) -> None:
    async with program("chatty", tmp_path) as child:
        for i in range(3):
            await child.send({"number": i})
            assert await child.receive(timeout_s=PATIENCE_S) == {"number": i}
    log = (tmp_path / "logs" / "chatty.log").read_text()
    assert [log.count(text) for text in ("a stray print", "from a C library", "from a grandchild")] == [3, 3, 3]


@pytest.mark.parametrize("name", ["print_first", "number"])
async def test_what_is_no_frame_is_an_error_that_names_the_log(tmp_path: Path, name: str) -> None:
    async with program(name, tmp_path) as child:
        with pytest.raises(BackendFailed, match=rf"frame.*{name}\.log"):
            await child.receive(timeout_s=PATIENCE_S)


async def test_a_crash_gives_the_last_words_of_the_child(tmp_path: Path) -> None:
    async with program("crash", tmp_path) as child:
        await child.send({})
        with pytest.raises(BackendFailed, match=r"exit code 1: RuntimeError: the device is on fire \(log: "):
            await child.receive(timeout_s=PATIENCE_S)
        with pytest.raises(BackendFailed, match="on fire"):
            # The pipe's buffer may take a few frames before it is known to be broken.
            for _ in range(100):
                await child.send({"data": bytes(100_000)})


async def test_a_killed_child_is_told_apart_by_its_signal(tmp_path: Path) -> None:
    async with program("killed", tmp_path) as child:
        await child.send({})
        with pytest.raises(BackendFailed, match="signal SIGKILL"):
            await child.receive(timeout_s=PATIENCE_S)


async def test_silence_ends_with_the_deadline(tmp_path: Path) -> None:
    async with program("silent", tmp_path) as child:
        await child.send({})
        with pytest.raises(BackendFailed, match="no answer"):
            await child.receive(timeout_s=0.2)


async def test_a_cancelled_receive_loses_nothing(tmp_path: Path) -> None:
    async with program("slow", tmp_path) as child:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_receive, child)
            await until(lambda: child._length is not None)  # pyright: ignore[reportPrivateUsage]
            tasks.cancel_scope.cancel()
        await child.send({"go": "on"})
        assert await child.receive(timeout_s=PATIENCE_S) == {"late": True}


async def _receive(child: Child) -> None:
    await child.receive(timeout_s=PATIENCE_S)


async def test_a_child_that_will_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    async with program("stubborn", tmp_path, grace_s=0.2) as child:
        grandchild = (await child.receive(timeout_s=PATIENCE_S))["grandchild"]
        assert psutil.pid_exists(grandchild)
    assert ended(child.pid)
    await until(lambda: ended(grandchild))


async def test_leaving_by_an_error_or_cancellation_ends_the_child_too(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(LookupError):
        async with program("echo", tmp_path) as child:
            pids.append(child.pid)
            raise LookupError
    with anyio.CancelScope() as scope:
        async with program("echo", tmp_path) as child:
            pids.append(child.pid)
            scope.cancel()
            await anyio.sleep(PATIENCE_S)
    assert [ended(pid) for pid in pids] == [True, True]


async def test_a_child_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    starting = start_child("x", name="the child", log_path=tmp_path / "log", python=str(tmp_path / "no-python"))
    with pytest.raises(BackendFailed, match="cannot start the child"):
        async with starting:
            pass


async def test_a_module_that_does_not_exist_is_an_error_with_its_reason(tmp_path: Path) -> None:
    async with start_child("no_such_module", name="the child", log_path=tmp_path / "log") as child:
        with pytest.raises(BackendFailed, match="No module named no_such_module"):
            await child.receive(timeout_s=PATIENCE_S)


@pytest.fixture
async def orphan_maker(tmp_path: Path, anyio_backend_name: str) -> AsyncGenerator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a busy child of its own: (process, pid of the child)."""
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "child_programs", "parent", anyio_backend_name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        await until(lambda: process.poll() is not None or (tmp_path / "pid").exists())
        yield process, int((tmp_path / "pid").read_text())
    finally:
        process.kill()
        process.wait(timeout=PATIENCE_S)


async def test_a_busy_child_dies_when_its_parent_is_killed(orphan_maker: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child = orphan_maker
    assert psutil.pid_exists(child)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=PATIENCE_S)
    await until(lambda: ended(child))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_under_trio_a_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    # In a process of its own: the test runner drives trio from such threads, so that here they never end.
    command = [sys.executable, "-m", "child_programs", "outlive", str(tmp_path)]
    with anyio.fail_after(PATIENCE_S):
        done = await anyio.run_process(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    assert done.stdout == b"{'still': 'there'}\n"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_exits_are_described_in_words() -> None:
    assert describe_exit(0) == "exit code 0"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(-77) == "signal 77"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_last_line_of_a_log_is_short_and_never_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_line(path) == ""
    path.write_bytes(b"")
    assert last_line(path) == ""
    path.write_bytes(b"first\n" + b"\xff" * 10_000 + b"\n  last words \n\n \n")
    assert last_line(path) == "last words"
    path.write_bytes(b"x" * 10_000)
    assert last_line(path) == "x" * 300


async def test_a_log_that_has_grown_large_is_put_aside_when_the_child_starts(tmp_path: Path):
    log = tmp_path / "logs" / "echo.log"
    log.parent.mkdir()
    log.write_bytes(bytes(MAX_LOG_BYTES + 1))
    async with program("echo", tmp_path):
        assert log.stat().st_size < MAX_LOG_BYTES
        assert log.with_name("echo.log.1").stat().st_size == MAX_LOG_BYTES + 1


async def test_a_log_that_grows_while_the_child_runs_is_put_aside_again_and_again(tmp_path: Path):
    """What is kept is the end of what was written, in order, whichever process of the family wrote it."""
    log, lines = tmp_path / "logs" / "noisy.log", 600_000
    async with program("noisy", tmp_path) as child:
        for part in range(4):
            await child.send({"start": part * lines, "stop": (part + 1) * lines})
            await child.receive(timeout_s=PATIENCE_S)
            await until(lambda: log.stat().st_size <= MAX_LOG_BYTES)
    kept = [int(line) for line in (log.with_name("noisy.log.1").read_text() + log.read_text()).split()]
    assert kept == sorted(kept) and kept[-1] == 4 * lines - 1 and lines <= len(kept) < 4 * lines
    assert {path.name for path in log.parent.iterdir()} == {"noisy.log", "noisy.log.1"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_log_of_another_file_is_left_alone_and_one_that_cannot_be_copied_is_emptied(tmp_path: Path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for path in (mine, other):
        path.write_bytes(bytes(100))
    with mine.open("ab") as file:
        assert not put_aside(other, file.fileno(), 50) and not put_aside(mine, file.fileno(), 100)
        (tmp_path / "mine.1").mkdir()
        with pytest.raises(OSError, match=r"mine\.1"):
            put_aside(mine, file.fileno(), 50)
    assert (mine.stat().st_size, other.stat().st_size) == (0, 100)
