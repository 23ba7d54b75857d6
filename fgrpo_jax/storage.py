"""Files that a run writes: whole or not at all, and one sentence where the disk refuses."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

from fgrpo_jax import StorageError, UserError

_REFUSALS = [
    getattr(errno, name)
    for name in (
        "EACCES EPERM EROFS EIO ENOSPC EDQUOT EFBIG EMFILE ENFILE ESTALE EBUSY ENODEV ENXIO "
        "ENOTCONN ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH ENETUNREACH ETIMEDOUT"
    ).split()
]
_WORDS = [os.strerror(number) for number in _REFUSALS]
_WORDS += "PERMISSION_DENIED UNAUTHENTICATED UNAVAILABLE DEADLINE_EXCEEDED".split()  # a bucket's
_CLIENTS = "gcsfs google aiohttp requests".split()  # packages whose errors are a bucket's

MENDED = "once that is mended, the same command goes on from the last checkpoint"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or holds."""
    yield error
    inner = [*getattr(error, "exceptions", ()), error.__cause__ or error.__context__]
    for one in inner:
        if one is not None:
            yield from causes(one)


def reason(error: BaseException) -> str | None:
    """What a disk or bucket that refuses says in an error or its causes, which may tell of it in
    text alone; None where nothing does, as of a file that is missing or holds something else."""
    for one in causes(error):
        if isinstance(one, OSError) and not isinstance(one, FileNotFoundError | IsADirectoryError):
            return one.strerror or first_line(one)
        for word in _WORDS:
            if word in str(one):
                return word
        if type(one).__module__.partition(".")[0] in _CLIENTS:
            return first_line(one)
    return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def at(path: os.PathLike[str] | str) -> Iterator[None]:
    """Turns what the disk refuses into a StorageError that names the path."""
    try:
        yield
    except (StorageError, UserError):
        raise
    except Exception as error:
        why = reason(error)
        if why is None and isinstance(error, OSError):
            why = error.strerror or first_line(error)
        if why is None:
            raise
        raise StorageError(f"{path}: {why}; {MENDED}") from error


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file, and its folders, whole or not at all. Raises StorageError."""
    partial = path.with_name(path.name + ".partial")
    with at(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def settle(path: str | os.PathLike[str]) -> None:
    """Returns when what a file or folder holds would outlast a loss of power, where the disk can
    tell."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def append(path: pathlib.Path, line: str) -> None:
    """Adds to a file that `write` began. Raises StorageError."""
    with at(path), path.open("a") as file:
        file.write(line)
