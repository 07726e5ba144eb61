"""A node of the crash benchmark: `echo-node` that also writes down every verdict it hears, before it acts on it.

    {"group": 12, "member": 3, "work": "<first 16 bytes of sha256 of the token ids>", "verdict": "accepted"}

One line each in the file that ECHO_CRASH_VERDICTS names. SIGKILL loses none of it: the kernel has it.
"""

import hashlib
import json
import os
from typing import Any

from echo_node import cli
from echo_node.link import Link
from echo_swarm.envelope import unseal
from echo_swarm.trajectory import SUBMISSION_LIMITS, Submission
from echo_swarm.wire import Message
from echo_swarm.work import Push, PushReply

VERDICTS = "ECHO_CRASH_VERDICTS"


def note_verdicts(path: str) -> None:
    """Have every answer to a push written down."""
    call = Link.call

    async def told(self: Link, method: str, message: Message, reply: type[Message], **how: Any) -> Message:
        answer = await call(self, method, message, reply, **how)
        if isinstance(message, Push) and isinstance(answer, PushReply):
            _write(path, message, answer)
        return answer

    Link.call = told  # pyright: ignore[reportAttributeAccessIssue]


def _write(path: str, push: Push, answer: PushReply) -> None:
    submission = unseal(push.envelope, Submission, SUBMISSION_LIMITS).message
    lines = [
        {
            "group": made.group_id,
            "member": made.member,
            "work": hashlib.sha256(made.token_ids).digest()[:16].hex(),
            "verdict": verdict.reason.value,
        }
        for made, verdict in zip(submission.trajectories, answer.verdicts, strict=False)
    ]
    with open(path, "a", encoding="ascii") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Be a node."""
    note_verdicts(os.environ[VERDICTS])
    cli.main()


if __name__ == "__main__":
    main()
