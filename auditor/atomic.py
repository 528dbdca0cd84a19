"""Files that are there whole or not at all, whatever kills us meanwhile."""

import os
import tempfile
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Replace `file` by `data` in one step, keeping its mode bits; a link is written through."""
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():  # /dev/stdout and pipes cannot be replaced, only written to
        target.write_bytes(data)
        return
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        temporary.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process' umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
