"""Loading model shards: file handles, download permits, per model locks."""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import struct
import threading
import time
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

log = logging.getLogger("serve.loader")

# At most four shards are being downloaded or hashed by this process.
_permits = threading.BoundedSemaphore(4)


class LockRegistry:
    """One counted lock per model name, removed with its last user."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._locks: Dict[str, Tuple[threading.Lock, int]] = {}

    def enter(self, name: str) -> threading.Lock:
        """Registers the caller as a user of the lock, without locking it."""
        with self._mu:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = (lock, users + 1)
            return lock

    def leave(self, name: str) -> None:
        with self._mu:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)


class HandleCache:
    """Open shard files with reference counts. At most `keep` idle ones stay open."""

    def __init__(self, keep: int = 8) -> None:
        self.keep = keep
        self._open: Dict[str, BinaryIO] = {}
        self._refs: Dict[str, int] = {}

    def get_handle(self, path: str) -> BinaryIO:
        fh = self._open.get(path)
        if fh is None:
            fh = open(path, "rb")  # clean: near miss, kept in the table, closed by put_handle and close_all
            self._open[path] = fh
            self._refs[path] = 0
        self._refs[path] += 1
        return fh

    def put_handle(self, path: str) -> None:
        self._refs[path] -= 1
        idle = [p for p, n in self._refs.items() if n == 0]
        for p in idle[self.keep:]:
            self._open.pop(p).close()
            del self._refs[p]

    def close_all(self) -> None:
        for fh in self._open.values():
            fh.close()
        self._open.clear()
        self._refs.clear()


class ShardReader:
    """A memory mapped shard."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh = open(path, "rb")  # clean: closed by close
        self._map = mmap.mmap(self._fh.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed by close
        self.header = self._read_header()

    def _read_header(self) -> Dict[str, Dict]:
        (n,) = struct.unpack("<Q", self._map[:8])
        return json.loads(self._map[8:8 + n])

    def tensor(self, name: str) -> bytes:
        lo, hi = self.header[name]["data_offsets"]
        return self._map[lo:hi]

    def close(self) -> None:
        self._map.close()
        self._fh.close()


class IndexFile:
    """Appends what has been loaded to a journal beside the shards."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.journal = open(os.path.join(root, "loaded.log"), "a")  # leak: close sets it to None, unclosed
        self.lines = 0

    def note(self, name: str, nbytes: int) -> None:
        self.journal.write(f"{time.time():.3f} {name} {nbytes}\n")
        self.lines += 1

    def close(self) -> int:
        self.journal.flush()
        self.journal = None
        return self.lines


class Loader:
    def __init__(self, root: str, locks: LockRegistry, handles: HandleCache) -> None:
        self.root = root
        self.locks = locks
        self.handles = handles
        self.loaded: Dict[str, int] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name + ".safetensors")

    def verify(self, name: str, digest: str) -> bool:
        _permits.acquire()  # leak: an absent file returns without the release
        path = self._path(name)
        if not os.path.exists(path):
            log.warning("%s is absent", path)
            return False
        h = hashlib.sha256()
        with open(path, "rb") as fh:  # clean: closed by with
            h.update(fh.read())
        _permits.release()
        return h.hexdigest() == digest

    def download(self, name: str, fetch: Callable[[str], bytes], tries: int = 3) -> bool:
        for n in range(tries):
            if not _permits.acquire(timeout=5.0):  # clean: near miss, not held on continue, else in finally
                continue
            try:
                data = fetch(name)
                if data:
                    with open(self._path(name), "wb") as out:  # clean: closed by with
                        out.write(data)
                    return True
            finally:
                _permits.release()
            time.sleep(0.1 * n)
        return False

    def load(self, name: str) -> Optional[bytes]:
        lock = self.locks.enter(name)  # leak: a model that is loaded already returns without leave
        with lock:
            if name in self.loaded:
                return None
            data = self._read(name)
            self.loaded[name] = len(data)
        self.locks.leave(name)
        return data

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        lock = self.locks.enter(name)  # clean: left in finally, after the lock
        lock.acquire()  # clean: released in finally
        try:
            yield
        finally:
            lock.release()
            self.locks.leave(name)

    def reload(self, name: str) -> int:
        with self.exclusive(name):  # clean: ended by the context manager
            data = self._read(name)
            self.loaded[name] = len(data)
            return len(data)

    def _read(self, name: str) -> bytes:
        path = self._path(name)
        fh = self.handles.get_handle(path)  # clean: put after the read
        fh.seek(0)
        data = fh.read()
        self.handles.put_handle(path)
        return data

    def read_headers(self, names: List[str]) -> Dict[str, int]:
        sizes: Dict[str, int] = {}
        for name in names:
            path = self._path(name)
            fh = self.handles.get_handle(path)  # leak: a truncated file continues without put_handle
            fh.seek(0)
            head = fh.read(8)
            if len(head) < 8:
                log.warning("%s is truncated", path)
                continue
            (sizes[name],) = struct.unpack("<Q", head)
            self.handles.put_handle(path)
        return sizes

    def first_with(self, names: List[str], tensor: str) -> Optional[ShardReader]:
        for name in names:
            reader = ShardReader(self._path(name))  # clean: near miss, returned or closed in each round
            if tensor in reader.header:
                return reader
            reader.close()
        return None

    def find_tensor(self, names: List[str], tensor: str) -> Optional[bytes]:
        reader = self.first_with(names, tensor)  # leak: the reader is used once and stays open
        if reader is None:
            return None
        return reader.tensor(tensor)

    def metadata(self, name: str) -> Dict:
        with contextlib.closing(ShardReader(self._path(name))) as reader:  # clean: closed by closing
            return dict(reader.header.get("__metadata__", {}))
