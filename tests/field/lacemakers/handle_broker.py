"""Hands out exported GPU memory handles between the processes of one node."""
import json
import logging
import os
import threading

log = logging.getLogger("broker")


class HandleTable:
    """Small integers for exported allocations. issue() takes one, revoke() frees it."""

    def __init__(self, size=4096):
        self.size = size
        self._entries = {}
        self._next = 0
        self._lock = threading.Lock()

    def issue(self, owner, nbytes):
        with self._lock:
            if len(self._entries) >= self.size:
                return None
            while self._next in self._entries:
                self._next = (self._next + 1) % self.size
            handle = self._next
            self._entries[handle] = (owner, nbytes)
            return handle

    def revoke(self, handle):
        with self._lock:
            self._entries.pop(handle, None)

    def issue_named(self, owner, nbytes, names):
        handle = self.issue(owner, nbytes)  # leak: a name that is in use returns None and leaves the entry
        if handle is None:
            return None
        if owner in names:
            return None
        names[owner] = handle
        return handle

    def usage(self, owner):
        return sum(n for o, n in self._entries.values() if o == owner)


class QuotaTable:
    """A HandleTable with a byte quota for each owner."""

    def __init__(self, table, quota):
        self.table = table
        self.quota = quota
        self._bytes = {}

    def charge(self, owner, nbytes):
        used = self._bytes.get(owner, 0)
        if used + nbytes > self.quota:
            return False
        self._bytes[owner] = used + nbytes
        return True

    def uncharge(self, owner, nbytes):
        self._bytes[owner] -= nbytes

    def issue(self, owner, nbytes):
        if not self.charge(owner, nbytes):  # clean: near miss, uncharged when the table is full, else in revoke()
            return None
        handle = self.table.issue(owner, nbytes)  # clean: returned to the caller
        if handle is None:
            self.uncharge(owner, nbytes)
        return handle

    def issue_late(self, owner, nbytes):
        handle = self.table.issue(owner, nbytes)  # leak: over quota the handle is not revoked
        if handle is None:
            return None
        if not self.charge(owner, nbytes):  # clean: charged with the handle that goes to the caller
            return None
        return handle

    def revoke(self, owner, handle, nbytes):
        self.table.revoke(handle)
        self.uncharge(owner, nbytes)


class Exporter:
    def __init__(self, quotas, driver, sock):
        self.quotas = quotas
        self.driver = driver
        self.sock = sock
        self.exports = {}

    def export(self, owner, ptr, nbytes):
        handle = self.quotas.issue(owner, nbytes)  # clean: in exports, which withdraw() empties
        if handle is None:
            log.warning("%s is at its quota", owner)
            return None
        self.exports.setdefault(owner, []).append((handle, nbytes))
        self.driver.publish(handle, ptr, nbytes)
        return handle

    def export_checked(self, owner, ptr, nbytes):
        handle = self.quotas.issue(owner, nbytes)  # leak: a failed publish returns None without revoke
        if handle is None:
            return None
        if self.driver.publish(handle, ptr, nbytes) != 0:
            log.error("publish of %#x failed", ptr)
            return None
        self.exports.setdefault(owner, []).append((handle, nbytes))
        return handle

    def export_fallback(self, owner, ptr, nbytes):
        handle = self.quotas.issue(owner, nbytes)  # clean: near miss, only rebound when nothing came
        if handle is None:
            self.withdraw(owner)
            handle = self.quotas.issue(owner, nbytes)  # clean: in exports
        if handle is None:
            return None
        self.exports.setdefault(owner, []).append((handle, nbytes))
        self.driver.publish(handle, ptr, nbytes)
        return handle

    def withdraw(self, owner):
        for handle, nbytes in self.exports.pop(owner, []):
            self.quotas.revoke(owner, handle, nbytes)

    def send_all(self, owner, spans):
        sent = 0
        for ptr, nbytes in spans:
            handle = self.quotas.issue(owner, nbytes)  # leak: a refused span breaks out of the loop with its handle
            if handle is None:
                break
            self.sock.sendall(json.dumps({"handle": handle}).encode())
            if self.sock.recv(1) != b"k":
                break
            self.quotas.revoke(owner, handle, nbytes)
            sent += 1
        return sent

    def send_each(self, owner, spans):
        sent = 0
        for ptr, nbytes in spans:
            handle = self.quotas.issue(owner, nbytes)  # clean: near miss, finally revokes before the break leaves the loop
            if handle is None:
                break
            try:
                self.sock.sendall(json.dumps({"handle": handle}).encode())
                if self.sock.recv(1) != b"k":
                    break
                sent += 1
            finally:
                self.quotas.revoke(owner, handle, nbytes)
        return sent


class DescriptorCache:
    """Open descriptors of dma-buf files by path."""

    def __init__(self, limit=64):
        self.limit = limit
        self._fds = {}

    def get(self, path):
        fd = self._fds.get(path)
        if fd is None:
            fd = os.open(path, os.O_RDWR)  # clean: near miss, in _fds, and the oldest is closed above the limit
            self._fds[path] = fd
            if len(self._fds) > self.limit:
                oldest = next(iter(self._fds))
                os.close(self._fds.pop(oldest))
        return fd

    def same_file(self, a, b):
        fa = os.open(a, os.O_RDONLY)  # clean: closed below
        fb = os.open(b, os.O_RDONLY)  # leak: closed only when the devices match
        sa, sb = os.fstat(fa), os.fstat(fb)
        os.close(fa)
        if sa.st_dev != sb.st_dev:
            return False
        os.close(fb)
        return sa.st_ino == sb.st_ino

    def magic(self, path):
        fd = os.open(path, os.O_RDONLY)  # leak: short files return before close
        head = os.read(fd, 4)
        if len(head) < 4:
            return None
        os.close(fd)
        return head

    def close(self):
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
