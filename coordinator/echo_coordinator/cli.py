"""`echo-coordinator`: make a run, run it, look after it. Heavy imports happen inside the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_swarm.command_line import HELP_NAMES, print_version, run_command_line

app = typer.Typer(
    name="echo-coordinator",
    help="Train a language model with a swarm of volunteers' machines.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs, errors too.")]


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    run: RunArgument,
    model: Annotated[str, typer.Option(help="A Hugging Face model folder, or a hub id to download.")],
    environment: Annotated[str, typer.Option(help="Such as reasoning_gym:chain_sum or jsonl:PATH.")],
    name: Annotated[str, typer.Option(help="Shown to volunteers; default: the folder's name.")] = "",
    mode: Annotated[str, typer.Option(help="async or sequential.")] = "async",
) -> None:
    """Make a run: RUN/run.toml to edit, the run's key, a copy of the model."""
    from echo_coordinator.commands.init import init_run

    init_run(run, model=model, environment=environment, name=name or run.resolve().name, mode=mode)
    typer.echo(f"Made {run.resolve()}. Look over {run / 'run.toml'}, back up {run / 'keys' / 'run.key'}, then:")
    typer.echo(f"  echo-coordinator start {run}")


@app.command()
def start(
    run: RunArgument,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Print a line of progress now and then, for logs; without it a terminal shows a live table."
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Replace another coordinator with this run's key, live or begun later."),
    ] = False,
) -> None:
    """Run it: publish the newest version, print the invite, train. Continues where it stood."""
    from echo_coordinator.commands.start import start_run

    raise typer.Exit(start_run(run, live=sys.stdout.isatty() and not plain, take_over=take_over))


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the run's health."""
    from rich.console import Console

    from echo_coordinator.commands.show import show_status

    show_status(run, Console(), as_json=as_json)


@app.command()
def invite(run: RunArgument) -> None:
    """Print the invite of a running run."""
    from echo_coordinator.commands.show import request

    typer.echo(request(run, "invite")["invite"])


@app.command()
def pause(run: RunArgument) -> None:
    """Grant no new work and start no update until `resume`. What is under way is taken in."""
    from echo_coordinator.commands.show import request

    request(run, "pause")
    typer.echo(f"paused; continue with: echo-coordinator resume {run}")


@app.command()
def resume(run: RunArgument) -> None:
    """Undo `pause`."""
    from echo_coordinator.commands.show import request

    request(run, "resume")
    typer.echo("resumed")


@app.command()
def stop(run: RunArgument) -> None:
    """Stop the coordinator after the update under way. `start` continues later; nodes wait for it."""
    from echo_coordinator.commands.show import stop as stop_run

    version = stop_run(run)
    where = "before version 0" if version is None else f"at version {version}"
    typer.echo(f"stopped {where}; continue with: echo-coordinator start {run}")


@app.command()
def rollback(
    run: RunArgument,
    to: Annotated[int, typer.Option("--to", min=0, metavar="VERSION", help="The version to go back to.")],
) -> None:
    """Go back to an earlier version of a stopped run: the next `start` publishes it under a new, higher number."""
    from echo_coordinator.commands.rollback import roll_back

    done = roll_back(run, to)
    left = ", ".join(map(str, done.abandoned))
    typer.echo(f"the weights of version {to} will be published again, as version {done.version}")
    typer.echo(f"left behind: version {left}; what was sampled and not yet trained on is dropped at the next start:")
    typer.echo(f"  echo-coordinator start {run}")


@app.command("rotate-key")
def rotate_key(
    run: RunArgument,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Also when another coordinator with the old key began later, as a thief's would."
        ),
    ] = False,
) -> None:
    """Give a stopped run a new key. The old one signs it, so that nodes follow; invites from before still work."""
    from echo_coordinator.commands.rotate import rotate

    for line in rotate(run, take_over=take_over):
        typer.echo(line)


@app.command()
def peers(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show every peer that the run knows: what it delivered, how it stands and why."""
    from rich.console import Console

    from echo_coordinator.commands.peers import show_peers

    show_peers(run, Console(), as_json=as_json)


PeerArgument = Annotated[
    str, typer.Argument(metavar="PEER", help="A peer id, or its beginning or end if only one peer has it.")
]


@app.command()
def ban(
    run: RunArgument,
    peer: PeerArgument,
    reason: Annotated[str, typer.Option(help="The peer is told.")] = "",
    take_back: Annotated[
        bool, typer.Option("--take-back", help="Do not train on what it delivered and was not trained on yet.")
    ] = False,
) -> None:
    """Want nothing from a peer any more: no call of it is answered. Works on a stopped run, too."""
    from echo_coordinator.commands.peers import ban_peer

    typer.echo(ban_peer(run, peer, reason=reason, take_back=take_back))


@app.command()
def pardon(run: RunArgument, peer: PeerArgument) -> None:
    """Lift a ban and forget failed audits: the peer is a newcomer again."""
    from echo_coordinator.commands.peers import pardon_peer

    typer.echo(pardon_peer(run, peer))


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="New folder; transformers loads it.", show_default=False)],
    version: Annotated[int | None, typer.Option(help="Default: the newest.", show_default=False)] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Of a LoRA run: a whole model, not the adapter.")] = False,
) -> None:
    """Write a version as a Hugging Face folder; of a LoRA run, the adapter as PEFT's files."""
    from echo_coordinator.commands.export import export_version

    exported = export_version(run, out, version=version, merged=merged)
    typer.echo(f"wrote version {exported.version} to {out}")
    if exported.base:
        typer.echo(
            f"an adapter for {exported.base}, which its adapter_config.json names; --merged writes a whole model"
        )


@app.command()
def simulate(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run, for its settings.", show_default=False)
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="A file like run.toml instead.", show_default=False)] = None,
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="How many.")] = 20,
    speed: Annotated[str, typer.Option(help="Tokens a second of a node; LOW-HIGH: from the slowest on.")] = "50-200",
    places: Annotated[int, typer.Option(min=1, max=4096, help="Completions that a node samples at once.")] = 8,
    tokens: Annotated[float, typer.Option(min=1, help="Mean length of a completion.")] = 200,
    step_time: Annotated[float, typer.Option(min=0.01, help="Seconds of one update.")] = 60,
    publish_time: Annotated[float, typer.Option(min=0, help="Seconds until a version can be fetched.")] = 2,
    fetch_time: Annotated[float, typer.Option(min=0, help="Seconds that a node takes to fetch one.")] = 5,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Instead of the settings' own.", show_default=False)
    ] = None,
    hours: Annotated[float, typer.Option(help="Simulated time.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    faults: Annotated[str, typer.Option(help="none, home or hostile.")] = "home",
    replay: Annotated[Path | None, typer.Option(help="What a failed simulation left.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a run on modelled nodes: how busy both sides are, how old samples get, and what limits."""
    from echo_coordinator.commands.simulate import make_scenario, read_scenario, read_settings, run_simulation

    scenario = (
        read_scenario(replay)
        if replay
        else make_scenario(
            read_settings(run, settings),
            nodes=nodes,
            speed=speed,
            places=places,
            tokens=tokens,
            step_time=step_time,
            publish_time=publish_time,
            fetch_time=fetch_time,
            max_staleness=max_staleness,
            hours=hours,
            seed=seed,
            faults=faults,
        )
    )
    typer.echo(run_simulation(scenario, json_wanted=as_json))


@app.command()
def mirror(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where a web server finds it.", show_default=False)],
    prune: Annotated[bool, typer.Option("--prune", help="Also remove files of versions that are gone.")] = False,
    check: Annotated[
        str | None, typer.Option(metavar="URL", help="Then see whether nodes can use it there.", show_default=False)
    ] = None,
) -> None:
    """Write the files of all versions on disk to a folder that a web server serves; again, only what is new."""
    from echo_coordinator.commands.mirror import write_mirror
    from echo_coordinator.commands.mirror_check import check_mirror
    from echo_swarm.render import size

    done = write_mirror(run, folder, prune=prune, say=typer.echo)
    versions = ", ".join(map(str, done.versions))
    removed = f", {done.removed} removed" if prune else ""
    typer.echo(f"versions {versions} are in {done.folder}")
    wrong = f" ({done.replaced} in place of wrong ones)" if done.replaced else ""
    typer.echo(f"{done.added} files added ({size(done.added_bytes)}){wrong}, {done.kept} there already{removed}")
    if check is not None:
        typer.echo(f"{check_mirror(run, check)} files can be fetched from {check}")
    if not done.named:
        typer.echo(f"Nodes ask it once {run / 'run.toml'} names where it is served, and the run was started again:")
        typer.echo('  [publish]\n  mirrors = ["https://…"]   # the URL of DIR; the server must answer range requests')


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where it works.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of model, prompts and sampling.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Node processes.")] = 3,
    mixed: Annotated[bool, typer.Option("--mixed", help="One node each on torch, llama.cpp and vLLM instead.")] = False,
    vllm_python: Annotated[
        Path, typer.Option(help="With --mixed: the interpreter of the environment that has vLLM.")
    ] = Path(".venv-vllm/bin/python"),
) -> None:
    """Train a small real model with a coordinator and three nodes on this machine, in minutes."""
    from echo_coordinator.demo.launch import run_demo
    from echo_coordinator.demo.recipe import TORCH
    from echo_coordinator.demo.recipe import mixed as mixed_backends

    backends = mixed_backends(str(vllm_python)) if mixed else (TORCH,) * nodes
    raise typer.Exit(run_demo(folder, seed=seed, backends=backends, gguf=mixed))


def main() -> None:
    """Entry point: errors become one line and an exit code by cause."""
    run_command_line(app, "echo-coordinator")


if __name__ == "__main__":
    main()
