"""RDMA side of the Halyard transport: queue pairs, regions, credits, tags, bounce buffers."""
from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
from typing import Dict, List, Optional, Tuple


class QpTable:
    """Queue pairs by number. Bringing one up costs a device context entry until it is torn down."""

    def __init__(self, device, cap: int = 256) -> None:
        self._device = device
        self._cap = cap
        self._up: Dict[int, str] = {}
        self._numbers = itertools.count(0x11)

    def bring_up(self, peer: str) -> int:
        if len(self._up) >= self._cap:
            raise OSError(12, "no queue pairs left")
        qpn = next(self._numbers)
        self._device.modify(qpn, "INIT")
        self._up[qpn] = peer
        return qpn

    def tear_down(self, qpn: int) -> None:
        peer = self._up.pop(qpn)
        self._device.modify(qpn, "RESET")
        self._device.log(f"qp {qpn} to {peer} is down")

    def __len__(self) -> int:
        return len(self._up)


def handshake(table: QpTable, peer: str, channel) -> Optional[int]:
    qpn = table.bring_up(peer)  # leak: a rejected handshake returns None with the pair still up
    channel.send({"qpn": qpn})
    reply = channel.recv()
    if not reply.get("ok"):
        return None
    channel.confirm(reply["qpn"])
    return qpn


def ping(table: QpTable, peer: str, channel) -> bool:
    qpn = table.bring_up(peer)  # clean: torn down on every way
    try:
        return channel.ping(qpn)
    except TimeoutError:
        return False
    finally:
        table.tear_down(qpn)


class Link:
    def __init__(self, table: QpTable, peer: str) -> None:
        self.table = table
        self.peer = peer
        self.qpn = table.bring_up(peer)  # leak: rebuild overwrites the number of this pair, close tears down only the newest

    def rebuild(self) -> None:
        self.qpn = self.table.bring_up(self.peer)  # leak: the old pair's number is overwritten

    def close(self) -> None:
        self.table.tear_down(self.qpn)


class RegionCache:
    """Registered memory, shared by (address, length). A region stays registered while it is pinned."""

    def __init__(self, register, deregister) -> None:
        self._register = register
        self._deregister = deregister
        self._regions: Dict[Tuple[int, int], List[int]] = {}
        self.hits = 0

    def pin(self, addr: int, length: int) -> int:
        entry = self._regions.get((addr, length))
        if entry is None:
            entry = [self._register(addr, length), 0]
            self._regions[(addr, length)] = entry
        else:
            self.hits += 1
        entry[1] += 1
        return entry[0]

    def unpin(self, addr: int, length: int) -> None:
        entry = self._regions[(addr, length)]
        entry[1] -= 1
        if entry[1] == 0:
            del self._regions[(addr, length)]
            self._deregister(entry[0])


def write_tensor(cache: RegionCache, tensor, qp) -> int:
    addr, length = tensor.data_ptr(), tensor.nbytes
    lkey = cache.pin(addr, length)  # clean: unpinned in finally
    try:
        return qp.post_write(addr, length, lkey)
    finally:
        cache.unpin(addr, length)


def write_layers(cache: RegionCache, layers, qp) -> int:
    sent = 0
    for t in layers:
        addr, length = t.data_ptr(), t.nbytes
        lkey = cache.pin(addr, length)  # leak: a write that returns no slot is skipped without unpin
        slot = qp.post_write(addr, length, lkey)
        if slot is None:
            qp.kick()
            continue
        qp.wait(slot)
        cache.unpin(addr, length)
        sent += 1
    return sent


class SendCredits:
    """Receiver granted credits: one for each message in flight."""

    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)
        self._total = n
        self.stalls = 0

    def borrow(self, timeout: Optional[float] = None) -> bool:
        if self._sem.acquire(blocking=False):
            return True
        self.stalls += 1
        return self._sem.acquire(timeout=timeout)

    def repay(self, k: int = 1) -> None:
        if k > self._total:
            raise ValueError("more credits than were granted")
        self._sem.release(k)


def send_all(credits: SendCredits, messages, sock) -> int:
    for i, msg in enumerate(messages):
        if not credits.borrow(0.5):  # leak: the would-block return keeps the credit of the unsent message
            return i
        try:
            sock.send(msg)
        except BlockingIOError:
            return i
        credits.repay()
    return len(messages)


class CreditedSender:
    def __init__(self, credits: SendCredits, qp) -> None:
        self.credits = credits
        self.qp = qp

    def post(self, msg) -> bool:
        if not self.credits.borrow():  # clean: near miss, on_completion repays for what was posted
            return False
        try:
            self.qp.post(msg)
        except OSError:
            self.credits.repay()
            return False
        return True

    def on_completion(self, n: int) -> None:
        self.credits.repay(n)


class ImmTags:
    """Immediate values that name a transfer at the far side; the lowest is used first."""

    def __init__(self, bits: int = 12) -> None:
        self._heap = list(range(1 << bits))
        self._afloat: set = set()

    def launch(self) -> int:
        if not self._heap:
            raise RuntimeError("all tags are afloat")
        tag = heapq.heappop(self._heap)
        self._afloat.add(tag)
        return tag

    def land(self, tag: int) -> None:
        self._afloat.remove(tag)
        heapq.heappush(self._heap, tag)


class TransferMap:
    def __init__(self, tags: ImmTags) -> None:
        self.tags = tags
        self.by_request: Dict[str, int] = {}

    def start(self, rid: str) -> int:
        if rid in self.by_request:
            return self.by_request[rid]
        tag = self.tags.launch()  # clean: filed by request, landed in arrive or in reset
        self.by_request[rid] = tag
        return tag

    def arrive(self, rid: str) -> None:
        self.tags.land(self.by_request.pop(rid))

    def reset(self) -> None:
        while self.by_request:
            _, tag = self.by_request.popitem()
            self.tags.land(tag)


class TransferGroup:
    def __init__(self, tags: ImmTags) -> None:
        self.tags = tags
        self.flight: List[int] = []

    def start(self, n: int) -> List[int]:
        for _ in range(n):
            self.flight.append(self.tags.launch())  # leak: poll_failed clears the list without landing
        return list(self.flight)

    def poll_done(self) -> None:
        for tag in self.flight:
            self.tags.land(tag)
        self.flight = []

    def poll_failed(self, err: int) -> int:
        self.flight.clear()
        return err


class BounceRing:
    """Registered bounce buffers cut from one ctypes array, lent as memoryviews."""

    def __init__(self, slots: int, each: int) -> None:
        self._raw = (ctypes.c_ubyte * (slots * each))()
        whole = memoryview(self._raw).cast("B")
        self._views = [whole[i * each:(i + 1) * each] for i in range(slots)]
        self._out: Dict[int, memoryview] = {}

    def claim(self) -> Optional[memoryview]:
        if not self._views:
            return None
        view = self._views.pop()
        self._out[id(view)] = view
        return view

    def surrender(self, view: memoryview) -> None:
        self._views.append(self._out.pop(id(view)))


def bounce_send(ring: BounceRing, data: bytes, qp) -> bool:
    view = ring.claim()  # leak: data too long for the buffer returns with the view
    if view is None:
        return False
    if len(data) > len(view):
        return qp.send_direct(data)
    view[:len(data)] = data
    qp.send_inline(view, len(data))
    ring.surrender(view)
    return True


def bounce_recv(ring: BounceRing, qp) -> bytes:
    view = ring.claim()  # clean: near miss, None raises and else surrendered in finally
    if view is None:
        raise BufferError("ring is empty")
    try:
        n = qp.recv_into(view)
        return bytes(view[:n]) if n else b""
    finally:
        ring.surrender(view)


def bounce_swap(ring: BounceRing, qp, first: bytes, second: bytes) -> None:
    view = ring.claim()  # leak: the name is bound to the second view before the first is surrendered
    view[:len(first)] = first
    qp.post(view)
    view = ring.claim()  # clean: surrendered after the flush
    view[:len(second)] = second
    qp.post(view)
    qp.flush()
    ring.surrender(view)


class WrIds:
    """Work request ids, ever rising."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)
        self.issued = 0

    def allocate(self) -> int:
        self.issued += 1
        return next(self._counter)


def post_maybe(ids: WrIds, qp, msg) -> Optional[int]:
    wr = ids.allocate()  # clean: an id generator, nothing comes back
    if not qp.writable():
        return None
    qp.post(msg, wr)
    return wr
