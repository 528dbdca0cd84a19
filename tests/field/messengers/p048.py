"""Translation contexts of an I/O memory unit, cached per device."""


class ContextIds:
    def __init__(self, count):
        self._ids = list(range(1, count))

    def get_id(self):
        return self._ids.pop()

    def put_id(self, ident):
        self._ids.append(ident)


class Iommu:
    def __init__(self, ids, tlb):
        self.ids = ids
        self.tlb = tlb
        self.by_device = {}
        self.current = None

    def context(self, device):
        if device not in self.by_device:
            self.by_device[device] = self.ids.get_id()  # clean: kept in the table until detach
        return self.by_device[device]

    def context_default(self, device):
        return self.by_device.setdefault(device, self.ids.get_id())  # leak: a known device keeps its old one

    def context_or_new(self, device):
        ident = self.by_device.get(device) or self.ids.get_id()  # clean: stored for a new device
        self.by_device[device] = ident
        return ident

    def attach(self, device, pages):
        ident = self.context(device)
        for page in pages:
            self.tlb.map(ident, page)
        return len(pages)

    def detach(self, device):
        ident = self.by_device.pop(device, None)
        if ident is not None:
            self.tlb.invalidate(ident)
            self.ids.put_id(ident)

    def switch(self):
        fresh = self.ids.get_id()  # clean: becomes current, the old one is put
        old, self.current = self.current, fresh
        if old is not None:
            self.tlb.invalidate(old)
            self.ids.put_id(old)

    def renew(self, device):
        self.by_device[device], old = self.ids.get_id(), self.by_device.get(device)  # clean: the old is put
        if old is not None:
            self.ids.put_id(old)

    def replay(self, device, pages):
        ident = self.ids.get_id()  # leak: overwritten by the table's own context
        if device in self.by_device:
            ident = self.by_device[device]
        for page in pages:
            self.tlb.map(ident, page)
        self.by_device[device] = ident
