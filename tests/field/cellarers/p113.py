"""Table files of an LSM store are shared: each file is open once and counted."""
import os


class FileTable:
    def __init__(self):
        self._by_path = {}
        self._refs = {}

    def hold(self, path):
        fd = self._by_path.get(path)
        if fd is None:
            fd = self._by_path[path] = os.open(path, os.O_RDONLY)
            self._refs[fd] = 0
        self._refs[fd] += 1
        return fd

    def unhold(self, fd):
        self._refs[fd] -= 1
        if self._refs[fd] == 0:
            del self._refs[fd]
            self._by_path = {p: f for p, f in self._by_path.items() if f != fd}
            os.close(fd)


class TableReader:
    def __init__(self, files, path):
        self.files = files
        self.fd = files.hold(path)  # clean: kept by the reader until close()

    def block(self, offset, size):
        return os.pread(self.fd, size, offset)

    def close(self):
        self.files.unhold(self.fd)


def has_magic(files, path, magic):
    fd = files.hold(path)  # leak: only the matching branch lets go
    if os.pread(fd, len(magic), 0) == magic:
        files.unhold(fd)
        return True
    return False


def footer(files, path, size):
    fd = files.hold(path)  # clean: let go in finally
    try:
        end = os.fstat(fd).st_size
        return os.pread(fd, size, end - size)
    finally:
        files.unhold(fd)


def newest(files, paths):
    best, best_time = None, -1.0
    for path in paths:
        fd = files.hold(path)  # leak: empty files are skipped while held
        st = os.fstat(fd)
        if st.st_size == 0:
            continue
        if st.st_mtime > best_time:
            best, best_time = path, st.st_mtime
        files.unhold(fd)
    return best
