"""Live weight updates: staging regions, shard files, and a version gate for running steps."""
from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

log = logging.getLogger("weights")


class Region:
    def __init__(self, ident: int, nbytes: int) -> None:
        self.ident = ident
        self.mem = bytearray(nbytes)
        self.fill = 0
        self.refs = 0


class RegionPool:
    """Counted regions: borrow() gives the first reference, ref() another, unref() drops one."""

    def __init__(self, n: int, nbytes: int) -> None:
        self._spare = [Region(i, nbytes) for i in range(n)]

    def borrow(self) -> Optional[Region]:
        if not self._spare:
            return None
        region = self._spare.pop()
        region.refs, region.fill = 1, 0
        return region

    def ref(self, region: Region) -> Region:
        region.refs += 1
        return region

    def unref(self, region: Region) -> None:
        region.refs -= 1
        if region.refs == 0:
            self._spare.append(region)


class VersionGate:
    """Steps enter and exit; an update waits until nobody is inside."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._inside = 0
        self.version = 0

    def enter(self) -> int:
        with self._cond:
            self._inside += 1
            return self.version

    def exit(self) -> None:
        with self._cond:
            self._inside -= 1
            self._cond.notify_all()

    def bump(self, timeout: float) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: self._inside == 0, timeout):
                return False
            self.version += 1
            return True


@dataclass
class Shard:
    name: str
    path: str
    offset: int
    size: int


class ShardWriter:
    """Appends shards to a file; finish() closes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._out = open(path + ".part", "wb")  # clean: finish and discard both close it
        self._log = open(path + ".log", "a")  # leak: neither finish nor discard closes the log
        self.count = 0

    def add(self, shard: Shard, data: bytes) -> None:
        self._out.write(data)
        self._log.write(f"{shard.name} {shard.size}\n")
        self.count += 1

    def finish(self) -> int:
        self._out.close()
        os.replace(self.path + ".part", self.path)
        return self.count

    def discard(self) -> None:
        self._out.close()
        os.unlink(self.path + ".part")


class Updater:
    def __init__(self, pool: RegionPool, gate: VersionGate, apply: Callable[[str, memoryview], bool]) -> None:
        self.pool = pool
        self.gate = gate
        self.apply = apply
        self.inflight: Dict[str, Region] = {}
        self.observers: List[Tuple[str, Region]] = []

    # steps ----------------------------------------------------------------------

    def step(self, forward: Callable[[int], Any], batch: List[int]) -> Optional[Any]:
        version = self.gate.enter()  # leak: an empty batch returns without exit
        if not batch:
            log.debug("nothing to do at version %d", version)
            return None
        result = forward(version)
        self.gate.exit()
        return result

    def step_many(self, forward: Callable[[int], Any], count: int) -> List[Any]:
        out: List[Any] = []
        for _ in range(count):
            version = self.gate.enter()  # clean: exit in finally, also for break and continue
            try:
                result = forward(version)
                if result is None:
                    continue
                out.append(result)
                if len(out) > 64:
                    break
            finally:
                self.gate.exit()
        return out

    # loading --------------------------------------------------------------------

    def _read(self, shard: Shard) -> Optional[Region]:
        region = self.pool.borrow()  # clean: unreferenced for a short file, else handed to the caller
        if region is None:
            return None
        with open(shard.path, "rb") as fh:  # clean: with
            fh.seek(shard.offset)
            region.fill = fh.readinto(memoryview(region.mem)[: shard.size])
        if region.fill < shard.size:
            self.pool.unref(region)
            return None
        return region

    def load_all(self, shards: Iterable[Shard]) -> int:
        done = 0
        for shard in shards:
            region = self._read(shard)  # leak: return when apply refuses a shard
            if region is None:
                continue
            if not self.apply(shard.name, memoryview(region.mem)[: region.fill]):
                log.warning("shard %s was refused", shard.name)
                return done
            self.pool.unref(region)
            done += 1
        return done

    def load_deferred(self, shards: Iterable[Shard]) -> int:
        for shard in shards:
            region = self._read(shard)  # clean: near miss, in inflight, publish and rollback take it out
            if region is None:
                break
            stale = self.inflight.pop(shard.name, None)
            if stale is not None:
                self.pool.unref(stale)
            self.inflight[shard.name] = region
        return len(self.inflight)

    def publish(self, timeout: float) -> bool:
        if not self.gate.bump(timeout):
            self.rollback()
            return False
        for name in list(self.inflight):
            region = self.inflight.pop(name)
            self.apply(name, memoryview(region.mem)[: region.fill])
            self.pool.unref(region)
        return True

    def rollback(self) -> None:
        while self.inflight:
            _, region = self.inflight.popitem()
            self.pool.unref(region)

    def digest(self, shard: Shard) -> str:
        region = self._read(shard)  # leak: the hash is returned, the region is not unreferenced
        if region is None:
            return ""
        return hashlib.sha256(memoryview(region.mem)[: region.fill]).hexdigest()

    def observe(self, name: str, key: str) -> bool:
        """A second reference for a reader outside, until drop_observers."""
        region = self.inflight.get(key)
        if region is None:
            return False
        self.observers.append((name, self.pool.ref(region)))  # clean: drop_observers drops every reference
        return True

    def drop_observers(self) -> None:
        while self.observers:
            _, region = self.observers.pop()
            self.pool.unref(region)

    def share(self, key: str, send: Callable[[memoryview], int]) -> int:
        region = self.inflight.get(key)
        if region is None:
            return 0
        held = self.pool.ref(region)  # leak: dropped only when bytes were sent
        sent = send(memoryview(held.mem)[: held.fill])
        if sent > 0:
            self.pool.unref(held)
        return sent

    # writing --------------------------------------------------------------------

    def dump(self, shards: List[Shard], path: str, limit: int) -> int:
        writer = ShardWriter(path)  # clean: finished, or discarded when the limit is passed
        size = 0
        for shard in shards:
            region = self._read(shard)  # clean: unreferenced after add
            if region is None:
                continue
            writer.add(shard, bytes(region.mem[: region.fill]))
            size += region.fill
            self.pool.unref(region)
            if size > limit:
                writer.discard()
                return -1
        return writer.finish()

    def dump_one(self, shard: Shard, path: str) -> int:
        writer = ShardWriter(path)  # leak: return 0 for an unreadable shard neither finishes nor discards
        region = self._read(shard)  # clean: unreferenced after add
        if region is None:
            return 0
        writer.add(shard, bytes(region.mem[: region.fill]))
        self.pool.unref(region)
        return writer.finish()

    def manifest(self, path: str) -> List[str]:
        fh: io.TextIOBase = open(path)  # leak: a manifest of another version returns without close
        head = fh.readline().strip()
        if head != f"v{self.gate.version}":
            return []
        names = [line.split()[0] for line in fh if line.strip()]
        fh.close()
        return names
