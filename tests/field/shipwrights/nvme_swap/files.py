"""Open swap files; users are counted."""
import os


class SwapFile:
    def __init__(self, fd):
        self.fd = fd
        self.users = 0


class FileTable:
    def __init__(self, root):
        self.root = root
        self.files = {}

    def enter(self, key):
        f = self.files.get(key)
        if f is None:
            fd = os.open(os.path.join(self.root, key), os.O_RDWR | os.O_CREAT)  # clean: near miss, in files until the last leave() closes it
            f = self.files[key] = SwapFile(fd)
        f.users += 1
        return f

    def leave(self, key):
        f = self.files[key]
        f.users -= 1
        if f.users == 0:
            os.close(f.fd)
            del self.files[key]
