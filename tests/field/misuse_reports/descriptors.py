"""File descriptors closed twice. Written in our own words after the bug reports that each function names."""

import contextlib
import os
import tempfile


def stage_config(path, text):
    """After cc-remote PR 27: the file object has closed the number; the handler closes whoever has it now."""
    fd, staged = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "w") as handle:
            handle.write(text)
        os.replace(staged, path)
    except BaseException:
        os.close(fd)
        os.unlink(staged)
        raise


def stage_config_fixed(path, text):
    fd, staged = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        handle = os.fdopen(fd, "w")
    except BaseException:
        os.close(fd)
        raise
    try:
        with handle:
            handle.write(text)
        os.replace(staged, path)
    except BaseException:
        os.unlink(staged)
        raise


def write_checkpoint(folder, text):
    """After AutoResearchClaw PR 98: open() took the number over, and writing failed."""
    fd, staged = tempfile.mkstemp(dir=folder)
    try:
        with open(fd, "w") as handle:
            handle.write(text)
    except OSError:
        os.close(fd)
        raise
    os.replace(staged, os.path.join(folder, "checkpoint.json"))


def write_checkpoint_fixed(folder, text):
    fd, staged = tempfile.mkstemp(dir=folder)
    os.close(fd)
    with open(staged, "w") as handle:
        handle.write(text)
    os.replace(staged, os.path.join(folder, "checkpoint.json"))


def save_settings(path, text, mode):
    """After talebook PR 945: as above, and the error that would tell is swallowed."""
    fd, staged = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        os.fchmod(fd, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        os.replace(staged, path)
    except Exception:
        try:
            os.close(fd)
        except OSError:
            pass
        raise


def replace_manifest(folder, content):
    """After ArcReel PR 1778: the same, under contextlib.suppress."""
    fd, staged = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(content)
        os.replace(staged, os.path.join(folder, "manifest"))
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def open_nofollow(parent, name):
    """After LongHorizon-Harness issue 32: the inner finally closes the folder, the outer handler does so again."""
    parent_fd = os.open(parent, os.O_RDONLY)
    try:
        try:
            return os.open(name, os.O_RDONLY, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
    except OSError:
        os.close(parent_fd)
        raise


def open_nofollow_fixed(parent, name):
    parent_fd = os.open(parent, os.O_RDONLY)
    try:
        return os.open(name, os.O_RDONLY, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


class FileWrapper:
    """After bpo-30980: close() twice closes a number that somebody else may have by then."""

    def __init__(self, fd):
        self.fd = os.dup(fd)

    def close(self):
        os.close(self.fd)

    def __del__(self):
        self.close()


class FileWrapperFixed:
    def __init__(self, fd):
        self.fd = os.dup(fd)

    def close(self):
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        os.close(fd)

    def __del__(self):
        self.close()
