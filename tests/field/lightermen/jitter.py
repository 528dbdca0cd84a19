"""RTP receive path: packet buffers, reordering, frame assembly."""
from __future__ import annotations

import heapq
import logging
import struct
from abc import ABC, abstractmethod
from typing import Dict, List, Optional, Tuple

log = logging.getLogger(__name__)

HEADER = struct.Struct("!BBHII")


class PacketBuf:
    __slots__ = ("mem", "used", "seq", "ts", "marker", "in_pool")

    def __init__(self, mtu: int) -> None:
        self.mem = bytearray(mtu)
        self.used = 0
        self.seq = 0
        self.ts = 0
        self.marker = False
        self.in_pool = True

    def parse(self) -> bool:
        if self.used < HEADER.size:
            return False
        first, second, self.seq, self.ts, _ = HEADER.unpack_from(self.mem)
        self.marker = bool(second & 0x80)
        return first >> 6 == 2

    def payload(self) -> bytes:
        return bytes(self.mem[HEADER.size : self.used])

    def __lt__(self, other: "PacketBuf") -> bool:
        return (self.seq - other.seq) & 0xFFFF > 0x8000


class BufPool:
    def __init__(self, count: int, mtu: int = 1500) -> None:
        self._bufs = [PacketBuf(mtu) for _ in range(count)]
        self._top = count

    def rx_alloc(self) -> Optional[PacketBuf]:
        if self._top == 0:
            return None
        self._top -= 1
        buf = self._bufs[self._top]
        buf.in_pool = False
        return buf

    def rx_free(self, buf: PacketBuf) -> None:
        if buf.in_pool:
            return
        buf.in_pool = True
        self._bufs[self._top] = buf
        self._top += 1

    def rx_free_chain(self, bufs: List[PacketBuf]) -> None:
        for buf in bufs:
            self.rx_free(buf)
        bufs.clear()


class Stage(ABC):
    """A stage owns every buffer that is pushed to it."""

    def __init__(self, pool: BufPool) -> None:
        self.pool = pool

    @abstractmethod
    def push(self, buf: PacketBuf) -> None: ...

    def stop(self) -> None:
        """Overridden where a stage keeps buffers."""


class JitterBuffer(Stage):
    def __init__(self, pool: BufPool, depth: int, out: Stage) -> None:
        super().__init__(pool)
        self.depth = depth
        self.out = out
        self._heap: List[PacketBuf] = []
        self._last: Optional[int] = None

    def push(self, buf: PacketBuf) -> None:
        if self._last is not None and (buf.seq - self._last) & 0xFFFF > 0x8000:
            self.pool.rx_free(buf)
            return
        heapq.heappush(self._heap, buf)
        while len(self._heap) > self.depth:
            nxt = heapq.heappop(self._heap)
            self._last = nxt.seq
            self.out.push(nxt)

    def stop(self) -> None:
        while self._heap:
            self.out.push(heapq.heappop(self._heap))
        self.out.stop()


class FrameAssembler(Stage):
    """Collects the packets of one timestamp and emits them at the marker."""

    def __init__(self, pool: BufPool) -> None:
        super().__init__(pool)
        self._parts: Dict[int, List[PacketBuf]] = {}
        self.frames: List[Tuple[int, bytes]] = []

    def push(self, buf: PacketBuf) -> None:
        parts = self._parts.setdefault(buf.ts, [])
        parts.append(buf)
        if buf.marker:
            del self._parts[buf.ts]
            self.frames.append((buf.ts, b"".join(p.payload() for p in parts)))
            self.pool.rx_free_chain(parts)

    def stop(self) -> None:
        for parts in self._parts.values():
            self.pool.rx_free_chain(parts)
        self._parts.clear()


def receive(pool: BufPool, sock, head: Stage, budget: int) -> int:
    """One poll of the socket. Every buffer goes to the stage or back."""
    n = 0
    while n < budget:
        buf = pool.rx_alloc()  # clean: near miss, the stage that it is pushed to frees it
        if buf is None:
            break
        buf.used = sock.recv_into(buf.mem)
        if buf.used == 0 or not buf.parse():
            pool.rx_free(buf)
            break
        head.push(buf)
        n += 1
    return n


def receive_filtered(pool: BufPool, sock, head: Stage, wanted: int, budget: int) -> int:
    """Like receive, for one payload type only."""
    n = 0
    for _ in range(budget):
        buf = pool.rx_alloc()  # leak: packets of another payload type are skipped with their buffer
        if buf is None:
            break
        buf.used = sock.recv_into(buf.mem)
        if not buf.parse():
            pool.rx_free(buf)
            continue
        if buf.mem[1] & 0x7F != wanted:
            continue
        head.push(buf)
        n += 1
    return n


class FecRecovery(Stage):
    """Rebuilds a lost packet out of a parity packet and its neighbours."""

    def __init__(self, pool: BufPool, out: Stage) -> None:
        super().__init__(pool)
        self.out = out
        self._seen: Dict[int, PacketBuf] = {}

    def push(self, buf: PacketBuf) -> None:
        old = self._seen.get(buf.seq)
        if old is not None:
            self.pool.rx_free(old)
        self._seen[buf.seq] = buf

    def recover(self, seqs: List[int], parity: bytes) -> bool:
        missing = [s for s in seqs if s not in self._seen]
        if len(missing) != 1:
            return False
        buf = self.pool.rx_alloc()  # clean: in the table, ended by forward or stop
        if buf is None:
            return False
        data = bytearray(parity)
        for s in seqs:
            if s != missing[0]:
                for i, b in enumerate(self._seen[s].payload()[: len(data)]):
                    data[i] ^= b
        buf.mem[HEADER.size : HEADER.size + len(data)] = data
        buf.used = HEADER.size + len(data)
        buf.seq = missing[0]
        self.push(buf)
        return True

    def recover_pair(self, seqs: List[int], rows: bytes, columns: bytes) -> int:
        """Two-dimensional parity: up to two lost packets. Answers how many came back."""
        missing = [s for s in seqs if s not in self._seen][:2]
        spare = [self.pool.rx_alloc() for _ in missing]  # leak: when one is None the other is not freed
        if any(b is None for b in spare):
            return 0
        for buf, seq, data in zip(spare, missing, (rows, columns)):
            buf.mem[HEADER.size : HEADER.size + len(data)] = data
            buf.used = HEADER.size + len(data)
            buf.seq = seq
            self.push(buf)
        return len(missing)

    def forward(self) -> None:
        for seq in sorted(self._seen):
            self.out.push(self._seen.pop(seq))

    def stop(self) -> None:
        self.forward()
        self.out.stop()


class NackSender:
    """Builds a retransmission request in a packet buffer."""

    def __init__(self, pool: BufPool) -> None:
        self.pool = pool
        self.history: List[PacketBuf] = []

    def _build(self, seqs: List[int]) -> Optional[PacketBuf]:
        if not seqs:
            return None
        buf = self.pool.rx_alloc()  # clean: handed to the caller
        if buf is None:
            return None
        struct.pack_into("!BBHII", buf.mem, 0, 0x81, 205, 3, 0, 0)
        at = HEADER.size
        for s in seqs[:16]:
            struct.pack_into("!HH", buf.mem, at, s, 0)
            at += 4
        buf.used = at
        return buf

    def send(self, sock, seqs: List[int]) -> bool:
        buf = self._build(seqs)  # clean: freed after sending
        if buf is None:
            return False
        sent = sock.send(memoryview(buf.mem)[: buf.used])
        self.pool.rx_free(buf)
        return sent > 0

    def send_reliably(self, sock, seqs: List[int], tries: int) -> bool:
        for attempt in range(tries):
            buf = self._build(seqs)  # leak: a try that was not sent in full keeps its buffer
            if buf is None:
                return False
            if sock.send(memoryview(buf.mem)[: buf.used]) == buf.used:
                self.pool.rx_free(buf)
                return True
            log.debug("try %d was cut short", attempt)
        return False

    def send_later(self, seqs: List[int]) -> None:
        buf = self._build(seqs)  # leak: flush_history sends them and removes them, freeing none
        if buf is not None:
            self.history.append(buf)

    def flush_history(self, sock) -> int:
        n = 0
        while self.history:
            buf = self.history.pop(0)
            n += sock.send(memoryview(buf.mem)[: buf.used])
        return n
