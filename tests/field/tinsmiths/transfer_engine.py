"""KV transfer between prefill and decode workers: regions, channels, completion callbacks."""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

logger = logging.getLogger("kv_transfer")


class Region(NamedTuple):
    base: int
    nbytes: int
    rkey: int


class RegionTable:
    """Registered memory, cut in equal regions."""

    def __init__(self, base: int, region_bytes: int, count: int) -> None:
        self.region_bytes = region_bytes
        self._avail: "queue.SimpleQueue[Region]" = queue.SimpleQueue()
        for i in range(count):
            self._avail.put(Region(base + i * region_bytes, region_bytes, 0x1000 + i))

    def register(self, timeout: Optional[float] = None) -> Optional[Region]:
        try:
            return self._avail.get(timeout=timeout) if timeout else self._avail.get_nowait()
        except queue.Empty:
            return None

    def deregister(self, region: Region) -> None:
        self._avail.put(region)


class ChannelPool:
    def __init__(self, dial: Callable[[str], Any], per_peer: int) -> None:
        self._dial = dial
        self._per_peer = per_peer
        self._idle: Dict[str, List[Any]] = defaultdict(list)
        self._out: Dict[str, int] = defaultdict(int)
        self._cv = threading.Condition()

    def open(self, peer: str) -> Any:
        with self._cv:
            while self._out[peer] >= self._per_peer:
                self._cv.wait()
            self._out[peer] += 1
            if self._idle[peer]:
                return self._idle[peer].pop()
        try:
            return self._dial(peer)
        except OSError:
            self.forget(peer)
            raise

    def put_back(self, peer: str, chan: Any) -> None:
        with self._cv:
            self._idle[peer].append(chan)
            self._out[peer] -= 1
            self._cv.notify()

    def forget(self, peer: str) -> None:
        with self._cv:
            self._out[peer] -= 1
            self._cv.notify()

    def healthy(self, peer: str) -> Any:
        """A channel that answers a ping."""
        for _ in range(self._per_peer):
            chan = self.open(peer)  # clean: forgotten when it does not answer, else returned
            if chan.ping():
                return chan
            chan.close()
            self.forget(peer)
        raise ConnectionError(peer)


class Transfer:
    def __init__(self, rid: str, peer: str, src: Region) -> None:
        self.rid = rid
        self.peer = peer
        self.src = src
        self.started = time.monotonic()
        self.done = threading.Event()


class TransferEngine:
    def __init__(self, regions: RegionTable, channels: ChannelPool, gpu: Any) -> None:
        self.regions = regions
        self.channels = channels
        self.gpu = gpu
        self._inflight: Dict[str, Transfer] = {}
        self._landing: Dict[str, Region] = {}
        self._cancelled: set = set()

    def push(self, rid: str, peer: str, blocks: List[int]) -> bool:
        src = self.regions.register()  # leak: not deregistered when the channel can't be opened
        if src is None:
            return False
        self.gpu.gather(blocks, src.base)
        try:
            chan = self.channels.open(peer)  # clean: put back in finally
        except OSError as e:
            logger.warning("open %s: %s", peer, e)
            return False
        try:
            chan.write(src.base, src.nbytes)
        finally:
            self.channels.put_back(peer, chan)
            self.regions.deregister(src)
        return True

    def push_async(self, rid: str, peer: str, blocks: List[int]) -> bool:
        src = self.regions.register()  # clean: near miss, held by the transfer, whose callback deregisters it
        if src is None:
            return False
        self.gpu.gather(blocks, src.base)
        tr = Transfer(rid, peer, src)
        self._inflight[rid] = tr
        self.gpu.post_send(peer, src.base, src.nbytes, lambda ok: self._on_sent(rid, ok))
        return True

    def _on_sent(self, rid: str, ok: bool) -> None:
        tr = self._inflight.pop(rid)
        self.regions.deregister(tr.src)
        if not ok:
            logger.error("send of %s to %s failed", rid, tr.peer)
        tr.done.set()

    def land(self, rid: str) -> Optional[Tuple[int, int]]:
        """Prepare a landing zone, the remote side writes to it."""
        if rid in self._landing:
            r = self._landing[rid]
            return r.base, r.rkey
        region = self.regions.register(timeout=0.5)  # leak: on_landed() of a cancelled request pops it and returns
        if region is None:
            return None
        self._landing[rid] = region
        return region.base, region.rkey

    def on_landed(self, rid: str, blocks: List[int]) -> None:
        region = self._landing.pop(rid)
        if rid in self._cancelled:
            self._cancelled.discard(rid)
            return
        self.gpu.scatter(region.base, blocks)
        self.regions.deregister(region)

    def pull(self, rid: str, peer: str, blocks: List[int], retries: int = 3) -> bool:
        for attempt in range(retries):
            dst = self.regions.register()  # leak: a retry after a failed read registers another without deregistering
            if dst is None:
                time.sleep(0.01 * (attempt + 1))
                continue
            chan = self.channels.open(peer)  # clean: put back on both ways
            if not chan.read_into(dst.base, rid):
                self.channels.put_back(peer, chan)
                continue
            self.channels.put_back(peer, chan)
            self.gpu.scatter(dst.base, blocks)
            self.regions.deregister(dst)
            return True
        return False

    def pull_once_ready(self, rid: str, peer: str, blocks: List[int], retries: int = 3) -> bool:
        dst = self.regions.register()  # clean: near miss, one region for all retries, deregistered in finally
        if dst is None:
            return False
        try:
            for _ in range(retries):
                chan = self.channels.healthy(peer)  # clean: put back before the answer is looked at
                ok = chan.read_into(dst.base, rid)
                self.channels.put_back(peer, chan)
                if not ok:
                    continue
                self.gpu.scatter(dst.base, blocks)
                return True
            return False
        finally:
            self.regions.deregister(dst)

    def handshake(self, peer: str, version: int) -> Dict[str, Any]:
        chan = self.channels.open(peer)  # leak: neither put back nor forgotten on a version mismatch
        hello = chan.call("hello", version)
        if hello["version"] != version:
            raise RuntimeError(f"{peer} speaks {hello['version']}")
        self.channels.put_back(peer, chan)
        return hello

    def layout_of(self, peer: str) -> Optional[Dict[str, Any]]:
        chan = self.channels.open(peer)  # clean: forgotten when the call breaks, put back otherwise
        try:
            layout = chan.call("layout")
        except OSError:
            chan.close()
            self.channels.forget(peer)
            return None
        self.channels.put_back(peer, chan)
        return layout

    def bounce(self, src_peer: str, dst_peer: str, rid: str) -> bool:
        """Relay through this host, for peers without a direct route."""
        inbound = self.regions.register()  # leak: stays registered when there's no outbound region
        if inbound is None:
            return False
        outbound = self.regions.register()  # clean: deregistered at the end
        if outbound is None:
            return False
        self.gpu.relay(src_peer, inbound.base, outbound.base, dst_peer, rid)
        self.regions.deregister(inbound)
        self.regions.deregister(outbound)
        return True

    def bounce_pair(self, rid: str) -> Optional[Tuple[Region, Region]]:
        inbound = self.regions.register()  # clean: deregistered when the second is None
        if inbound is None:
            return None
        outbound = self.regions.register()  # clean: returned with the first
        if outbound is None:
            self.regions.deregister(inbound)
            return None
        return inbound, outbound

    def self_test(self) -> bool:
        pair = self.bounce_pair("self-test")  # clean: both halves are deregistered
        if pair is None:
            return False
        a, b = pair
        ok = self.gpu.loopback(a.base, b.base)
        for r in (a, b):
            self.regions.deregister(r)
        return ok

    def reap(self, max_age: float) -> List[str]:
        now = time.monotonic()
        late = [t.rid for t in list(self._inflight.values()) if now - t.started > max_age]
        for rid in late:
            self._cancelled.add(rid)
        return late

    def close(self) -> None:
        for region in self._landing.values():
            self.regions.deregister(region)
        self._landing.clear()
