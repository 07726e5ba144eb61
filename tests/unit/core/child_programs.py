"""What the children of test_children.py do: `python -m child_programs <name>`."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio

from echo_swarm import children


def echo() -> None:
    """Answer each frame with itself."""
    reader, writer = children.claim_pipes()
    while (message := children.read_frame(reader)) is not None:
        children.write_frame(writer, message)


def chatty() -> None:
    """Print into the pipe at every turn, through Python and past it."""
    reader, writer = children.claim_pipes()
    while (message := children.read_frame(reader)) is not None:
        print("a stray print", flush=True)
        os.write(1, b"from a C library\n")
        subprocess.run(["echo", "from a grandchild"], check=True)
        children.write_frame(writer, message)


def noisy() -> None:
    """Write numbered lines to stderr, from `start` to `stop` of each frame; a grandchild writes the last one."""
    reader, writer = children.claim_pipes()
    while (message := children.read_frame(reader)) is not None:
        last = message["stop"] - 1
        for line in range(message["start"], last, 100):
            os.write(2, b"".join(b"%09d\n" % i for i in range(line, min(line + 100, last))))
        subprocess.run(["sh", "-c", f"printf '%09d\\n' {last} >&2"], check=True)
        children.write_frame(writer, {"last": last})


def print_first() -> None:
    """Print before the pipes are claimed."""
    print("hello from an import", flush=True)
    echo()


def number() -> None:
    """Send a frame that is no map."""
    _, writer = children.claim_pipes()
    writer.write(b"\x01\x00\x00\x00\x07")
    writer.flush()


def crash() -> None:
    """Fail on the first frame."""
    reader, _ = children.claim_pipes()
    children.read_frame(reader)
    raise RuntimeError("the device is on fire")


def killed() -> None:
    """Be killed on the first frame, as by the kernel when memory runs out."""
    reader, _ = children.claim_pipes()
    children.read_frame(reader)
    os.kill(os.getpid(), signal.SIGKILL)


def silent() -> None:
    """Read and never answer."""
    reader, _ = children.claim_pipes()
    while children.read_frame(reader) is not None:
        pass


def slow() -> None:
    """Send the header of a frame, and its body after a frame has come in."""
    reader, writer = children.claim_pipes()
    body = children.codec.encode({"late": True})
    writer.write(len(body).to_bytes(4, "little"))
    writer.flush()
    children.read_frame(reader)
    writer.write(body)
    writer.flush()
    children.read_frame(reader)


def stubborn() -> None:
    """Start a grandchild, ignore every polite request, and never end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, writer = children.claim_pipes()
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    children.write_frame(writer, {"grandchild": grandchild.pid})
    time.sleep(600)


def busy() -> None:
    """Say hello and never look at the pipe again."""
    _, writer = children.claim_pipes()
    children.write_frame(writer, {"pid": os.getpid()})
    time.sleep(600)


def parent(backend: str, folder: str) -> None:
    """Start `busy` as a child of our own, write its process id to a file, and wait."""

    async def main() -> None:
        path = Path(folder)
        async with children.start_child(__spec__.name, ["busy"], name="busy", log_path=path / "busy.log") as child:
            hello = await child.receive(timeout_s=30)
            (path / "pid.new").write_text(str(hello["pid"]))
            (path / "pid.new").rename(path / "pid")
            await anyio.sleep(600)

    anyio.run(main, backend=backend)


def outlive(folder: str) -> None:
    """Under trio, speak with a child after the worker thread that started it has ended for lack of work."""
    from trio._core import _thread_cache

    _thread_cache.IDLE_TIMEOUT = 2

    async def main() -> None:
        log_path = Path(folder) / "echo.log"
        async with children.start_child(__spec__.name, ["echo"], name="echo", log_path=log_path) as child:
            await child.send({"first": "words"})
            await child.receive(timeout_s=30)
            while threading.active_count() > 1:  # noqa: ASYNC110
                await anyio.sleep(0.02)
            await child.send({"still": "there"})
            print(await child.receive(timeout_s=30))

    anyio.run(main, backend="trio")


if __name__ == "__main__":
    children.die_with_parent()
    globals()[sys.argv[1]](*sys.argv[2:])
