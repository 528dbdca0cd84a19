"""Thin RDMA endpoint layer for weight sync (trainer -> rollout workers).

Verbs are faked when the extension is not built.
"""
from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from typing import Any, Optional

log = logging.getLogger("rdma")


class VerbsError(OSError):
    pass


@dataclass(eq=False)
class MemRegion:
    key: int
    addr: int
    length: int


@dataclass(eq=False)
class QueuePair:
    num: int
    peer: str = ""
    state: str = "RESET"


class Device:
    def __init__(self, max_mr: int = 64, max_qp: int = 16) -> None:
        self.max_mr = max_mr
        self.max_qp = max_qp
        self.mrs: dict[int, MemRegion] = {}
        self.qps: dict[int, QueuePair] = {}
        self._ids = itertools.count(1)

    def register(self, addr: int, length: int) -> Optional[MemRegion]:
        if len(self.mrs) >= self.max_mr:
            return None
        mr = MemRegion(next(self._ids), addr, length)
        self.mrs[mr.key] = mr
        return mr

    def deregister(self, mr: MemRegion) -> None:
        del self.mrs[mr.key]

    def open_qp(self) -> QueuePair:
        if len(self.qps) >= self.max_qp:
            raise VerbsError("ENOMEM")
        qp = QueuePair(next(self._ids))
        self.qps[qp.num] = qp
        return qp

    def close_qp(self, qp: QueuePair) -> None:
        self.qps.pop(qp.num)

    def connect(self, qp: QueuePair, peer: str) -> bool:
        qp.peer = peer
        if peer.startswith("down"):
            qp.state = "ERR"
            return False
        qp.state = "RTS"
        return True


class Endpoint:
    """One peer: a QP and two regions (send, recv)."""

    def __init__(self, dev: Device, peer: str, size: int) -> None:
        self.dev = dev
        self.peer = peer
        self.size = size
        self.qp: Optional[QueuePair] = None
        self.send_mr: Optional[MemRegion] = None
        self.recv_mr: Optional[MemRegion] = None

    def open(self) -> bool:
        if self.qp is not None:
            return True
        send = self.dev.register(0x1000, self.size)  # leak: not rolled back when the connect fails
        if send is None:
            return False
        recv = self.dev.register(0x2000, self.size)  # leak: not rolled back when the connect fails
        if recv is None:
            self.dev.deregister(send)
            return False
        qp = self.dev.open_qp()  # clean: closed on failed connect, else stored for close
        if not self.dev.connect(qp, self.peer):
            self.dev.close_qp(qp)
            return False
        self.send_mr, self.recv_mr, self.qp = send, recv, qp
        return True

    def open_v2(self) -> bool:
        """Same but registers into fields first so close() can clean up after a partial open."""
        if self.qp is not None:
            return True
        self.send_mr = self.dev.register(0x1000, self.size)  # clean: near miss, every failing exit calls close
        self.recv_mr = self.dev.register(0x2000, self.size)  # clean: near miss, every failing exit calls close
        if self.send_mr is None or self.recv_mr is None:
            self.close()
            return False
        self.qp = self.dev.open_qp()  # clean: close handles it
        if not self.dev.connect(self.qp, self.peer):
            self.close()
            return False
        return True

    def reconnect(self, tries: int = 3) -> bool:
        if self.qp is not None:
            self.dev.close_qp(self.qp)
            self.qp = None
        for i in range(tries):
            self.qp = self.dev.open_qp()  # leak: the qp of a failed try is overwritten by the next try
            if self.dev.connect(self.qp, self.peer):
                return True
            time.sleep(0.001 * i)
        return False

    def close(self) -> None:
        if self.qp is not None:
            self.dev.close_qp(self.qp)
            self.qp = None
        for attr in ("send_mr", "recv_mr"):
            mr = getattr(self, attr)
            if mr is not None:
                self.dev.deregister(mr)
                setattr(self, attr, None)


class MrCache:
    """LRU-less registration cache keyed by (addr, length); counts users."""

    def __init__(self, dev: Device) -> None:
        self.dev = dev
        self.entries: dict[tuple[int, int], list[Any]] = {}

    def pin(self, addr: int, length: int) -> Optional[MemRegion]:
        key = (addr, length)
        ent = self.entries.get(key)
        if ent is not None:
            ent[1] += 1
            return ent[0]
        mr = self.dev.register(addr, length)  # clean: kept in entries, unpin deregisters the last user
        if mr is None:
            return None
        self.entries[key] = [mr, 1]
        return mr

    def unpin(self, mr: MemRegion) -> None:
        key = (mr.addr, mr.length)
        ent = self.entries[key]
        ent[1] -= 1
        if ent[1] == 0:
            del self.entries[key]
            self.dev.deregister(mr)


class WeightSync:
    def __init__(self, dev: Device) -> None:
        self.dev = dev
        self.cache = MrCache(dev)
        self.posted: dict[int, MemRegion] = {}
        self._wr = itertools.count()

    def write(self, addr: int, data: bytes) -> int:
        mr = self.cache.pin(addr, len(data))  # clean: posted table, the completion unpins
        if mr is None:
            raise VerbsError("no MR")
        wr = next(self._wr)
        self.posted[wr] = mr
        return wr

    def poll(self, wcs: list[tuple[int, str]]) -> int:
        done = 0
        for wr, status in wcs:
            mr = self.posted.pop(wr, None)
            if mr is None:
                continue
            self.cache.unpin(mr)
            if status != "OK":
                log.error("wr %d: %s", wr, status)
                continue
            done += 1
        return done

    def write_inline(self, addr: int, data: bytes) -> bool:
        mr = self.cache.pin(addr, len(data))  # leak: data that fits inline returns before unpin
        if mr is None:
            return False
        if len(data) <= 64:
            return True
        self._blocking(mr, data)
        self.cache.unpin(mr)
        return True

    def _blocking(self, mr: MemRegion, data: bytes) -> None:
        if len(data) > mr.length:
            raise VerbsError("length")

    def broadcast(self, peers: list[str], addr: int, data: bytes) -> list[str]:
        failed: list[str] = []
        mr = self.cache.pin(addr, len(data))  # clean: unpinned after the loop, all failures are collected
        if mr is None:
            return peers
        for p in peers:
            qp = self.dev.open_qp()  # leak: a peer that is down continues without close_qp
            if not self.dev.connect(qp, p):
                failed.append(p)
                continue
            try:
                self._blocking(mr, data)
            except VerbsError:
                failed.append(p)
            self.dev.close_qp(qp)
        self.cache.unpin(mr)
        return failed

    def gather_write(self, segs: list[tuple[int, int]]) -> Optional[list[MemRegion]]:
        """Pin all segments or none."""
        mrs: list[MemRegion] = []
        for addr, n in segs:
            mr = self.cache.pin(addr, n)  # clean: near miss, the list is unpinned on a miss, else returned
            if mr is None:
                for m in mrs:
                    self.cache.unpin(m)
                return None
            mrs.append(mr)
        return mrs

    def sync_tensor_list(self, segs: list[tuple[int, int]]) -> int:
        mrs = self.gather_write(segs)  # leak: only the first region of the list is unpinned
        if not mrs:
            return 0
        total = sum(m.length for m in mrs)
        self.cache.unpin(mrs[0])
        return total


if __name__ == "__main__":
    dev = Device()
    ep = Endpoint(dev, "node1", 4096)
    assert ep.open_v2()
    ep.close()
    ws = WeightSync(dev)
    ws.poll([(ws.write(0x10, b"abc"), "OK")])
    print(ws.broadcast(["a", "b"], 0x1, b"x"), len(dev.mrs), len(dev.qps))
