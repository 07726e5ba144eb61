"""The folder that a web server serves as a mirror of a run: each file of each version on disk, under its digest.

    DIR/<run id>/<sha256, 64 hex digits>

The run may be running: its store is only read, never opened as a `VersionStore`, which would tidy up behind the back of
the coordinator. A file gets its name once it is whole, hashed and on disk; a version that the coordinator deletes
meanwhile is left out.

Others may write to DIR, so that nothing in it is believed: a file that is there already is hashed again, and one that
is a link, or that somebody else may change, is replaced, never written to. The run's folder in it must be no
link either: it would lead the files, and `--prune`, elsewhere.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.files import explained, free_bytes, publish_file, remove_file
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.checkpoint.shelf import read_manifests
from echo_swarm.checkpoint.store import SLACK_BYTES
from echo_swarm.errors import LocalFault, StorageFull, UsageError
from echo_swarm.manifest import Artifact
from echo_swarm.render import size

_NAME = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = ".adding-"
SAY_EVERY_BYTES = 4 << 30
"""While a file that is there already is hashed: some seconds."""

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Mirrored:
    """What a mirror's folder has now."""

    folder: Path
    versions: tuple[int, ...]
    added: int = 0
    added_bytes: int = 0
    kept: int = 0
    """Files that were there already."""
    replaced: int = 0
    """Of those added: in place of a file of that name that was not it, or that somebody else may change."""
    removed: int = 0
    named: bool = False
    """Whether the run's settings name a mirror."""
    faults: list[str] = field(default_factory=list[str])
    """Files that are missing or damaged in the run's store."""


def write_mirror(root: Path, out: Path, *, prune: bool, say: Say) -> Mirrored:
    """Add to the folder `out` what it lacks.

    Args:
        root: the run's folder.
        out: may have several runs, and files of others.
        prune: also remove files that no version on disk has any more.
        say: told of each file.

    Raises:
        UsageError: no run, nothing published yet, or `out` cannot be a mirror.
        StorageFull: no room for a copy; what was added stays.
        LocalFault: it cannot be written, or a stored file is damaged; the others were added all the same.

    """
    run = RunFolder(root)
    run.require()
    settings = load_settings(run)
    store = run.store / settings.run.id
    manifests = read_manifests(store)
    if not manifests:
        raise UsageError(f"{root} has not published a version yet; start it first")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder, which need not be there yet")
    if out.resolve().is_relative_to(run.root.resolve()):
        raise UsageError(f"{out} lies inside the run's folder, whose keys nobody may serve; choose another one")
    done = Mirrored(folder=out / settings.run.id, versions=tuple(manifests), named=bool(settings.publish.mirrors))
    with _owned(done.folder):
        wanted = set[bytes]()
        # The newest first: it is what most nodes want.
        for version, manifest in sorted(manifests.items(), reverse=True):
            for artifact in manifest.artifacts:
                if artifact.digest not in wanted:
                    wanted.add(artifact.digest)
                    _add(store / f"v{version:08d}", version, artifact, done, say)
        if prune:
            _prune(done, wanted)
    if done.faults:
        raise LocalFault(f"{'; '.join(done.faults)}; the other files are in {done.folder}")
    return done


@contextmanager
def _owned(folder: Path) -> Generator[None]:
    """Make the folder, keep other writers out, and remove what a killed one left."""
    with explained(folder):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is a link or a file and must be a folder of its own; remove it")
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UsageError(f"another command is writing {folder}; run this one again when it has ended") from e
        for path in folder.glob(f"{_UNFINISHED}*"):
            remove_file(path)
        yield
    finally:
        os.close(descriptor)


def _add(source: Path, version: int, artifact: Artifact, done: Mirrored, say: Say) -> None:
    path = done.folder / artifact.digest.hex()
    what = f"{artifact.file_name} of version {version}"
    taken = os.path.lexists(path)
    if taken and _is_good(path, artifact, what, say):
        done.kept += 1
        return
    unfinished = done.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
    try:
        how = _copy(source / artifact.file_name, unfinished, artifact.size_bytes)
        if file_digest(unfinished) != artifact.digest:
            done.faults.append(f"{what} is damaged in the run's store")
            return
        publish_file(unfinished, path)
    except FileNotFoundError:
        if (source / "manifest.bin").exists():
            done.faults.append(f"{what} is missing in the run's store")
        else:
            say(f"left out  {what}: the run no longer has it")
        return
    except OSError as e:
        done.faults.append(f"{what} cannot be read in the run's store ({e.strerror})")
        return
    finally:
        remove_file(unfinished)
    done.added += 1
    done.replaced += taken
    done.added_bytes += artifact.size_bytes
    instead = ", in place of a file that was not it," if taken else ""
    say(f"{how}{instead}  {what} ({size(artifact.size_bytes)}) as {path.name[:12]}…")


def _is_good(path: Path, artifact: Artifact, what: str, say: Say) -> bool:
    """Whether a file that is there already is what it should be, and nobody else may change it, under any name."""
    try:
        status = path.lstat()
        mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH
        if not mine or status.st_size != artifact.size_bytes:
            return False
        good = file_digest(path, _Progress(what, artifact.size_bytes, say)) == artifact.digest
    except OSError:
        return False
    if good:
        say(f"checked  {what} ({size(artifact.size_bytes)}): there already")
    return good


class _Progress:
    """Says how far the hashing of a large file is."""

    def __init__(self, what: str, total: int, say: Say) -> None:
        self._what, self._total, self._say, self._next = what, total, say, SAY_EVERY_BYTES

    def __call__(self, done: int) -> None:
        if self._next <= done < self._total:
            self._next = done + SAY_EVERY_BYTES
            self._say(f"checking  {self._what}: {size(done)} of {size(self._total)}")


def _copy(source: Path, unfinished: Path, size_bytes: int) -> str:
    """Link a file, or copy it where that cannot be; say which. Raises FileNotFoundError, StorageFull, LocalFault."""
    mode = source.lstat().st_mode
    # Else a web server could not read it, or anybody write it.
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH) == stat.S_IROTH:
        try:
            os.link(source, unfinished)
        except FileNotFoundError:
            raise
        except OSError:
            pass  # Another file system, or one without links.
        else:
            return "linked"
    if (free := free_bytes(unfinished.parent)) < size_bytes + SLACK_BYTES:
        raise StorageFull(
            f"{unfinished.parent} has {size(free)} left and the next file needs {size(size_bytes)}; free some space"
        )
    with source.open("rb") as original, explained(unfinished), unfinished.open("xb") as copy:
        shutil.copyfileobj(original, copy, 1 << 20)
        os.fchmod(copy.fileno(), 0o644)
        copy.flush()
        os.fsync(copy.fileno())
    return "copied"


def _prune(done: Mirrored, wanted: set[bytes]) -> None:
    for path in sorted(done.folder.iterdir()):
        if _NAME.fullmatch(path.name) and bytes.fromhex(path.name) not in wanted and path.is_file():
            done.removed += remove_file(path)
