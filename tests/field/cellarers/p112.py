"""Scratch directories for build jobs, wiped between jobs."""
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager


class ScratchDirs:
    def __init__(self, count, root=None):
        self._clean = [tempfile.mkdtemp(prefix="build-", dir=root) for _ in range(count)]
        self._dirty = set()

    def occupy(self):
        path = self._clean.pop()
        self._dirty.add(path)
        return path

    def evacuate(self, path):
        for name in os.listdir(path):
            full = os.path.join(path, name)
            shutil.rmtree(full) if os.path.isdir(full) else os.unlink(full)
        self._dirty.discard(path)
        self._clean.append(path)

    @contextmanager
    def room(self):
        path = self.occupy()
        try:
            yield path
        finally:
            self.evacuate(path)


def compile_unit(dirs, source):
    with dirs.room() as path:  # clean: the with evacuates it
        shutil.copy(source, path)
        return subprocess.call(["cc", "-c", os.path.basename(source)], cwd=path)


def unpack(dirs, archive):
    path = dirs.occupy()  # leak: a failed unpack returns None and nobody has the path
    if subprocess.call(["tar", "-xf", archive, "-C", path]) != 0:
        return None
    return path


def inspect(dirs, archive):
    path = unpack(dirs, archive)  # clean: evacuated unless None
    if path is None:
        return []
    names = sorted(os.listdir(path))
    dirs.evacuate(path)
    return names


def archive_size(dirs, archive):
    path = unpack(dirs, archive)  # leak: the unpacked directory is not evacuated
    if path is None:
        return 0
    return sum(os.path.getsize(os.path.join(path, n)) for n in os.listdir(path))
