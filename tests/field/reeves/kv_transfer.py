"""Prefill/decode disaggregation: KV transfer over registered memory regions."""
import asyncio
import logging
from dataclasses import dataclass, replace

log = logging.getLogger("kv_transfer")


class RegionRegistry:
    def __init__(self, base, size, count):
        self._open = [(base + i * size, size) for i in range(count)]
        self._keys = {}
        self._next_key = 1

    def register(self):
        """Returns the key of a region, 0 if none is free."""
        if not self._open:
            return 0
        key = self._next_key
        self._next_key += 1
        self._keys[key] = self._open.pop()
        return key

    def deregister(self, key):
        self._open.append(self._keys.pop(key))


class QueuePairs:
    def __init__(self, n):
        self._free = list(range(n))

    def get(self):
        return self._free.pop() if self._free else None

    def put(self, qp):
        self._free.append(qp)


@dataclass(frozen=True)
class Transfer:
    req: str
    peer: str
    region: int
    qp: int
    mirror: int = 0
    blocks: tuple = ()


class Sender:
    def __init__(self, registry: RegionRegistry, pairs: QueuePairs):
        self.registry = registry
        self.pairs = pairs
        self.active = {}
        self.by_peer = {}

    def connect(self, peer):
        if peer in self.by_peer:
            return True
        qp = self.pairs.get()  # clean: near miss, lies in by_peer till disconnect puts it
        if qp is None:
            return False
        self.by_peer[peer] = qp
        return True

    def disconnect(self, peer):
        for req in [r for r, t in self.active.items() if t.peer == peer]:
            self.on_event({"kind": "cancelled", "req": req})
        qp = self.by_peer.pop(peer, None)
        if qp is not None:
            self.pairs.put(qp)

    def post(self, req, peer, blocks, mirrored):
        if req in self.active or peer not in self.by_peer:
            return False
        region = self.registry.register()  # leak: the timeout case removes the transfer with its region
        if not region:
            return False
        qp = self.pairs.get()  # clean: near miss, all three cases of on_event put it
        if qp is None:
            self.registry.deregister(region)
            return False
        t = Transfer(req, peer, region, qp, blocks=tuple(blocks))
        if mirrored:
            t = replace(t, mirror=self.registry.register())  # leak: the done case forgets the mirror
        self.active[req] = t
        return True

    def on_event(self, event):
        match event:
            case {"kind": "done", "req": req}:
                t = self.active.pop(req)
                self.registry.deregister(t.region)
                self.pairs.put(t.qp)
                log.info("%s sent %d blocks", req, len(t.blocks))
            case {"kind": "cancelled", "req": req}:
                t = self.active.pop(req)
                for key in (t.region, t.mirror):
                    if key:
                        self.registry.deregister(key)
                self.pairs.put(t.qp)
            case {"kind": "timeout", "req": req, "after": after}:
                t = self.active.pop(req)
                if t.mirror:
                    self.registry.deregister(t.mirror)
                self.pairs.put(t.qp)
                log.warning("%s timed out after %.1f s", req, after)
            case _:
                log.debug("unknown event %r", event)


class Receiver:
    """Decode side. A landing region waits for each announced prefill."""

    def __init__(self, registry: RegionRegistry, pairs: QueuePairs):
        self.registry = registry
        self.pairs = pairs
        self.landing = {}
        self.arrived = []
        self.control = None
        self.probe = None

    def announce(self, req, layers):
        if req in self.landing:
            return self.landing[req]["layers"]
        keys = []
        for _ in range(layers):
            key = self.registry.register()  # leak: fail() drops the record of the request with its keys
            if not key:
                for k in keys:
                    self.registry.deregister(k)
                return 0
            keys.append(key)
        self.landing[req] = {"keys": keys, "layers": layers, "seen": 0}
        return layers

    def layer_arrived(self, req):
        rec = self.landing[req]
        rec["seen"] += 1
        if rec["seen"] == rec["layers"]:
            self.arrived.append(self.landing.pop(req))
        return rec["seen"]

    def consume(self, copy):
        while self.arrived:
            rec = self.arrived.pop()
            for key in rec["keys"]:
                copy(key)
                self.registry.deregister(key)

    def fail(self, req, reason):
        rec = self.landing.pop(req, None)
        if rec is not None:
            log.error("%s lost after %d of %d layers: %s", req, rec["seen"], rec["layers"], reason)

    def renew_control(self):
        fresh = self.pairs.get()  # clean: near miss, the former pair is put, the last one by shutdown
        if fresh is None:
            return False
        stale, self.control = self.control, fresh
        if stale is not None:
            self.pairs.put(stale)
        return True

    def renew_probe(self):
        fresh = self.pairs.get()  # leak: the former probe pair is overwritten, shutdown puts the last
        if fresh is None:
            return False
        self.probe = fresh
        return True

    def shutdown(self):
        for rec in [*self.landing.values(), *self.arrived]:
            for key in rec["keys"]:
                self.registry.deregister(key)
        self.landing.clear()
        self.arrived.clear()
        for qp in (self.control, self.probe):
            if qp is not None:
                self.pairs.put(qp)
        self.control = self.probe = None


class LayerPush:
    """Pushes layers while the prefill still runs; each task owns its region until its callback ran."""

    def __init__(self, registry: RegionRegistry):
        self.registry = registry
        self.by_task = {}
        self.window = {}

    def push(self, layer, send):
        key = self.registry.register()  # clean: near miss, done callback deregisters it, also if cancelled
        if not key:
            return False
        task = asyncio.create_task(send(layer, key))
        self.by_task[task] = key
        task.add_done_callback(self._settled)
        return True

    def _settled(self, task):
        self.registry.deregister(self.by_task.pop(task))

    def cancel(self):
        for task in self.by_task:
            task.cancel()

    def open_window(self, layer):
        if layer not in self.window:
            self.window[layer] = self.registry.register()  # clean: near miss, close_window deregisters them
        return self.window[layer] != 0

    def close_window(self):
        for key in filter(None, self.window.values()):
            self.registry.deregister(key)
        self.window = {}
