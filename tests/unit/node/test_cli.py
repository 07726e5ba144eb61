"""The command line: instant help, one-line errors, exit codes by cause."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from echo_node.config import StatePaths
from echo_node.show import show_local
from echo_node.status import LocalStatus, summary_lines, write_status
from echo_swarm import __version__
from echo_swarm.extras import install_command
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite

NOWHERE = str(Invite(run="a" * 32, key=bytes(32), boot=("/ip4/127.0.0.1/tcp/1/p2p/x",)))
PROGRAM = "from echo_node.cli import main; main()"


def run(*arguments: str, state: Path | None = None, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(state) if state else "/nonexistent", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )


def local_status(**changes: object) -> LocalStatus:
    values = {
        "run_id": "a" * 32,
        "run_name": "sums",
        "peer_id": Identity.generate().peer_id,
        "pid": 1,
        "written_at": time.time(),
        "started_at": time.time() - 60.5,
        "up_s": 60.5,
        "beat_s": 5.0,
        "state": "sampling with version 3",
        "accepted": 7,
        "rejected": {"late": 2},
    }
    return LocalStatus.model_validate({**values, **changes})


def test_help_loads_none_of_the_heavy_libraries():
    probe = (
        "import sys; sys.argv = ['echo-node', '--help']\n"
        "from echo_node.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'hivemind', 'libp2p', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "join" in done.stdout


@pytest.mark.parametrize("module", ["echo_node.cli", "echo_coordinator.cli"])
def test_version_and_short_help(module: str):
    program = f"from {module} import main; main()"
    done = run("--version", program=program)
    assert (done.returncode, done.stdout) == (0, f"echo-swarm {__version__}\n")
    assert "status" in run("-h", program=program).stdout
    assert "--json" in run("status", "-h", program=program).stdout


def test_a_mangled_invite_is_one_line_and_exit_code_2(tmp_path: Path):
    done = run("join", NOWHERE[:-1] + ("0" if NOWHERE[-1] != "0" else "1"), state=tmp_path)
    assert done.returncode == 2
    assert "copy it again" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_role_that_does_not_exist_is_refused(tmp_path: Path):
    assert run("join", "echo1-x", "--role", "king", state=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("wrong", "flags"),
    [
        ("--backend", ("--role", "seeder", "--backend", "torch")),
        ("--outbound-only", ("--role", "seeder", "--outbound-only")),
        ("--hold", ("--role", "seeder", "--hold", "pickle")),
        ("--hold", ("--hold", "gguf")),
    ],
)
def test_flags_that_do_not_go_with_the_role_are_refused(tmp_path: Path, wrong: str, flags: tuple[str, ...]):
    done = run("join", NOWHERE, *flags, state=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and wrong in done.stderr


def test_mirrors_cannot_be_left_out_and_allowed_nearby(tmp_path: Path):
    done = run("join", NOWHERE, "--no-mirrors", "--private-mirrors", state=tmp_path)
    assert done.returncode == 2 and "--no-mirrors and --private-mirrors exclude each other" in done.stderr


def test_a_seeder_shows_what_it_holds_and_served(tmp_path: Path):
    seeder = local_status(role="seeder", held_versions=(2, 3, 4), held_bytes=1_200_000, bytes_served=9_000_000)
    path = StatePaths(state_dir=tmp_path, run_id=seeder.run_id).status
    path.parent.mkdir(parents=True)
    write_status(path, seeder)
    out = io.StringIO()
    show_local(tmp_path, Console(file=out, width=160), as_json=False)
    assert "2-4" in out.getvalue() and "9.0 MB served" in out.getvalue()
    assert summary_lines(seeder)[0].endswith("3 versions, 2 to 4 (1.2 MB)")


def test_settings_out_of_range_are_one_line_too(tmp_path: Path):
    done = run("join", NOWHERE, "--listen", "x" * 600, state=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "listen" in done.stderr


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "/ip4/127.0.0.1", "/ip4/999.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/70000", "/dns4/x.org/tcp/1"]
)
def test_an_address_that_nobody_can_listen_on_is_refused_with_a_good_one(tmp_path: Path, address: str):
    done = run("join", NOWHERE, "--listen", address, state=tmp_path)
    assert done.returncode == 2 and "such as /ip4/0.0.0.0/tcp/21000" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["jax", "torch:bacth=1", "torch:device=cuda:99"])
def test_a_backend_that_cannot_work_is_refused_before_anybody_is_dialled(tmp_path: Path, option: str):
    done = run("join", NOWHERE, "--backend", option, state=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "connecting" not in done.stdout and len(done.stderr.strip().splitlines()) == 1


def test_a_backend_python_that_is_no_program_is_named(tmp_path: Path):
    done = run("join", NOWHERE, "--backend", "vllm", "--backend-python", str(tmp_path), state=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"echo-node: --backend-python: {tmp_path} is not a program; name an interpreter, such as .venv-vllm/bin/python"
    )


def test_with_a_python_of_its_own_a_backend_need_not_be_installed_here(tmp_path: Path):
    arguments = ("join", NOWHERE, "--backend", "vllm", "--patience", "0")
    program = f"import sys; sys.modules['vllm'] = None\n{PROGRAM}"
    here = run(*arguments, state=tmp_path, program=program)
    there = run(*arguments, "--backend-python", sys.executable, state=tmp_path, program=program)
    assert here.returncode == 6 and "vllm is not installed (vllm missing)" in here.stderr
    assert "not installed" not in there.stderr and there.returncode != 6


def test_a_backend_that_is_not_installed_ends_with_code_6_and_how_to_install_it(tmp_path: Path):
    program = "import sys; sys.modules['transformers'] = None\nfrom echo_node.cli import main; main()"
    done = run("join", NOWHERE, "--backend", "torch", state=tmp_path, program=program)
    assert done.returncode == 6 and install_command("torch") in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_status_without_an_invite_shows_the_nodes_of_this_machine_with_their_age(tmp_path: Path):
    state = tmp_path / "echo-swarm"
    for name, age_s in (("a", 1), ("b", 600)):
        path = StatePaths(state_dir=state, run_id=name * 32).status
        path.parent.mkdir(parents=True)
        write_status(path, local_status(run_id=name * 32, written_at=time.time() - age_s))
    (state / "runs" / "damaged").mkdir()
    (state / "runs" / "damaged" / "status.json").write_text("")
    rows = json.loads(run("status", "--json", state=tmp_path).stdout)
    assert [row["live"] for row in rows] == [True, False]
    assert rows[1]["age_s"] >= 600
    shown = run("status", state=tmp_path).stdout
    assert "10 min" in shown and "(gone)" in shown and "late 2" in shown


def test_status_where_no_node_ever_ran_says_so(tmp_path: Path):
    done = run("status", state=tmp_path)
    assert done.returncode == 0 and "no node has run" in done.stdout


def test_identity_shows_peer_id_and_key_path(tmp_path: Path):
    missing = run("identity", state=tmp_path)
    assert missing.returncode == 2 and "the first join makes one" in missing.stderr
    identity = Identity.generate()
    key = tmp_path / "echo-swarm" / "identity.key"
    key.parent.mkdir()
    key.touch(mode=0o600)
    key.write_text(identity.seed.hex())
    shown = json.loads(run("identity", "--json", state=tmp_path).stdout)
    assert shown == {"peer_id": identity.peer_id, "key_path": str(key)}


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        (["identity"], "UsageError", 2),
        (["status", "echo1-x"], "InviteError", 2),
        (["status", "--no-such-flag"], "UsageError", 2),
        (["no-such-command"], "UsageError", 2),
        (["status", NOWHERE, "too many"], "UsageError", 2),
    ],
)
def test_with_json_an_error_is_one_json_object(tmp_path: Path, arguments: list[str], error: str, code: int):
    done = run(*arguments, "--json", state=tmp_path)
    assert done.returncode == code and done.stdout == ""
    said = json.loads(done.stderr)
    assert said.keys() == {"error", "message", "exit_code"} and said["message"]
    assert (said["error"], said["exit_code"]) == (error, code)


def test_the_summary_tells_what_was_accepted_and_why_the_rest_was_not():
    lines = summary_lines(local_status(tokens=900, tokens_accepted=700))
    assert lines[0] == "took part for 1 min: 900 tokens made"
    assert "7 accepted (700 tokens), 2 not accepted (late 2)" in lines[1]


def test_what_the_run_left_behind_is_not_put_on_the_volunteer():
    lines = summary_lines(local_status(rejected={"stale": 3, "node_stale": 4, "bad_length": 1}))
    assert "8 not accepted (too old (not your fault) 7, bad length 1)" in lines[1]


@pytest.mark.parametrize("width", [70, 80, 120])
def test_the_nodes_of_this_machine_fit_the_terminal(tmp_path: Path, width: int):
    path = StatePaths(state_dir=tmp_path, run_id="a" * 32).status
    path.parent.mkdir(parents=True)
    write_status(path, local_status(run_id="a" * 32, run_name="a rather long name", rejected={"stale": 12}))
    console = Console(width=width, file=io.StringIO())
    show_local(tmp_path, console, as_json=False)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for words in ("run", "seen", "tok/s", "accepted", "not accepted", "state", "too old", "fault)", "sampling"):
        assert words in shown, shown
    assert shown.count("…") <= 1
