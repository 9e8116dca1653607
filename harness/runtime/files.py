"""Files in a folder that others may have put things into: replaced whole, and read only if they are regular files."""

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(file: Path, text: str | Iterable[str]) -> None:
    """Write a file under another name and rename it: a reader sees the old file or the whole new one.

    Nothing is followed: not a link of the file's name, which is replaced, and not one of the other name, which is new
    and not to be guessed. Only the user can read the file.
    """
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as output:
            output.writelines([text] if isinstance(text, str) else text)
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def is_regular(file: Path) -> bool:
    """Return whether this is a file, and not a link, a pipe or a device, from which a read may never end."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def is_own_folder(folder: Path) -> bool:
    """Return whether this is a folder of this user, and not a link, into which nobody else can put files."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
