"""The processes that train together. With one rank every operation is the identity, and nothing is set up.

Each rank holds the whole model and takes a share of the rows. Since every row's weight is fixed before the split,
gradients are summed, never averaged.
"""

import contextlib
import os
from collections.abc import Generator, Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from echo_swarm.errors import BackendFailed, SettingsError

_BUCKET_BYTES = 64 << 20
"""Gradients are summed in pieces of about this size: few calls, and little memory beside the gradients."""
_COMMAND_TIMEOUT = timedelta(days=3650)
"""Ranks wait for rank 0's next command as long as the coordinator has none; a dead rank 0 is noticed by its socket."""


class Ranks:
    """This process's place among the ranks."""

    def __init__(
        self, *, rank: int = 0, world: int = 1, device: torch.device | None = None, commands: Any = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device or torch.device("cpu")
        self._commands = commands

    @classmethod
    def from_environment(cls, device: Literal["auto", "cpu", "cuda"]) -> "Ranks":
        """Join the ranks that torchrun (or the launcher) started; RANK, WORLD_SIZE and LOCAL_RANK say which is ours."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        commands = None
        if world > 1:
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
            # Commands travel on a group of their own: NCCL would give up after ten idle minutes.
            commands = dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT)
        return cls(rank=rank, world=world, device=chosen, commands=commands)

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        if self.world > 1:
            with _naming_lost_ranks():
                dist.all_reduce(tensor)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks; a missing one counts as zeros."""
        if self.world == 1:
            return
        for bucket in _buckets(_gradients(parameters)):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self.sum(flat)
            for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def broadcast_text(self, text: str = "") -> str:
        """Return rank 0's `text` on every rank; the others wait for it without limit."""
        if self.world == 1:
            return text
        body = list(text.encode())
        size = torch.tensor([len(body)], dtype=torch.int64)
        with _naming_lost_ranks():
            dist.broadcast(size, 0, group=self._commands)
            data = torch.tensor(body if self.rank == 0 else [0] * int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._commands)
        return bytes(data.tolist()).decode()

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.world > 1:
            with _naming_lost_ranks():
                dist.barrier(group=self._commands)

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def _naming_lost_ranks() -> Generator[None]:
    """Say in plain words what the communication library reports as a broken socket."""
    try:
        yield
    except RuntimeError as e:
        raise BackendFailed(
            f"another rank of the trainer is gone; its own message stands earlier in the log ({e})"
        ) from e


def pick_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """Return this rank's device: its own GPU if there is one (or if wanted), else the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError('optimizer.device = "cuda", but torch sees no CUDA device here; use "auto" or "cpu"')
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor]:
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets
