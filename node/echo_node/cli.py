"""The command line of a node. Heavy imports happen inside the commands, so that `--help` is instant."""

import os
from pathlib import Path
from typing import Annotated

import typer

from echo_swarm.command_line import HELP_NAMES, print_version, run_command_line

app = typer.Typer(
    name="echo-node",
    help="Take part in a run: sample completions for it on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=HELP_NAMES,
)

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Where this node keeps its key and its work.", show_default=False)
]
Patience = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=86_400,
        help="Seconds to try to reach the run: 60, or without end where this machine was in it before.",
        show_default=False,
    ),
]
MaxUpload = Annotated[
    float | None, typer.Option(help="Most Mbit/s of model versions to other peers.", show_default=False)
]
MaxDownload = Annotated[
    float | None, typer.Option(help="Most Mbit/s of model versions from others.", show_default=False)
]
Hold = Annotated[
    list[str] | None,
    typer.Option(help="Of a seeder, repeatable: safetensors, gguf, delta, lora, lora-gguf; all by default."),
]
NoMirrors = Annotated[bool, typer.Option("--no-mirrors", help="Fetch from peers only, not from the run's web servers.")]
PrivateMirrors = Annotated[
    bool, typer.Option("--private-mirrors", help="Let the run's web servers be in this network, or on this machine.")
]
PrivatePeers = Annotated[
    bool, typer.Option("--private-peers", help="Look for peers in this network too, though the run is a public one.")
]


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def join(
    invite: Annotated[str, typer.Argument(help="The line that the coordinator printed.")],
    role: Annotated[str, typer.Option(help="inference: sample; seeder: store and serve model versions.")] = "inference",
    backend: Annotated[
        str, typer.Option(help="auto, torch, llama_cpp, vllm or scripted; with settings: torch:device=cpu,threads=2.")
    ] = "auto",
    backend_python: Annotated[
        Path | None,
        typer.Option(
            "--backend-python",
            help="Python of another environment for the backend; auto also looks at this one.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=4096, help="Completions at once.", show_default=False)] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="Multiaddress to listen on; repeatable.", show_default=False)
    ] = None,
    outbound_only: Annotated[bool, typer.Option("--outbound-only", help="Accept no connections.")] = False,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    max_store: Annotated[
        float | None, typer.Option(help="Most GB of model versions on disk.", min=0.001, show_default=False)
    ] = None,
    no_mirrors: NoMirrors = False,
    private_mirrors: PrivateMirrors = False,
    private_peers: PrivatePeers = False,
    hold: Hold = None,
    patience: Patience = None,
    state_dir: StateDir = None,
) -> None:
    """Join a run and work for it until it is finished or Ctrl+C is pressed."""
    from rich.console import Console

    from echo_node.config import make_config
    from echo_node.roles import check_role, take_part
    from echo_swarm.invite import parse

    sampling = {"--backend": backend != "auto", "--backend-python": backend_python, "--batch": batch}
    check_role(role, sampling=sampling, outbound_only=outbound_only, hold=hold)
    config = make_config(
        state_dir=_state_dir(state_dir),
        role=role,
        backend=backend,
        backend_python=backend_python,
        batch=batch,
        listen=tuple(listen or ()),
        outbound_only=outbound_only,
        max_upload_mbit=max_upload,
        max_download_mbit=max_download,
        max_store_bytes=None if max_store is None else int(max_store * 1e9),
        hold=tuple(hold) if hold else None,
        use_mirrors=not no_mirrors,
        private_mirrors=private_mirrors,
        private_peers=private_peers,
        patience_s=patience,
    )
    take_part(config, parse(invite), Console())


@app.command()
def status(
    invite: Annotated[str | None, typer.Argument(help="Of a run; without it, this machine's nodes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, errors too.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show this machine's nodes, or with an invite the health of the whole run."""
    from rich.console import Console

    from echo_node.show import show_local, show_run
    from echo_swarm.invite import parse

    console = Console()
    if invite is None:
        show_local(_state_dir(state_dir), console, as_json=as_json)
    else:
        show_run(parse(invite), console, as_json=as_json)


@app.command()
def doctor(
    invite: Annotated[str | None, typer.Argument(help="Of a run, to look at its model and whether it answers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, errors too.")] = False,
    backend: Annotated[str, typer.Option(help="As for join.")] = "auto",
    backend_python: Annotated[
        Path | None,
        typer.Option("--backend-python", help="Python of another environment, as for join.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Start no backend: no self-test, no speed.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Say whether this machine can take part, with which backend, and what to do if it cannot."""
    import sys

    from rich.console import Console

    from echo_node.config import make_config
    from echo_node.doctor import Question
    from echo_node.doctor import doctor as run
    from echo_swarm.invite import parse

    config = make_config(state_dir=_state_dir(state_dir), backend=backend, backend_python=backend_python)
    question = Question(
        state_dir=config.state_dir,
        invite=None if invite is None else parse(invite),
        backend=config.backend,
        python=str(config.backend_python or sys.executable),
        start=not quick,
    )
    run(question, Console(), as_json=as_json)


@app.command()
def identity(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, errors too.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show this node's peer id and where its key lies."""
    import json

    from echo_node.config import identity_key
    from echo_swarm.errors import UsageError
    from echo_swarm.identity import load

    path = identity_key(_state_dir(state_dir))
    if not path.exists():
        raise UsageError(
            f"there is no key yet at {path}; the first join makes one (echo-node join INVITE), or name the folder of "
            "another node with --state-dir"
        )
    peer_id = load(path).peer_id
    typer.echo(json.dumps({"peer_id": peer_id, "key_path": str(path)}) if as_json else f"{peer_id}\nkey: {path}")


def _state_dir(given: Path | None) -> Path:
    from echo_node.config import default_state_dir

    return given or default_state_dir(os.environ)


def main() -> None:
    """Run the command line; every error of ours is one line and an exit code."""
    run_command_line(app, "echo-node")


if __name__ == "__main__":
    main()
