"""Reference-counted file handles. open_shard() and close_shard() come in pairs."""
import mmap
import os
import threading


class ReadHandle:
    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)  # clean: kept in the handle, shut() closes it
        self.map = None
        self.refs = 0

    def bytes_at(self, off, n):
        if self.map is not None:
            return self.map[off:off + n]
        return os.pread(self.fd, n, off)

    def ensure_map(self):
        if self.map is None:
            self.map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)  # clean: kept in the handle, shut() closes it

    def shut(self):
        if self.map is not None:
            self.map.close()
        os.close(self.fd)


class HandleTable:
    def __init__(self, root, limit):
        self.root = root
        self.limit = limit
        self._by_name = {}
        self._mu = threading.Lock()

    def open_shard(self, name):
        """A handle with one more reference, or None if the table is full."""
        with self._mu:
            h = self._by_name.get(name)
            if h is None:
                if len(self._by_name) >= self.limit:
                    return None
                h = self._by_name[name] = ReadHandle(os.path.join(self.root, name))  # clean: stays in the table until the last close_shard()
            h.refs += 1
            return h

    def close_shard(self, h):
        with self._mu:
            h.refs -= 1
            if h.refs == 0:
                del self._by_name[os.path.basename(h.path)]
                h.shut()

    def open_mapped(self, name):
        h = self.open_shard(name)  # leak: not closed when the file is empty and cannot be mapped
        if h is None:
            return None
        if os.fstat(h.fd).st_size == 0:
            return None
        h.ensure_map()
        return h

    def open_group(self, names):
        """All or none."""
        got = []
        for name in names:
            h = self.open_shard(name)  # clean: near miss, returned in the list or closed with the rest when one is refused
            if h is None:
                for g in got:
                    self.close_shard(g)
                return None
            got.append(h)
        return got
