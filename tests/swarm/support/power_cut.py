"""What is left of a folder when the power goes: of each file and folder, the content and the names flushed last.

Nothing else survives: a file whose name was not flushed with its folder is gone, a removed one whose folder was not
flushed is back, a flushed name of an unflushed file is an empty file. Real disks keep more than that, and in any order.
"""

import os
import stat
from pathlib import Path

Names = dict[str, tuple[int, bool]]
"""Of what lies in a folder: name → inode, whether it is a folder."""


class FlushedTree:
    """Follows what of a folder is on the disk for good, through `os.fsync`. Linux only.

    Args:
        root: the folder; what is in it at the beginning has been flushed.

    """

    def __init__(self, root: Path) -> None:
        self._root = root.stat().st_ino
        self._files: dict[int, tuple[int, bytes]] = {}
        """Mode and content."""
        self._folders: dict[int, Names] = {}
        self._held: list[int] = []
        """Descriptors of all that was flushed, so that no inode is used for something else."""
        self._fsync = os.fsync
        for path in (root, *root.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            self._note(descriptor)
            os.close(descriptor)

    def watch(self) -> None:
        """Begin, for the rest of this process."""

        def fsync(file: int) -> None:
            self._fsync(file)
            self._note(file)

        os.fsync = fsync

    def write(self, target: Path) -> None:
        """Write what would be left now as a folder that is not there yet."""
        self._write_folder(self._root, target)

    def _note(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        if about.st_ino not in self._files and about.st_ino not in self._folders:
            self._held.append(os.dup(descriptor))
        if stat.S_ISDIR(about.st_mode):
            with os.scandir(descriptor) as entries:
                self._folders[about.st_ino] = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        else:
            # By another descriptor: this one's may be for writing only.
            self._files[about.st_ino] = about.st_mode, Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _write_folder(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_folder) in self._folders.get(inode, {}).items():
            if is_folder:
                self._write_folder(child, target / name)
            else:
                mode, content = self._files.get(child, (stat.S_IRUSR | stat.S_IWUSR, b""))
                (target / name).write_bytes(content)
                (target / name).chmod(stat.S_IMODE(mode))
