"""The coordinator's side of the trainer process. No torch.

    async with start_trainer(config, run_dir, log_path) as trainer:
        trainer.ready.policy_version ...
        result = await trainer.train(batch_path, timeout_s=600)

Leaving the block ends every rank: a `stop` when idle, signals otherwise.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import anyio
from anyio.abc import Process

from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues, pack_job, unpack_values
from echo_coordinator.trainer.settings import TrainerConfig
from echo_swarm import codec
from echo_swarm.checkpoint.files import make_folder
from echo_swarm.child_log import log_variables, open_log
from echo_swarm.children import FRAME_LIMITS, describe_exit, last_line
from echo_swarm.errors import BackendFailed, MalformedMessage

_LENGTH = struct.Struct("<I")
_MAX_SOCKET_PATH = 100
"""The kernel allows 107 bytes on Linux and 103 on macOS."""


class BatchRefused(BackendFailed):
    """The trainer cannot use this batch. Nothing changed, and it waits for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Where the trainer stands when it starts."""

    update: int
    policy_version: int
    checkpoint: str
    """Folder name inside the checkpoint folder."""
    weights_path: Path
    """safetensors in the published precision."""
    parameters: int
    warnings: tuple[str, ...]
    """About checkpoints that had to be passed over, for people."""
    consumed_groups: tuple[int, ...]
    """Ids of the groups that the last update consumed."""
    data_position: dict[str, Any]
    """As it came with the last batch; empty before the first."""
    rolled_back_to: int | None = None
    """The version whose weights these are again; None when an update made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One update is done and durable."""

    update: int
    policy_version: int
    """The new one."""
    checkpoint: str
    weights_path: Path
    metrics: dict[str, Any]
    """See `metrics.report`."""


class TrainerClient:
    """A running trainer. One task calls it."""

    def __init__(self, process: Process, connection: socket.socket, log_path: Path) -> None:
        self.log_path = log_path
        self.busy = False
        """A batch is being trained."""
        self._process = process
        self._connection = connection
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        """What it said first."""
        assert self._ready is not None
        return self._ready

    @property
    def pid(self) -> int:
        """Process id of the one rank, or of the launcher of several."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def train(self, batch_path: Path, *, timeout_s: float) -> Trained:
        """Train on the batch file and wait until the new version is durable. After a cancellation, leave the block.

        Raises:
            BatchRefused: it cannot be trained; the trainer lives on.
            BackendFailed: the trainer ended, or gave no answer for `timeout_s`; leave the block and start another.

        """
        self.busy = True
        await self._send(_train_command(batch_path))
        answer = await self._receive(timeout_s)
        self.busy = False
        if answer.get("op") == "failed":
            raise BatchRefused(f"the trainer refused the batch: {answer.get('reason')}")
        return Trained(
            update=answer["update"],
            policy_version=answer["policy_version"],
            checkpoint=answer["checkpoint"],
            weights_path=Path(answer["weights_path"]),
            metrics=answer["metrics"],
        )

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        """Have texts scored by the weights of now. After a cancellation, leave the block.

        Raises:
            ProbeRefused: it cannot score these; the trainer lives on.
            BackendFailed: as `train`.

        """
        self.busy = True
        await self._send(pack_job(job))
        answer = await self._receive(timeout_s)
        self.busy = False
        return unpack_values(answer)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the first message. Raises BackendFailed with the trainer's own words."""
        answer = await self._receive(timeout_s)
        self._ready = Ready(
            update=answer["update"],
            policy_version=answer["policy_version"],
            checkpoint=answer["checkpoint"],
            weights_path=Path(answer["weights_path"]),
            parameters=answer["parameters"],
            warnings=tuple(answer["warnings"]),
            consumed_groups=tuple(answer["consumed_groups"]),
            data_position=answer["data_position"],
            rolled_back_to=answer["rolled_back_to"],
        )

    async def end(self, grace_s: float) -> None:
        """Stop it, in the end by force."""
        if not self.busy and self._process.returncode is None:
            with contextlib.suppress(BackendFailed), anyio.move_on_after(grace_s):
                await self._send({"op": "stop"})
                await self._process.wait()
        self._connection.close()
        await end_process(self._process)

    async def _send(self, message: dict[str, Any]) -> None:
        body = codec.encode(message, canonical=False)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while data:
                await anyio.wait_writable(self._connection)
                data = data[self._connection.send(data) :]
        except OSError as e:
            raise await failure(self._process, self.log_path) from e

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            with anyio.fail_after(timeout_s):
                (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
                if length > FRAME_LIMITS.max_bytes:
                    raise BackendFailed(f"the trainer sent a frame of {length} bytes; see {self.log_path}")
                answer: dict[str, Any] = codec.decode(await self._exactly(length), FRAME_LIMITS, canonical=False)
        except TimeoutError as e:
            raise BackendFailed(f"the trainer gave no answer for {timeout_s:.0f} s; see {self.log_path}") from e
        except MalformedMessage as e:
            raise BackendFailed(f"the trainer sent what cannot be read ({e}); see {self.log_path}") from e
        except (OSError, EOFError) as e:
            raise await failure(self._process, self.log_path) from e
        if answer.get("fatal"):
            raise BackendFailed(f"the trainer failed: {answer.get('reason')} (log: {self.log_path})")
        return answer

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            await anyio.wait_readable(self._connection)
            piece = self._connection.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


@asynccontextmanager
async def start_trainer(
    config: TrainerConfig, run_dir: Path, log_path: Path, *, start_timeout_s: float = 300.0, grace_s: float = 20.0
) -> AsyncGenerator[TrainerClient]:
    """Run a trainer for the length of the block; inside it, the trainer has loaded its checkpoint and is ready.

    Writes `run_dir/trainer.json`; the trainer's output is appended to `log_path`.

    Raises:
        BackendFailed: it did not start, with its own words; nothing is left running.

    """
    config_path = _write_config(config, run_dir)
    with _socket_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = f"{folder}/s"
        listener.bind(path)
        listener.listen(1)
        listener.setblocking(False)
        process = await _spawn(config_path, path, log_path)
        client: TrainerClient | None = None
        try:
            connection = await _accept(listener, process, log_path, start_timeout_s)
            client = TrainerClient(process, connection, log_path)
            client.busy = True
            await client.wait_ready(start_timeout_s)
            client.busy = False
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await (client.end(grace_s) if client else end_process(process))


async def failure(process: Process, log_path: Path) -> BackendFailed:
    """Return the error for a trainer that closed its socket, with its exit and its last words."""
    code: int | None = None
    with anyio.move_on_after(5):
        code = await process.wait()
    how = "closed its socket" if code is None else f"ended with {describe_exit(code)}"
    last = last_line(log_path)
    return BackendFailed(f"the trainer {how}{f': {last}' if last else ''} (log: {log_path})")


async def end_process(process: Process) -> None:
    """End the process and its group: asked first, killed after three seconds. Ranks elsewhere die with it."""
    for sign, wait_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
        # Also when the leader is gone: others of its group may not be.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with anyio.move_on_after(wait_s):
            await process.wait()


def _train_command(batch_path: Path) -> dict[str, Any]:
    return {"op": "train", "batch_path": str(batch_path.absolute())}


def _write_config(config: TrainerConfig, run_dir: Path) -> Path:
    make_folder(run_dir)
    path = run_dir / "trainer.json"
    path.write_text(config.model_dump_json(indent=1), encoding="utf-8")
    return path


async def _spawn(config_path: Path, socket_path: str, log_path: Path) -> Process:
    command = [sys.executable, "-m", "echo_coordinator.trainer.launch"]
    with open_log(log_path) as log:
        try:
            return await anyio.open_process(
                [*command, "--config", str(config_path), "--socket", socket_path],
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env={**os.environ, "ECHO_PARENT_PID": str(os.getpid()), **log_variables(log_path)},
            )
        except OSError as e:
            raise BackendFailed(f"cannot start the trainer: {e}") from e


async def _accept(listener: socket.socket, process: Process, log_path: Path, timeout_s: float) -> socket.socket:
    """Wait until rank 0 connects, the process ends, or time is up."""
    connection: socket.socket | None = None
    with anyio.move_on_after(timeout_s) as deadline:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await process.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await anyio.wait_readable(listener)
            connection, _ = listener.accept()
            tasks.cancel_scope.cancel()
    if connection is None:
        if deadline.cancelled_caught:
            raise BackendFailed(f"the trainer did not connect within {timeout_s:.0f} s; see {log_path}")
        raise await failure(process, log_path)
    connection.setblocking(False)
    return connection


@contextlib.contextmanager
def _socket_folder() -> Generator[str]:
    """Give a private folder (mode 0700) whose path is short enough for a unix socket."""
    base = None if len(tempfile.gettempdir().encode()) < _MAX_SOCKET_PATH - 24 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="echo-", dir=base) as folder:
        yield folder
