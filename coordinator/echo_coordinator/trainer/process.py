"""One rank: `python -m echo_coordinator.trainer.process --config trainer.json --socket PATH`.

    coordinator ⇄ unix socket ⇄ rank 0 ── path of the batch (gloo broadcast) ──► other ranks
                                  all ranks: read the batch, train; rank 0: save, answer

Frames are those of `echo_swarm.children`. From the trainer: `ready`, then for each `train` either `trained` or
`failed`, for each `probe` either `probed` or `failed`; a `failed` with `fatal` is the last word of a process that is
ending. When the socket closes, rank 0 ends at once, whatever it does; a checkpoint being written then is discarded at
the next start.
"""

import argparse
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echo_coordinator.trainer import batch as batches
from echo_coordinator.trainer.probe_job import pack_values, unpack_job
from echo_coordinator.trainer.settings import TrainerConfig, load_config
from echo_swarm.children import die_with_parent, read_frame, write_frame
from echo_swarm.errors import BackendFailed, EchoError, MalformedMessage

if TYPE_CHECKING:
    from echo_coordinator.trainer.engine import Trainer
    from echo_coordinator.trainer.ranks import Ranks

log = logging.getLogger(__name__)

_ORPHANED = 75
"""Exit code when the coordinator's socket closed without a `stop`."""
_STOP = ""
"""What rank 0 broadcasts in place of a path to end the others."""


class Link:
    """Rank 0's end of the socket. A thread reads, so that the coordinator's end is noticed in the middle of a step."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        self._reader = connection.makefile("rb")
        self._writer = connection.makefile("wb")
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=4)
        threading.Thread(target=self._read, name="coordinator", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send one frame."""
        write_frame(self._writer, message)

    def next_command(self) -> dict[str, Any]:
        """Wait for the next command."""
        return self._commands.get()

    def _read(self) -> None:
        while True:
            try:
                frame = read_frame(self._reader)
            except (OSError, EchoError):
                frame = None
            if frame is None:
                os._exit(_ORPHANED)
            self._commands.put(frame)
            if frame.get("op") == "stop":
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank until it is told to stop; return the exit code."""
    die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="echo_coordinator.trainer.process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", required=True)
    given = parser.parse_args(arguments)
    link = Link(given.socket) if int(os.environ.get("RANK", "0")) == 0 else None
    try:
        _run(load_config(given.config), link)
    except EchoError as e:
        log.error("%s", e)
        _last_words(link, str(e))
        return e.exit_code
    except Exception as e:  # noqa: BLE001 - the last frame before the end: whatever it was, the coordinator should know
        traceback.print_exc()
        _last_words(link, f"{type(e).__name__}: {e}")
        return 1
    return 0


def _run(config: TrainerConfig, link: Link | None) -> None:
    from transformers.utils import logging as transformers_logging

    from echo_coordinator.trainer.engine import Trainer
    from echo_coordinator.trainer.ranks import Ranks

    transformers_logging.disable_progress_bar()
    ranks = Ranks.from_environment(config.optimizer.device)
    # Rank 0 first: it may write the checkpoint that the others then load.
    if link is None:
        ranks.wait()
        _follow(Trainer(config, ranks), ranks)
    else:
        trainer = Trainer(config, ranks)
        ranks.wait()
        link.send(_ready(trainer))
        _lead(trainer, ranks, link)
    # Together, or the first to leave would look lost to the others.
    ranks.wait()
    ranks.close()


def _lead(trainer: "Trainer", ranks: "Ranks", link: Link) -> None:
    while True:
        command = link.next_command()
        if command.get("op") == "stop":
            ranks.broadcast_text(_STOP)
            return
        if command.get("op") == "probe":
            link.send(_probe(trainer, ranks, command))
            continue
        if command.get("op") != "train":
            link.send({"op": "failed", "reason": f"unknown command {command.get('op')!r}", "fatal": False})
            continue
        path = Path(str(command.get("batch_path")))
        try:
            batch = batches.read(path)
            trainer.check(batch)
        except MalformedMessage as e:
            link.send({"op": "failed", "reason": str(e), "fatal": False})
            continue
        ranks.broadcast_text(str(path))
        metrics = trainer.train(batch)
        # Not durable: in memory training has gone on, so a failure here ends the process and it starts from disk again.
        checkpoint = trainer.save()
        link.send({"op": "trained", **_standing(trainer), "metrics": metrics, "checkpoint": checkpoint.folder.name})


def _probe(trainer: "Trainer", ranks: "Ranks", command: dict[str, Any]) -> dict[str, Any]:
    """Score on this rank alone: each has the whole model, and the others wait for their next command."""
    from echo_coordinator.trainer.probing import score_probes

    config = trainer.config
    try:
        job = unpack_job(command)
        with trainer.at(Path(job.weights) if job.weights else None):
            values = score_probes(
                trainer.model,
                job,
                temperature=config.temperature,
                autocast=config.optimizer.precision == "bfloat16",
                device=ranks.device,
            )
    except (BackendFailed, MalformedMessage) as e:
        return {"op": "failed", "reason": str(e), "fatal": False}
    return pack_values(values)


def _follow(trainer: "Trainer", ranks: "Ranks") -> None:
    while path := ranks.broadcast_text():
        trainer.train(batches.read(Path(path)))


def _ready(trainer: "Trainer") -> dict[str, Any]:
    state = asdict(trainer.state)
    return {
        "op": "ready",
        **_standing(trainer),
        "parameters": trainer.parameters,
        "warnings": list(trainer.warnings),
        "consumed_groups": list(state["consumed_groups"]),
        "data_position": state["data_position"],
        "rolled_back_to": state["rolled_back_to"],
    }


def _standing(trainer: "Trainer") -> dict[str, Any]:
    return {
        "update": trainer.state.update,
        "policy_version": trainer.state.policy_version,
        "checkpoint": trainer.checkpoint.folder.name,
        "weights_path": str(trainer.checkpoint.weights_path),
    }


def leave(code: int) -> NoReturn:
    """End at once. Taking torch apart object by object takes seconds, and all that matters is on disk by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _last_words(link: Link | None, reason: str) -> None:
    if link is not None:
        try:
            link.send({"op": "failed", "reason": reason, "fatal": True})
        except OSError:
            log.warning("the coordinator is gone; it cannot be told: %s", reason)


if __name__ == "__main__":
    leave(main())
