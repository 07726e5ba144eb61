"""Both command lines as a person meets them: what they print, what they refuse, how they end. Real hivemind."""

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echo_coordinator.commands.start import LOG_BYTES
from echo_coordinator.config import load_settings
from echo_coordinator.demo.run_file import to_toml
from echo_coordinator.run_folder import RunFolder
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite, parse
from echo_swarm.status import RunStatus
from tests.e2e.support.commands import COORDINATOR, NODE, Running, call
from tests.e2e.support.models import CONTEXT_TOKENS, write_model
from tests.e2e.support.swarm import CHAIN_SUM, Swarm, make_swarm

NODE_BACKEND = "scripted:mean_s=0.2,batch=8"
"""Leaves processors to the commands."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `init` leaves it."""
    root = tmp_path_factory.mktemp("made") / "run"
    done = call(COORDINATOR, "init", root, "--model", model, "--environment", CHAIN_SUM)
    assert done.code == 0, done.err
    assert f"echo-coordinator start {root}" in done.out
    return root


@pytest.fixture(scope="module")
def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    return make_swarm(
        tmp_path_factory.mktemp("swarm"), model, evaluation={"every": 4, "prompts": 4}, audits={"share": 0}
    )


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm) -> Generator[Running]:
    with swarm.start() as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def node(swarm: Swarm, coordinator: Running) -> Generator[Running]:
    """A node at work, once something has been trained and evaluated."""
    with swarm.join("node", backend=NODE_BACKEND) as node:
        node.wait_for("updates", lambda: (status := swarm.status()) and status.evaluations and status.updates > 4)
        yield node


# --help


@pytest.mark.parametrize("module", [COORDINATOR, NODE])
def test_help_loads_none_of_the_heavy_libraries(module: str):
    probe = (
        f"import sys; sys.argv = ['x', '--help']\nfrom {module} import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "heavy = {'torch', 'hivemind', 'libp2p', 'transformers', 'numpy', 'pydantic', 'anyio'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "status" in done.stdout


@pytest.mark.parametrize("module", [COORDINATOR, NODE])
def test_without_a_command_it_says_what_there_is(module: str):
    done = call(module)
    assert done.code == 2 and "status" in done.out + done.err


# init


def test_init_makes_settings_that_load_a_private_key_and_a_model(made: Path):
    folder = RunFolder(made)
    settings = load_settings(folder)
    assert settings.environment.name == CHAIN_SUM and settings.run.name == "run"
    assert settings.environment.max_prompt_tokens + settings.work.max_tokens <= CONTEXT_TOKENS
    assert stat.S_IMODE(folder.key.stat().st_mode) == 0o600
    assert {path.name for path in folder.model.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    (address,) = settings.network.listen
    assert not address.endswith("/0"), "the invite must stay valid after a restart"


def test_init_writes_the_documented_defaults_and_what_it_writes_as_comments_can_be_used(made: Path, tmp_path: Path):
    text = (made / "run.toml").read_text()
    settings = load_settings(RunFolder(made))
    # By the model's context, and by chance.
    chosen = {("environment", "max_prompt_tokens"), ("work", "max_tokens"), ("work", "seed")}
    for section, values in tomllib.loads(text).items():
        fields = type(getattr(settings, section)).model_fields
        for name, value in values.items():
            if not fields[name].is_required() and (section, name) not in chosen and section != "network":
                assert value == fields[name].get_default(call_default_factory=True), f"{section}.{name}"
    uncommented = re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE)
    (tmp_path / "run.toml").write_text(uncommented)
    whole = load_settings(RunFolder(tmp_path))
    assert whole.lora is not None and whole.publish.gguf == ("q8_0",) and whole.run.updates == 1000
    assert whole.lora == type(whole.lora)(), "the defaults again"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"--model": "/nowhere/model"}, "no folder"),
        ({"--model": "no-such-owner-xyz/no-such-model"}, "the hub did not give it"),
        ({"--environment": "reasoning_gym:chain_sums"}, "did you mean chain_sum"),
        ({"--environment": "reasoning_jim:chain_sum"}, "reasoning_gym"),
        ({"--environment": "jsonl:no-such-file"}, "no file 'no-such-file'"),
        ({"--environment": "jsonl:/dev/null"}, "no file '/dev/null'"),
        ({"--mode": "both"}, "async or sequential"),
        ({"--name": "x" * 65}, "run.name"),
    ],
)
def test_an_init_that_cannot_work_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, arguments: dict[str, str], said: str
):
    given = {"--model": str(model), "--environment": CHAIN_SUM, **arguments}
    offline = {"HF_HUB_OFFLINE": "1"}
    options = [part for pair in given.items() for part in pair]
    done = call(COORDINATOR, "init", tmp_path / "new" / "run", *options, environment=offline)
    assert done.code == 2 and said in done.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "0 different prompts"), ('{"prompt": "a", "answer": 1}\n{"question": "b"}\n', "questions:2:")],
)
def test_init_refuses_a_file_of_questions_that_cannot_be_asked(model: Path, tmp_path: Path, text: str, said: str):
    data = tmp_path / "questions"
    data.write_text(text)
    done = call(COORDINATOR, "init", tmp_path / "run", "--model", model, "--environment", f"jsonl:{data}")
    assert done.code == 2 and said in done.error and 'expected on each line: {"prompt":' in done.error
    assert list(tmp_path.iterdir()) == [data]


def test_init_does_not_touch_a_folder_in_use(made: Path, model: Path):
    before = (made / "run.toml").read_bytes()
    done = call(COORDINATOR, "init", made, "--model", model, "--environment", CHAIN_SUM)
    assert done.code == 2 and "not empty" in done.error
    assert (made / "run.toml").read_bytes() == before


def test_init_fills_the_empty_folder_one_is_in(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path.parent / f"{tmp_path.name}.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "1 + 2 =", "answer": "3"}\n')
    done = call(COORDINATOR, "init", ".", "--model", model, "--environment", f"jsonl:../{data.name}")
    assert done.code == 0, done.err
    settings = load_settings(RunFolder(tmp_path))
    assert Path(settings.environment.name.removeprefix("jsonl:")).samefile(data)
    assert settings.environment.name.startswith("jsonl:/"), "start works from any folder"


# settings that cannot work


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("publish", {"keep_versions": 2}, "keep_versions"),
        ("work", {"top_p": 0.8}, "top_p"),
        ("work", {"mode": "sequential", "max_staleness": 2}, "max_staleness"),
        ("work", {"max_tokens": 4096}, "work.max_tokens"),
        ("work", {"group_sise": 4}, "work.group_sise"),
    ],
)
def test_an_edit_that_cannot_work_names_the_setting(
    made: Path, tmp_path: Path, section: str, change: dict[str, object], named: str
):
    root = tmp_path / "run"
    root.mkdir()
    (root / "keys").symlink_to(made / "keys")
    (root / "model").symlink_to(made / "model")
    settings = tomllib.loads((made / "run.toml").read_text())
    settings[section] = {**settings.get(section, {}), **change}
    (root / "run.toml").write_text(to_toml(settings))
    (root / "logs").mkdir()
    (root / "logs" / "coordinator.log").write_bytes(bytes(LOG_BYTES))
    done = call(COORDINATOR, "start", root, "--plain")
    assert done.code == 2 and named in done.error
    shown = call(COORDINATOR, "status", root, "--json")
    told = json.loads(shown.error)
    assert shown.code == told["exit_code"] == 4 and told["error"] == "Unavailable"
    assert "exit code 2, SettingsError" in told["message"] and named in told["message"]
    assert named in (root / "logs" / "coordinator.log").read_text()
    assert (root / "logs" / "coordinator.log.1").stat().st_size == LOG_BYTES, "put aside"


# a run that is running


def test_status_shows_everything_a_person_acts_on(swarm: Swarm, node: Running):
    shown = call(COORDINATOR, "status", swarm.root, "--json").json()
    status = RunStatus.model_validate(shown)
    assert (status.name, status.mode, status.max_staleness, status.state) == ("sums", "async", 2, "running")
    assert status.policy_version is not None and status.version_age_s is not None
    assert status.updates >= 4 and status.model_parameters > 0
    assert status.trainer.state and status.trainer_busy_share > 0 and status.trainer.since_s >= 0
    assert status.accepted > 0 and status.rejected == {} and sum(status.staleness.values()) > 0
    assert status.buffer.capacity > 0 and status.recent_updates and status.evaluations[0].policy_version == 0
    assert status.bytes_served_coordinator > 0 and status.bytes_served_peers == 0
    (peer,) = status.nodes
    assert (peer.role, peer.backend, peer.precision, peer.live) == ("inference", "scripted", "float32", True)
    assert peer.peer_id == swarm.peer_id("node") and peer.held_version is not None and peer.accepted > 0


def test_status_fits_an_ordinary_terminal(swarm: Swarm, node: Running):
    shown = call(COORDINATOR, "status", swarm.root, environment={"COLUMNS": "100"}).out
    for words in ("sums", "trainer", "buffer", "accepted", "staleness", "reward", "evaluation", "v0: ", "served"):
        assert words in shown, shown
    (row,) = (line for line in shown.splitlines() if swarm.peer_id("node")[-8:] in line)
    assert "inference" in row and "scripted" in row and "ago" in row
    assert "…" not in shown.replace(f"…{swarm.peer_id('node')[-8:]}", "").replace("  …  ", ""), shown


def test_a_node_shows_the_run_and_itself(swarm: Swarm, node: Running):
    with ThreadPoolExecutor() as pool:
        as_json = pool.submit(call, NODE, "status", swarm.invite(), "--json")
        as_table = pool.submit(call, NODE, "status", swarm.invite())
        run, shown = RunStatus.model_validate(as_json.result().json()), as_table.result()
    assert run.run_id == parse(swarm.invite()).run and run.nodes[0].peer_id == swarm.peer_id("node")
    assert shown.code == 0 and "evaluation" in shown.out
    (own,) = call(NODE, "status", "--state-dir", swarm.folder / "node", "--json").json()
    assert own["live"] and own["accepted"] > 0 and own["peer_id"] == swarm.peer_id("node")


def test_what_is_asked_of_the_wrong_run_or_key_is_said_apart(swarm: Swarm, node: Running, tmp_path: Path):
    invite = parse(swarm.invite())
    other_run = Invite(run="a" * 32, key=invite.key, boot=invite.boot)
    other_key = Invite(run=invite.run, key=Identity.generate().public_key, boot=invite.boot)
    join = ("join", "--state-dir", tmp_path, "--backend", "scripted")
    with ThreadPoolExecutor() as pool:
        wrong_run = pool.submit(call, NODE, "status", str(other_run))
        wrong_key = pool.submit(call, NODE, "status", str(other_key))
        joined = pool.submit(call, NODE, *join, str(other_run)).result()
    assert wrong_run.result().code == wrong_key.result().code == joined.code == 4
    assert f"does not serve run {'a' * 32}" in wrong_run.result().error
    assert "does not serve run" in joined.error
    assert "cannot be reached" in wrong_key.result().error
    assert wrong_run.result().out == wrong_key.result().out == ""


def test_a_second_start_is_refused(swarm: Swarm, coordinator: Running):
    done = call(COORDINATOR, "start", swarm.root, "--plain")
    assert done.code == 2 and "already runs" in done.error


def test_a_paused_run_trains_nothing_until_it_is_resumed(swarm: Swarm, node: Running):
    assert "resume" in call(COORDINATOR, "pause", swarm.root).out
    status = node.wait_for("the pause", lambda: (now := swarm.status()) and now.trainer.state == "paused" and now)
    assert status.state == "paused"
    node.wait_for("the node's word of it", lambda: (own := swarm.node("node")) and "resumed" in own.state)
    assert swarm.updates() == status.updates
    assert call(COORDINATOR, "resume", swarm.root).code == 0
    node.wait_for("updates", lambda: swarm.updates() >= status.updates + 2)


def test_leaving_says_what_it_waits_for_and_a_second_ctrl_c_ends_it_at_once(swarm: Swarm, node: Running):
    with swarm.join("slow", backend="scripted:mean_s=600,sigma=0,batch=4") as slow:
        slow.wait_for("work", lambda: (own := swarm.node("slow")) and own.in_flight)
        slow.look()
        slow.process.send_signal(signal.SIGINT)
        slow.wait_for("the reason", lambda: "leaving, in about" in slow.output())
        assert "Ctrl+C again ends it at once" in slow.output()
        assert slow.end(signal.SIGINT) == 130
        assert slow.left_behind(timeout_s=10) == []


def test_an_exported_version_is_a_model_that_transformers_loads(swarm: Swarm, node: Running, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # What the running coordinator is about to publish looks like this. An export leaves it alone.
    (store,) = (swarm.root / "store").iterdir()
    unpublished = store / "v99999999" / "model.safetensors.tmp"
    unpublished.parent.mkdir()
    unpublished.touch()
    out = tmp_path / "exported"
    done = call(COORDINATOR, "export", swarm.root, out)
    assert done.code == 0, done.err
    assert unpublished.is_file()
    shutil.rmtree(unpublished.parent)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("58 + 26 =", return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out)(input_ids=inputs["input_ids"]).logits
    assert logits.shape == (1, 10, len(tokenizer)) and bool(torch.isfinite(logits).all())
    again = call(COORDINATOR, "export", swarm.root, out)
    assert again.code == 2 and "exists" in again.error
    gone = call(COORDINATOR, "export", swarm.root, tmp_path / "old", "--version", "1000000")
    assert gone.code == 2 and "there are" in gone.error and not (tmp_path / "old").exists()


def test_a_stopped_run_is_shown_as_it_was_and_goes_on_where_it_stood(swarm: Swarm, coordinator: Running, node: Running):
    invite = swarm.invite()
    stopped = call(COORDINATOR, "stop", swarm.root)
    assert stopped.code == 0 and "continue with" in stopped.out
    # No wait in between: `stop` returns when another `start` may follow.
    with ThreadPoolExecutor() as pool:
        as_table = pool.submit(call, COORDINATOR, "status", swarm.root)
        as_json = pool.submit(call, COORDINATOR, "status", swarm.root, "--json")
        dead = pool.submit(call, NODE, "status", invite)
        table, last, refused = as_table.result(), as_json.result(), dead.result()
    assert coordinator.process.wait(10) == 0
    assert table.code == last.code == 4
    assert "not running" in table.out and "no coordinator runs" in table.error
    assert "ended in good order" in table.error
    before = RunStatus.model_validate_json(last.out)
    assert before.state == "stopped" and before.accepted > 0 and "error" in json.loads(last.error)
    assert refused.code == 3 and "refused" in refused.error and refused.out == ""
    with swarm.start("coordinator-2") as again:
        assert swarm.invite() == invite
        status = swarm.status()
        assert status is not None and status.policy_version == before.policy_version
        again.wait_for("updates", lambda: swarm.updates() >= before.updates + 2)
        assert node.process.poll() is None and swarm.accepted() > before.accepted
        assert call(COORDINATOR, "stop", swarm.root).code == 0


# a run that is not running


def test_a_run_that_never_ran_and_a_folder_that_is_no_run_are_said_apart(made: Path, tmp_path: Path):
    never, no_run = call(COORDINATOR, "status", made), call(COORDINATOR, "status", tmp_path)
    assert never.code == 4 and "echo-coordinator start" in never.error and never.out == ""
    assert no_run.code == 2 and "echo-coordinator init" in no_run.error
    assert call(COORDINATOR, "pause", made).code == call(COORDINATOR, "stop", made).code == 4


def test_join_names_every_dead_address_in_bounded_time(tmp_path: Path):
    peer = Identity.generate()
    boot = tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer.peer_id}" for port in (1, 2, 3))
    invite = str(Invite(run="a" * 32, key=peer.public_key, boot=boot))
    done = call(NODE, "join", "--state-dir", tmp_path, "--backend", "scripted", "--patience", "2", invite)
    assert done.code == 3 and "trying again in" in done.out
    # What to do next is said once, at the end.
    assert "ask who gave you the invite" in done.err and "ask who gave you" not in done.out
    assert all(address in done.error for address in boot) and "refused" in done.error


def test_a_mangled_invite_is_said_to_be_one():
    for command in ("status", "join"):
        done = call(NODE, command, "echo1-abcdef-00000000")
        assert done.code == 2 and "invite" in done.error
