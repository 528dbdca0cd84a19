"""Descriptor ring of a network card driver."""


class Descriptor:
    __slots__ = ("index", "addr", "length", "flags")

    def __init__(self, index):
        self.index = index
        self.addr = self.length = self.flags = 0


class DescriptorRing:
    def __init__(self, size):
        self._idle = [Descriptor(i) for i in range(size)]
        self.in_flight = {}

    def claim(self):
        return self._idle.pop() if self._idle else None

    def recycle(self, desc):
        desc.addr = desc.length = desc.flags = 0
        self._idle.append(desc)

    def complete(self, index):
        self.recycle(self.in_flight.pop(index))


class Nic:
    def __init__(self, ring, mmio):
        self.ring = ring
        self.mmio = mmio
        self.drops = 0
        self.handlers = {
            "data": self._on_data,
            "pause": self._on_pause,
            "stats": self._on_stats,
        }
        self.claimers = {"rx": ring.claim, "tx": self._claim_marked}

    def _claim_marked(self):
        desc = self.ring.claim()  # clean: handed to whoever looks it up in the table
        if desc is not None:
            desc.flags |= 0x8000
        return desc

    def _on_data(self, desc, frame):
        desc.addr, desc.length = self.mmio.map(frame)
        self.ring.in_flight[desc.index] = desc
        self.mmio.doorbell(desc.index)

    def _on_pause(self, desc, frame):
        self.mmio.write(0x40, frame[0])
        self.ring.recycle(desc)

    def _on_stats(self, desc, frame):
        self.mmio.write(0x44, len(frame))
        self.ring.recycle(desc)

    def dispatch(self, kind, frame):
        if kind not in self.handlers:
            self.drops += 1
            return False
        desc = self.claimers["tx"]()  # clean: each handler in the table takes over or recycles
        if desc is None:
            self.drops += 1
            return False
        self.handlers[kind](desc, frame)
        return True

    def dispatch_lenient(self, kind, frame):
        desc = self.claimers["tx"]()  # leak: an unknown kind has no handler
        if desc is None:
            return False
        handler = self.handlers.get(kind)
        if handler is not None:
            handler(desc, frame)
        else:
            self.drops += 1
        return handler is not None

    def poll(self):
        desc = self.claimers["rx"]()  # leak: length 0 returns before recycle
        if desc is None:
            return b""
        desc.length = self.mmio.read(0x10)
        if not desc.length:
            return b""
        payload = self.mmio.copy_out(desc.addr, desc.length)
        self.ring.recycle(desc)
        return payload
