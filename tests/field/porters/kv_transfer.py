"""KV transfer between prefill and decode nodes."""
from __future__ import annotations

import collections
import logging
import time

log = logging.getLogger(__name__)


class RegistrationError(RuntimeError):
    pass


class MemoryRegistry:
    """Registered memory regions of the network card."""

    def __init__(self, nic, limit):
        self._nic = nic
        self._left = limit

    def register(self, region):
        if self._left == 0:
            raise RegistrationError
        self._left -= 1
        return self._nic.reg_mr(region)

    def deregister(self, handle):
        self._nic.dereg_mr(handle)
        self._left += 1


class RecvSlots:
    def __init__(self, count):
        self._idle = collections.deque(range(count))

    def take(self):
        return self._idle.popleft() if self._idle else None

    def put(self, slot):
        self._idle.append(slot)


class PrefillSender:
    def __init__(self, registry, wire):
        self.registry = registry
        self.wire = wire
        self.sends = {}
        self.attempts = collections.Counter()

    def send(self, rid, region):
        handle = self.registry.register(region)  # leak: a nack sends again and the new handle overwrites the first
        self.sends[rid] = handle
        self.wire.post(rid, handle)

    def on_ack(self, rid):
        self.attempts.pop(rid, None)
        self.registry.deregister(self.sends.pop(rid))

    def on_nack(self, rid, region):
        self.attempts[rid] += 1
        if self.attempts[rid] < 3:
            self.send(rid, region)
            return
        self.attempts.pop(rid)
        self.registry.deregister(self.sends.pop(rid))


class DecodeReceiver:
    def __init__(self, slots, timeout_s):
        self.slots = slots
        self.timeout_s = timeout_s
        self.expected = {}
        self.ready = {}

    def expect(self, rid):
        if rid in self.expected or rid in self.ready:
            return True
        slot = self.slots.take()  # leak: a transfer that times out is popped and only logged
        if slot is None:
            return False
        self.expected[rid] = (slot, time.monotonic() + self.timeout_s)
        return True

    def on_arrival(self, rid):
        entry = self.expected.pop(rid, None)
        if entry is not None:
            self.ready[rid] = entry[0]

    def consume(self, rid, load):
        slot = self.ready.pop(rid)
        load(slot)
        self.slots.put(slot)

    def expire(self):
        now = time.monotonic()
        for rid in list(self.expected):
            if self.expected[rid][1] < now:
                slot, _ = self.expected.pop(rid)
                log.warning("transfer of %s into slot %d timed out", rid, slot)


class TransferQueue:
    def __init__(self, registry, wire):
        self.registry = registry
        self.wire = wire
        self.jobs = collections.deque()

    def push(self, rid, region):
        self.jobs.append((rid, self.registry.register(region)))  # leak: cancel filters the queue and drops the handle

    def pump(self):
        while self.jobs and self.wire.has_credit():
            rid, handle = self.jobs.popleft()
            self.wire.write(rid, handle)
            self.registry.deregister(handle)

    def cancel(self, rid):
        self.jobs = collections.deque(job for job in self.jobs if job[0] != rid)


class RegionGroup:
    def __init__(self, registry):
        self.registry = registry
        self.handles = []

    def attach(self, regions):
        done = []
        try:
            for region in regions:
                done.append(self.registry.register(region))  # clean: near miss, the handler takes the first ones back
        except RegistrationError:
            for handle in done:
                self.registry.deregister(handle)
            return False
        self.handles.extend(done)
        return True

    def detach(self):
        for handle in self.handles:
            self.registry.deregister(handle)
        self.handles = []


class LayerwiseSender:
    def __init__(self, registry, wire, num_layers):
        self.registry = registry
        self.wire = wire
        self.num_layers = num_layers
        self.handles = {}

    def send_layer(self, rid, layer, region):
        assert (rid, layer) not in self.handles
        handle = self.registry.register(region)  # clean: near miss, keyed by request and layer, finish goes over all layers
        self.handles[rid, layer] = handle
        self.wire.write((rid, layer), handle)

    def finish(self, rid):
        for layer in range(self.num_layers):
            handle = self.handles.pop((rid, layer), None)
            if handle is not None:
                self.registry.deregister(handle)


class PeerTable:
    def __init__(self, registry):
        self.registry = registry
        self.peers = {}

    def on_handshake(self, addr, region):
        """A peer shakes hands when it comes up and after each reconnect."""
        handle = self.registry.register(region)  # leak: the handshake after a reconnect overwrites the peer's handle
        self.peers[addr] = handle
        return handle.rkey

    def on_goodbye(self, addr):
        handle = self.peers.pop(addr, None)
        if handle is not None:
            self.registry.deregister(handle)


class AsyncPuller:
    def __init__(self, slots, wire):
        self.slots = slots
        self.wire = wire

    def pull(self, rid, load):
        slot = self.slots.take()  # leak: a read that is complete at once gets no callback and the slot is not put back
        if slot is None:
            return False
        work = self.wire.read(rid, slot)
        if work.is_completed():
            load(slot)
            return True

        def done(_):
            load(slot)
            self.slots.put(slot)

        work.add_done_callback(done)
        return True


class Connection:
    def __init__(self, registry, handle):
        self.registry = registry
        self.handle = handle

    def close(self):
        if self.handle is not None:
            self.registry.deregister(self.handle)
            self.handle = None


class Connector:
    def __init__(self, registry):
        self.registry = registry
        self.connections = []

    def connect(self, region):
        conn = Connection(self.registry, self.registry.register(region))  # clean: near miss, the connection owns it and shutdown closes every one
        self.connections.append(conn)
        return conn

    def shutdown(self):
        while self.connections:
            self.connections.pop().close()
