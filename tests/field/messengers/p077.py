"""Tenant-aware cache lines: leases are passed through keyword arguments."""
import copy
from dataclasses import dataclass, replace


@dataclass
class Line:
    number: int
    tenant: str = ""
    payload: bytes = b""


class LineCache:
    def __init__(self, count):
        self._free = [Line(i) for i in range(count)]

    def take_line(self):
        return self._free.pop() if self._free else None

    def free_line(self, line):
        line.tenant, line.payload = "", b""
        self._free.append(line)


def call(fn, *args, **kwargs):
    return fn(*args, **kwargs)  # clean: handed to the caller


class Tenants:
    def __init__(self, cache):
        self.cache = cache
        self.lines = {}
        self.history = []

    def store(self, *, line, tenant, payload):
        if tenant in self.lines:
            self.cache.free_line(self.lines.pop(tenant))
        line.tenant, line.payload = tenant, payload
        self.lines[tenant] = line

    def remember(self, *, line, tenant, payload):
        self.history.append(replace(line, tenant=tenant, payload=payload))

    def put(self, tenant, payload):
        line = call(self.cache.take_line)  # clean: store keeps it
        if line is None:
            return False
        call(self.store, line=line, tenant=tenant, payload=payload)
        return True

    def put_logged(self, tenant, payload):
        line = call(self.cache.take_line)  # clean: a copy is remembered, the line freed
        if line is None:
            return False
        call(self.remember, line=line, tenant=tenant, payload=payload)
        self.cache.free_line(line)
        return True

    def put_history(self, tenant, payload):
        line = call(self.cache.take_line)  # leak: remember keeps a copy, not the line
        if line is None:
            return False
        call(self.remember, line=line, tenant=tenant, payload=payload)
        return True

    def template(self):
        line = self.cache.take_line()  # leak: the deep copy is returned instead
        if line is None:
            return Line(-1)
        line.payload = b"\0" * 64
        return copy.deepcopy(line)

    def evict(self, tenant):
        line = self.lines.pop(tenant, None)
        if line is not None:
            self.cache.free_line(line)
