"""File locks, so that only one rank per node tokenises."""
import contextlib
import fcntl
import os
import time


class LockTimeout(Exception):
    pass


def try_lock(path):
    """Descriptor of the locked file, None when somebody else has it."""
    fd = os.open(path + ".lock", os.O_CREAT | os.O_RDWR, 0o644)  # leak: when the lock is taken None is returned without closing it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return fd


def lock(path, timeout=600.0):
    end = time.monotonic() + timeout
    while True:
        fd = try_lock(path)  # clean: the loop goes on only when it is None
        if fd is not None:
            return fd
        if time.monotonic() > end:
            raise LockTimeout(path)
        time.sleep(0.5)


def unlock(fd):
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def locked(path):
    fd = lock(path)  # clean: unlocked in the finally
    try:
        yield
    finally:
        unlock(fd)
