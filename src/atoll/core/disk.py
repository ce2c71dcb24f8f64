"""Full disks: errors of one line, with the file, the bytes that it needs and the bytes that are free."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.core.errors import AtollError


def is_full(error: BaseException) -> bool:
    """Return whether an error means a full disk or an exceeded quota."""
    # Errors of safetensors have a text and no number.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def full_error(file: Path, need: int | None = None) -> AtollError:
    """Return the error for a file that did not fit on its disk."""
    needs = "" if need is None else f"the file needs {size_text(need)}, and "
    return AtollError(
        f"{file}: the disk is full: {needs}{size_text(free_bytes(file))} is free. Free some space, then run the same "
        "command again"
    )


@contextmanager
def explained(file: Path, need: int | None = None, *, temporary: Path | None = None) -> Iterator[None]:
    """Raise `full_error` for a file that is written here and does not fit; remove the part that was written.

    `temporary` is the name under which it is written, if that is not its own.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        (temporary or file).unlink(missing_ok=True)
        raise full_error(file, need) from error


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a file or folder, which need not exist yet."""
    return shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.exists())).free


def size_text(size: float) -> str:
    """Format a number of bytes as GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
