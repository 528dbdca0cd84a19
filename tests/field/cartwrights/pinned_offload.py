"""Layer offloading through a small set of pinned staging buffers.

Weights of cold layers live in pageable memory.  Before a layer runs, its
parameters are copied to a pinned buffer and from there to the device on a
side stream.  Gradients (or dirty KV pages) travel the other way.
"""

import logging
import threading
import time
from collections import defaultdict
from typing import Callable, Dict, List, Optional

import torch

log = logging.getLogger("offload")


class StagingTimeout(Exception):
    pass


class CopyFault(Exception):
    """The copy engine reported an error for a transfer."""


class PinnedBuffer:
    __slots__ = ("data", "event", "generation")

    def __init__(self, nbytes: int) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8)
        self.event: Optional[torch.cuda.Event] = None
        self.generation = 0

    def ready(self) -> bool:
        return self.event is None or self.event.query()


class StagingRing:
    """A bounded set of equally large pinned buffers."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._idle: List[PinnedBuffer] = [PinnedBuffer(nbytes) for _ in range(count)]
        self._pending: List[PinnedBuffer] = []
        self._cv = threading.Condition()

    def checkout(self, timeout: float = 5.0) -> PinnedBuffer:
        deadline = time.monotonic() + timeout
        with self._cv:
            while not self._idle:
                self._sweep()
                left = deadline - time.monotonic()
                if not self._idle and left <= 0:
                    raise StagingTimeout(f"no staging buffer within {timeout}s")
                if not self._idle:
                    self._cv.wait(min(left, 0.01))
            buf = self._idle.pop()  # clean: returned
            buf.generation += 1
            return buf

    def try_checkout(self, nbytes: int) -> Optional[PinnedBuffer]:
        with self._cv:
            self._sweep()
            if not self._idle:
                return None
            buf = self._idle.pop()  # leak: popped before the size test, which returns None without putting it back
            if nbytes > buf.data.numel():
                log.warning("request of %d bytes does not fit a staging buffer", nbytes)
                return None
            buf.generation += 1
            return buf

    def checkin(self, buf: PinnedBuffer) -> None:
        buf.event = None
        with self._cv:
            self._idle.append(buf)
            self._cv.notify()

    def checkin_when_done(self, buf: PinnedBuffer, event: torch.cuda.Event) -> None:
        buf.event = event
        with self._cv:
            self._pending.append(buf)

    def _sweep(self) -> None:
        still = []
        while self._pending:
            buf = self._pending.pop()  # clean: goes to the idle list or back to the pending list
            (self._idle if buf.ready() else still).append(buf)
        self._pending = still


class CopyEngine:
    """Runs copies on a side stream; ``fault_hook`` lets tests inject errors."""

    def __init__(self, fault_hook: Optional[Callable[[int], bool]] = None) -> None:
        self.stream = torch.cuda.Stream()
        self._hook = fault_hook
        self._count = 0

    def h2d(self, src: torch.Tensor, dst: torch.Tensor) -> torch.cuda.Event:
        self._count += 1
        if self._hook is not None and self._hook(self._count):
            raise CopyFault(f"transfer {self._count}")
        with torch.cuda.stream(self.stream):
            dst.copy_(src, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event


class LayerOffloader:
    def __init__(self, ring: StagingRing, engine: CopyEngine, depth: int = 2) -> None:
        self.ring = ring
        self.engine = engine
        self.depth = depth
        self._host: Dict[int, torch.Tensor] = {}
        self._staged: Dict[int, PinnedBuffer] = {}
        self._dirty: Dict[int, List[PinnedBuffer]] = defaultdict(list)

    def register(self, layer: int, flat: torch.Tensor) -> None:
        self._host[layer] = flat.view(torch.uint8)

    # Staging ------------------------------------------------------------

    def _fill(self, layer: int) -> PinnedBuffer:
        src = self._host.get(layer)
        buf = self.ring.checkout()  # leak: the raise for an unregistered layer comes after the checkout
        if src is None:
            raise KeyError(f"layer {layer} was never registered")
        buf.data[: src.numel()].copy_(src)
        return buf

    def prefetch(self, layer: int) -> None:
        for ahead in range(layer, layer + self.depth):
            if ahead in self._staged or ahead not in self._host:
                continue
            self._staged[ahead] = self._fill(ahead)  # clean: absent from the table before, load or reset takes it out

    def load(self, layer: int, dst: torch.Tensor) -> torch.cuda.Event:
        """Copy a layer to the device, from its staged buffer where there is one."""
        buf = self._staged.pop(layer, None)
        if buf is None:
            buf = self._fill(layer)  # clean: checked in on a fault, handed to the sweep otherwise
        try:
            event = self.engine.h2d(buf.data[: dst.numel()], dst)
        except CopyFault:
            self.ring.checkin(buf)
            raise
        self.ring.checkin_when_done(buf, event)
        return event

    def load_with_retry(self, layer: int, dst: torch.Tensor, attempts: int = 3) -> torch.cuda.Event:
        src = self._host[layer]
        for attempt in range(attempts):
            buf = self.ring.checkout()  # leak: each faulted attempt drops its buffer and takes another
            buf.data[: src.numel()].copy_(src)
            try:
                event = self.engine.h2d(buf.data[: dst.numel()], dst)
            except CopyFault as exc:
                log.warning("layer %d, attempt %d: %s", layer, attempt, exc)
                continue
            self.ring.checkin_when_done(buf, event)
            return event
        raise CopyFault(f"layer {layer}: gave up after {attempts} attempts")

    def load_pair(self, a: int, b: int, dst_a: torch.Tensor, dst_b: torch.Tensor) -> None:
        """Load two fused layers; both or none are staged."""
        first = self.ring.checkout()  # leak: the second checkout may time out, and first is not checked in then
        second = self.ring.checkout()  # clean: all that follows runs under the finally
        try:
            for layer, buf, dst in ((a, first, dst_a), (b, second, dst_b)):
                src = self._host[layer]
                buf.data[: src.numel()].copy_(src)
                self.engine.h2d(buf.data[: dst.numel()], dst).synchronize()
        finally:
            self.ring.checkin(second)
            self.ring.checkin(first)

    def load_many(self, layers: List[int], dsts: List[torch.Tensor]) -> None:
        held: List[PinnedBuffer] = []
        try:
            for layer, dst in zip(layers, dsts):
                held.append(self._fill(layer))  # clean: every buffer in the list is checked in by the finally
                self.engine.h2d(held[-1].data[: dst.numel()], dst)
            torch.cuda.synchronize()
        finally:
            while held:
                self.ring.checkin(held.pop())

    # Write-back ---------------------------------------------------------

    def stage_dirty(self, layer: int, grad: torch.Tensor) -> bool:
        flat = grad.view(torch.uint8)
        buf = self.ring.try_checkout(flat.numel())  # clean: None, or appended to the list that flush works off
        if buf is None:
            return False
        buf.data[: flat.numel()].copy_(flat)
        self._dirty[layer].append(buf)
        return True

    def flush(self, apply: Callable[[int, torch.Tensor], None]) -> int:
        done = 0
        for layer in sorted(self._dirty):
            for buf in self._dirty.pop(layer):
                apply(layer, buf.data)
                self.ring.checkin(buf)
                done += 1
        return done

    def snapshot(self, layer: int) -> torch.Tensor:
        """A private copy of what would be sent to the device (debugging)."""
        return self._fill(layer).data.clone()  # leak: only the clone leaves, the staged buffer itself is dropped

    def checksum(self, layer: int) -> int:
        buf = self._fill(layer)  # clean: checked in after the sum is a plain int
        total = int(buf.data.to(torch.int64).sum())
        self.ring.checkin(buf)
        return total

    def reset(self) -> None:
        while self._staged:
            _, buf = self._staged.popitem()
            self.ring.checkin(buf)
        for bufs in self._dirty.values():
            for buf in bufs:
                self.ring.checkin(buf)
        self._dirty.clear()
