"""Prefill/decode disaggregation: registered regions, work requests, completions.

Nothing here blocks: all waiting is done through callbacks of the poller.
"""
import ctypes
import dataclasses
import logging
import threading
import time
import typing as t

LOGGER = logging.getLogger("kv_transfer")

OK, FLUSHED = 0, 1

class RegistrationError(OSError):
    pass

class QueueFull(Exception):
    pass

@dataclasses.dataclass
class Region:
    addr: int
    length: int
    lkey: int
    rkey: int

@dataclasses.dataclass
class WorkRequest:
    wr_id: int
    region: Region
    remote_addr: int
    remote_key: int
    callback: t.Callable[[int, int], None]
    posted: float = 0.0

class Nic:
    def __init__(self, lib: ctypes.CDLL, max_regions: int = 4096):
        self.lib = lib
        self.max_regions = max_regions
        self.count = 0

    def register(self, addr: int, length: int) -> Region:
        if self.count >= self.max_regions:
            raise RegistrationError(f"{self.count} regions are registered")
        lkey, rkey = ctypes.c_uint32(), ctypes.c_uint32()
        rc = self.lib.reg_mr(addr, length, ctypes.byref(lkey), ctypes.byref(rkey))  # clean: a failed call has registered nothing
        if rc != 0:
            raise RegistrationError(rc, f"reg_mr of {length} bytes")
        self.count += 1
        return Region(addr, length, lkey.value, rkey.value)

    def deregister(self, region: Region) -> None:
        self.lib.dereg_mr(region.lkey)
        self.count -= 1

class SendQueue:
    """Credits bound the number of posted work requests."""

    def __init__(self, nic: Nic, depth: int = 128):
        self.nic = nic
        self._credits = depth
        self._ids = 0
        self._posted: t.Dict[int, WorkRequest] = {}
        self._lock = threading.Lock()

    def credit(self) -> int:
        with self._lock:
            if self._credits == 0:
                raise QueueFull
            self._credits -= 1
            self._ids += 1
            return self._ids

    def refund(self) -> None:
        with self._lock:
            self._credits += 1

    def post(self, wr: WorkRequest) -> None:
        wr.posted = time.monotonic()
        with self._lock:
            self._posted[wr.wr_id] = wr
        self.nic.lib.post_write(wr.wr_id, wr.region.lkey, wr.remote_addr, wr.remote_key)

    def complete(self, wr_id: int, status: int) -> None:
        with self._lock:
            wr = self._posted.pop(wr_id, None)
        if wr is None:
            return
        self.refund()
        wr.callback(wr_id, status)

    def expire(self, older_than: float) -> int:
        limit = time.monotonic() - older_than
        with self._lock:
            old = [w for w in self._posted.values() if w.posted < limit]
            for w in old:
                del self._posted[w.wr_id]
        for w in old:
            self.refund()
        return len(old)

    def drain(self) -> None:
        for wr_id in list(self._posted):
            self.complete(wr_id, FLUSHED)

class PrefillSide:
    def __init__(self, nic: Nic, sq: SendQueue):
        self.nic = nic
        self.sq = sq
        self.cache: t.Dict[int, Region] = {}

    def push(self, addr: int, length: int, remote: t.Tuple[int, int], done: t.Callable[[bool], None]) -> bool:
        try:
            region = self.nic.register(addr, length)  # leak: expire() drops the request and never runs the callback that deregisters
        except RegistrationError as exc:
            LOGGER.error("%s", exc)
            return False
        try:
            wr_id = self.sq.credit()  # clean: near miss, refunded by complete() and by expire()
        except QueueFull:
            self.nic.deregister(region)
            return False

        def on_done(_wr_id: int, status: int) -> None:
            self.nic.deregister(region)
            done(status == OK)

        self.sq.post(WorkRequest(wr_id, region, remote[0], remote[1], on_done))
        return True

    def push_layers(self, layers: t.List[t.Tuple[int, int]], remote: t.Tuple[int, int], done) -> bool:
        """One region and one request a layer, `done` after the last."""
        regions: t.List[Region] = []
        try:
            for addr, length in layers:
                regions.append(self.nic.register(addr, length))  # leak: QueueFull for a later layer leaves, and finish() never counts down to the deregistration
        except RegistrationError:
            for r in regions:
                self.nic.deregister(r)
            return False
        left = len(regions)

        def finish(_wr_id: int, status: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                for r in regions:
                    self.nic.deregister(r)
                done(status == OK)

        for r in regions:
            wr_id = self.sq.credit()  # clean: the request is posted at once and its completion or expiry refunds
            self.sq.post(WorkRequest(wr_id, r, remote[0], remote[1], finish))
        return True

    def cached_region(self, addr: int, length: int) -> Region:
        """Weights do not move, so that their regions are kept."""
        region = self.cache.get(addr)
        if region is None or region.length < length:
            region = self.nic.register(addr, length)  # leak: a shorter region of the same address is overwritten in the table
            self.cache[addr] = region
        return region

    def close(self) -> None:
        self.sq.drain()
        for region in self.cache.values():
            self.nic.deregister(region)
        self.cache.clear()

class LandingZone:
    """Page runs on the decode side, one bit a page."""

    def __init__(self, base: int, pages: int, page_bytes: int):
        self.base = base
        self.page_bytes = page_bytes
        self._map = bytearray(pages)

    def reserve(self, n: int) -> t.Optional[range]:
        start = self._map.find(bytes(n))
        if start < 0:
            return None
        self._map[start : start + n] = b"\x01" * n
        return range(start, start + n)

    def release(self, run: range) -> None:
        self._map[run.start : run.stop] = bytes(len(run))

    def address(self, run: range) -> t.Tuple[int, int]:
        return self.base + run.start * self.page_bytes, len(run) * self.page_bytes

class DecodeSide:
    def __init__(self, nic: Nic, zone: LandingZone, control):
        self.nic = nic
        self.zone = zone
        self.control = control
        self.expected: t.Dict[str, t.Tuple[range, Region]] = {}
        self.arrived: t.Dict[str, range] = {}

    def expect(self, rid: str, n_pages: int) -> bool:
        run = self.zone.reserve(n_pages)  # leak: a failed registration is answered with False while the run stays reserved
        if run is None:
            return False
        try:
            region = self.nic.register(*self.zone.address(run))  # clean: near miss, in the table, deregistered on arrival and on cancel
        except RegistrationError:
            return False
        self.expected[rid] = (run, region)
        self.control.announce(rid, region.addr, region.rkey)
        return True

    def on_notify(self, rid: str, ok: bool) -> None:
        entry = self.expected.pop(rid, None)
        if entry is None:
            return
        run, region = entry
        self.nic.deregister(region)
        if ok:
            self.arrived[rid] = run
        else:
            self.zone.release(run)

    def cancel(self, rid: str) -> None:
        self.on_notify(rid, ok=False)
        run = self.arrived.pop(rid, None)
        if run is not None:
            self.zone.release(run)

    def consume(self, rid: str, copy: t.Callable[[int, int], None]) -> None:
        run = self.arrived.pop(rid)
        try:
            copy(*self.zone.address(run))
        finally:
            self.zone.release(run)

    def self_test(self) -> bool:
        run = self.zone.reserve(1)  # clean: both the handler and the last lines release it
        if run is None:
            return True
        try:
            region = self.nic.register(*self.zone.address(run))  # clean: deregistered in the next line but one
        except RegistrationError:
            self.zone.release(run)
            return False
        ok = region.lkey != 0 and region.rkey != 0
        self.nic.deregister(region)
        self.zone.release(run)
        return ok

    def reserve_pair(self, n_keys: int, n_values: int) -> t.Optional[t.Tuple[range, range]]:
        """Keys and values in two runs, for models that keep them apart."""
        keys = self.zone.reserve(n_keys)  # clean: near miss, released if the second run is not to be had, else returned
        values = self.zone.reserve(n_values)  # leak: when only the keys' run is not to be had, this one is dropped
        if keys is None or values is None:
            if keys is not None:
                self.zone.release(keys)
            return None
        return keys, values
