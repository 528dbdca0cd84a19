"""Scratch directories, kept by the module and used again."""
import os
import shutil
import tempfile

_root = tempfile.gettempdir()
_wiped = []
_dirty = {}
_serial = 0


def claim_dir(tag):
    global _serial
    if _wiped:
        path = _wiped.pop()
    else:
        _serial += 1
        path = os.path.join(_root, f"job{os.getpid()}_{_serial}")
        os.makedirs(path)
    _dirty[path] = tag
    return path


def wipe_dir(path):
    _dirty.pop(path, None)
    for name in os.listdir(path):
        full = os.path.join(path, name)
        shutil.rmtree(full) if os.path.isdir(full) else os.unlink(full)
    _wiped.append(path)


def unpack_and_count(archive):
    path = claim_dir("unpack")  # clean: wiped in finally
    try:
        shutil.unpack_archive(archive, path)
        return len(os.listdir(path))
    finally:
        wipe_dir(path)


def unpack_one(archive, member):
    path = claim_dir("one")  # leak: not wiped when the member is missing
    shutil.unpack_archive(archive, path)
    full = os.path.join(path, member)
    if not os.path.exists(full):
        return None
    with open(full, "rb") as f:
        data = f.read()
    wipe_dir(path)
    return data


class Build:
    def __init__(self, name):
        self.name = name
        self.dir = claim_dir(name)  # clean: stored, wiped by close

    def close(self):
        wipe_dir(self.dir)

    def retry(self, compiler, tries):
        for _ in range(tries):
            path = claim_dir(self.name)  # leak: a good build breaks out with the directory
            if compiler(path) == 0:
                break
            wipe_dir(path)
