"""`echo-coordinator mirror`: the folder that a web server serves."""

import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from echo_coordinator.commands import mirror
from echo_coordinator.commands.mirror import Mirrored, write_mirror
from echo_coordinator.commands.mirror_check import check_mirror
from echo_coordinator.demo.run_file import to_toml
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import LocalFault, SettingsError, StorageFull, Unavailable, UsageError
from tests.support.hostile_http import serving_files
from tests.support.small_disks import small_disk
from tests.swarm.support.fake_coordinator import FakeCoordinator

GGUF = {"f32": b"g" * 70_000}


class Run:
    """A run's folder with versions in its store, held open by their publisher."""

    def __init__(self, folder: Path) -> None:
        self.root, self.out = folder / "run", folder / "mirror"
        self.coordinator = FakeCoordinator(RunFolder(self.root).store)
        settings = {
            "run": {"id": self.coordinator.run_id, "name": "r"},
            "environment": {"name": "reasoning_gym:chain_sum"},
        }
        RunFolder(self.root).settings.write_text(to_toml(settings))
        self.lines: list[str] = []

    def publish(self, version: int) -> list[Path]:
        """Return the version's files."""
        self.coordinator.publish(version, gguf=GGUF)
        return [self.folder(version) / name for name in ("model.safetensors", "model-f32.gguf")]

    def folder(self, version: int) -> Path:
        return self.coordinator.store.version_folder(version)

    def mirror(self, *, prune: bool = False) -> Mirrored:
        return write_mirror(self.root, self.out, prune=prune, say=self.lines.append)

    @property
    def served(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.out / self.coordinator.run_id).iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def named(*paths: Path) -> dict[str, bytes]:
    return {sha256(path.read_bytes()).hexdigest(): path.read_bytes() for path in paths}


def test_each_file_of_each_version_lies_under_its_digest_and_again_only_new_ones_are_added(run: Run):
    first = run.publish(0)
    done = run.mirror()
    assert run.served == named(*first)
    assert (done.versions, done.added, done.kept, done.added_bytes) == (
        (0,),
        2,
        0,
        sum(p.stat().st_size for p in first),
    )
    assert [line.partition(" (")[0] for line in run.lines] == [
        "linked  model.safetensors of version 0",
        "linked  model-f32.gguf of version 0",
    ]
    second = run.publish(3)
    done = run.mirror()
    assert run.served == named(*first, *second)
    # The gguf file is the same in both versions.
    assert (done.versions, done.added, done.kept) == ((0, 3), 1, 2)
    assert run.mirror().added == 0


def test_what_no_version_names_is_removed_only_when_asked_and_nothing_of_others(run: Run):
    first, second = run.publish(0), run.publish(1)
    run.mirror()
    shutil.rmtree(run.folder(0))
    folder = run.out / run.coordinator.run_id
    (folder / "index.html").write_text("mine")
    (folder / ".adding-0123").write_text("of a command that was killed")
    run.mirror()
    assert set(named(*second)) < set(run.served) and ".adding-0123" not in run.served
    gone = set(run.served) - set(named(*second)) - {"index.html"}
    done = run.mirror(prune=True)
    assert run.served == {**named(*second), "index.html": b"mine"}
    assert done.removed == len(gone) == 1
    assert not any(path.exists() for path in first)


def test_a_file_whose_name_is_taken_by_a_shorter_one_is_written_again(run: Run):
    files = run.publish(0)
    folder = run.out / run.coordinator.run_id
    folder.mkdir(parents=True)
    (folder / sha256(files[0].read_bytes()).hexdigest()).write_bytes(b"cut")
    assert run.mirror().added == 2 and run.served == named(*files)


def test_a_file_of_the_right_length_and_another_content_is_replaced(run: Run, monkeypatch: pytest.MonkeyPatch):
    files = run.publish(0)
    run.mirror()
    (name,) = named(files[0])
    path = run.out / run.coordinator.run_id / name
    path.unlink()
    path.write_bytes(bytes(files[0].stat().st_size))
    monkeypatch.setattr(mirror, "SAY_EVERY_BYTES", 1)
    run.lines.clear()
    done = run.mirror()
    assert (done.added, done.replaced, done.kept) == (1, 1, 1) and run.served == named(*files)
    assert any(line.startswith("linked, in place of a file that was not it,") for line in run.lines)
    assert any(line.startswith("checked  model-f32.gguf of version 0 (70") for line in run.lines)
    assert run.mirror().replaced == 0


@pytest.mark.parametrize("how", ["symbolic link", "hard link", "of somebody else", "everybody may write it"])
def test_what_lies_under_a_digest_is_replaced_and_never_written_to(run: Run, tmp_path: Path, how: str):
    files = run.publish(0)
    folder, elsewhere = run.out / run.coordinator.run_id, tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    content = b"of others" if how == "hard link" else files[0].read_bytes()
    elsewhere.write_bytes(content)
    (name,) = named(files[0])
    match how:
        case "symbolic link":
            (folder / name).symlink_to(elsewhere)
        case _:
            os.link(elsewhere, folder / name)
    if how == "of somebody else":
        try:
            os.chown(elsewhere, 12_345, -1)
        except PermissionError:
            pytest.skip("only root can give a file away")
    elsewhere.chmod(0o666 if how == "everybody may write it" else 0o644)
    done = run.mirror()
    assert (done.added, done.replaced) == (2, 1) and run.served == named(*files)
    assert elsewhere.read_bytes() == content
    assert not (folder / name).is_symlink() and (folder / name).stat().st_ino != elsewhere.stat().st_ino


def test_the_runs_folder_in_it_may_not_be_a_link(run: Run, tmp_path: Path):
    run.publish(0)
    target = tmp_path / "target"
    target.mkdir()
    (target / ("ab" * 32)).write_text("of others")
    run.out.mkdir()
    (run.out / run.coordinator.run_id).symlink_to(target)
    with pytest.raises(UsageError, match="is a link or a file and must be a folder of its own"):
        run.mirror(prune=True)
    assert [path.read_text() for path in target.iterdir()] == ["of others"]
    (run.out / run.coordinator.run_id).unlink()
    (run.out / run.coordinator.run_id).symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="is a link or a file"):
        run.mirror()


def test_a_file_that_others_may_not_read_is_copied_and_can_be_served(run: Run):
    files = run.publish(0)
    for path in files:
        path.chmod(0o600)
    run.mirror()
    assert run.lines[0].startswith("copied") and run.served == named(*files)
    assert {path.stat().st_mode & 0o777 for path in (run.out / run.coordinator.run_id).iterdir()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_damaged_or_missing_file_is_named_and_not_served_and_the_others_are(run: Run):
    damaged, good = run.publish(0)
    missing, _ = run.publish(1)
    damaged.write_bytes(b"\xff" + damaged.read_bytes()[1:])
    missing.unlink()
    with pytest.raises(LocalFault) as caught:
        run.mirror()
    assert "model.safetensors of version 0 is damaged" in str(caught.value)
    assert "model.safetensors of version 1 is missing" in str(caught.value)
    assert run.served == named(good)


def test_a_version_that_the_coordinator_deletes_meanwhile_is_left_out(run: Run):
    run.publish(0)
    newer = run.publish(1)

    def say(line: str) -> None:
        run.lines.append(line)
        shutil.rmtree(run.folder(0), ignore_errors=True)

    write_mirror(run.root, run.out, prune=False, say=say)
    assert run.served == named(*newer)
    assert run.lines[-1] == "left out  model.safetensors of version 0: the run no longer has it"


def test_the_store_of_a_running_coordinator_is_left_as_it_is(run: Run):
    run.publish(0)
    under_way = run.folder(0) / "manifest.bin.tmp"
    under_way.write_bytes(b"half")
    before = sorted(run.coordinator.store.folder.rglob("*"))
    run.mirror(prune=True)
    assert sorted(run.coordinator.store.folder.rglob("*")) == before


def test_what_cannot_be_a_mirror_is_refused(run: Run, tmp_path: Path):
    with pytest.raises(UsageError, match="has not published a version yet"):
        run.mirror()
    run.publish(0)
    with pytest.raises(UsageError, match="lies inside the run's folder"):
        write_mirror(run.root, run.root / "www", prune=False, say=print)
    with pytest.raises(UsageError, match="is no run"):
        write_mirror(tmp_path / "nothing", run.out, prune=False, say=print)
    run.out.write_text("a file")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        run.mirror()


def test_where_it_is_served_can_be_checked(run: Run):
    run.publish(0)
    run.mirror()
    with serving_files() as files:
        served = {f"/{run.coordinator.run_id}/{name}": content for name, content in run.served.items()}
        files.content = dict(served)
        assert check_mirror(run.root, files.url) == 2
        for manner, what in {"whole": "answers with the whole file", "wrong bytes": "sends wrong bytes"}.items():
            files.manner, files.at_first = manner, manner == "whole"
            with pytest.raises(Unavailable, match=rf"model.safetensors of version 0 from {files.url}: it {what}"):
                check_mirror(run.root, files.url)
        files.content, files.manner = {}, "good"
        with pytest.raises(Unavailable, match="does not have this file"):
            check_mirror(run.root, files.url)
    with pytest.raises(Unavailable, match="cannot be reached"):
        check_mirror(run.root, files.url)
    with pytest.raises(UsageError, match="is no base URL"):
        check_mirror(run.root, "example.org")


def test_on_another_file_system_files_are_copied_until_it_is_full(run: Run, tmp_path: Path):
    with small_disk(tmp_path / "disk", 4) as disk:
        run.out = disk / "mirror"
        first = run.publish(0)
        run.mirror()
        assert run.served == named(*first) and run.lines[0].startswith("copied")
        run.coordinator.publish(1, size_bytes=4_000_000)
        with pytest.raises(StorageFull, match=r"MB left and the next file needs 4\.0 MB"):
            run.mirror()
        assert run.served == named(*first)


def test_two_commands_do_not_write_one_folder_at_the_same_time(run: Run):
    run.publish(0)

    def again(_line: str) -> None:
        with pytest.raises(UsageError, match="another command is writing"):
            run.mirror()

    write_mirror(run.root, run.out, prune=False, say=again)


@pytest.mark.parametrize("url", ["ftp://x/", "files.example.org", "https://a:b@x/"])
def test_settings_name_only_plain_urls(run: Run, url: str):
    path = RunFolder(run.root).settings
    path.write_text(f'{path.read_text()}\n[publish]\nmirrors = ["{url}"]\n')
    with pytest.raises(SettingsError, match=r"publish\.mirrors.*is no base URL"):
        run.mirror()
