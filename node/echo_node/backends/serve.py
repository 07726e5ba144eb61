"""The backend child: `python -m echo_node.backends.serve ENGINE OPTIONS_JSON NICE`. Started by `child.start_backend`.

    stdin ─► reader thread ─► inbox (bounded) ─► main thread: conductor ─► stdout

The main thread alone touches the engine. The reader thread ends the process when the parent closes the pipe, even if
the engine is deep in a step by then.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

from echo_node.backends.base import Engine
from echo_node.backends.conductor import Conductor
from echo_node.backends.frames import BEAT_S, pack_event, unpack_policy, unpack_requests, unpack_score
from echo_node.backends.options import (
    EngineOptions,
    LlamaCppOptions,
    ScriptedOptions,
    TorchOptions,
    VllmOptions,
    parse_options,
)
from echo_swarm.children import claim_pipes, die_with_parent, read_frame, write_frame

INBOX_FRAMES = 64
"""When full, the pipe fills and the parent's `submit` waits."""
END_GRACE_S = 2.0
"""Time for the main thread to end by itself once the parent is gone."""


def make_engine(options: EngineOptions) -> Engine:
    """Return the engine that `options` are for. Imports its library only here."""
    if isinstance(options, ScriptedOptions):
        from echo_node.backends.scripted import ScriptedEngine

        return ScriptedEngine(options)
    if isinstance(options, TorchOptions):
        from echo_node.backends.torch_engine import TorchEngine

        return TorchEngine(options)
    if isinstance(options, LlamaCppOptions):
        from echo_node.backends.llama_cpp_engine import LlamaCppEngine

        return LlamaCppEngine(options)
    if isinstance(options, VllmOptions):
        from echo_node.backends.vllm_engine import VllmEngine

        return VllmEngine(options)
    raise TypeError(f"no engine takes {type(options).__name__}")


def main(arguments: list[str]) -> None:
    """Serve one engine until the parent closes stdin."""
    die_with_parent()
    reader, writer = claim_pipes()
    name, options_json, nice = arguments
    with contextlib.suppress(OSError, AttributeError):
        # The machine stays usable for the person who lends it.
        os.nice(int(nice))
    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue(INBOX_FRAMES)
    threading.Thread(target=_read, args=(reader, inbox), daemon=True, name="reader").start()
    engine = make_engine(parse_options(name, json.loads(options_json)))
    write_frame(writer, {"kind": "ready", "report": engine.report().to_wire()})
    # A scripted engine has nothing to test, and its completions take as long as they are told to.
    serve(Conductor(engine, with_self_test=name != "scripted"), inbox, writer)


def serve(conductor: Conductor, inbox: "queue.Queue[dict[str, Any] | None]", writer: BinaryIO) -> None:
    """Run the main loop until None comes out of the inbox."""
    report = conductor.engine.report()
    written_s = time.monotonic()
    while True:
        for frame in _take(inbox, conductor.wait_s(BEAT_S)):
            if frame is None:
                return
            _handle(conductor, frame)
        events = conductor.advance()
        if events or conductor.engine.report() != report:
            report = conductor.engine.report()
            items = [pack_event(event) for event in events]
            write_frame(writer, {"kind": "events", "items": items, "report": report.to_wire()})
            written_s = time.monotonic()
        elif time.monotonic() - written_s >= BEAT_S:
            write_frame(writer, {"kind": "beat", "pending": conductor.pending})
            written_s = time.monotonic()


def _handle(conductor: Conductor, frame: dict[str, Any]) -> None:
    if frame["kind"] == "load":
        conductor.load(frame["load_id"], unpack_policy(frame["policy"]))
    elif frame["kind"] == "score":
        conductor.score(*unpack_score(frame))
    else:
        conductor.submit(unpack_requests(frame["requests"]))


def _take(inbox: "queue.Queue[dict[str, Any] | None]", wait_s: float) -> list[dict[str, Any] | None]:
    """Return all frames that are there, waiting up to `wait_s` for the first."""
    frames: list[dict[str, Any] | None] = []
    with contextlib.suppress(queue.Empty):
        frames.append(inbox.get(timeout=wait_s) if wait_s > 0 else inbox.get_nowait())
        while True:
            frames.append(inbox.get_nowait())
    return frames


def _read(reader: BinaryIO, inbox: "queue.Queue[dict[str, Any] | None]") -> None:
    try:
        while (frame := read_frame(reader)) is not None:
            inbox.put(frame)
        with contextlib.suppress(queue.Full):
            inbox.put(None, timeout=END_GRACE_S)
        time.sleep(END_GRACE_S)
    finally:
        # The main thread sits in a long step, or this thread read what is no frame: end all the same.
        os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
        # The last line of the log is what the parent reports. Then end at once: tearing a torch process down can take
        # longer than the parent waits, and the kernel gives memory and devices back all the same.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
