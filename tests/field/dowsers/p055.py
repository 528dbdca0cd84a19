"""Active LoRA adapters: a name is active while at least one request uses it."""


class AdapterManager:
    def __init__(self, gpu, max_active):
        self.gpu = gpu
        self.max_active = max_active
        self.active = {}

    def _lru_idle(self):
        for name, rec in self.active.items():
            if rec["requests"] == 0:
                return name
        return None

    def activate(self, name):
        rec = self.active.pop(name, None)
        if rec is None:
            if len(self.active) >= self.max_active:
                victim = self._lru_idle()
                if victim is None:
                    return None
                self.gpu.evict(self.active.pop(victim)["slot"])
            rec = {"slot": self.gpu.load(name), "requests": 0}
        rec["requests"] += 1
        self.active[name] = rec
        return rec["slot"]

    def deactivate(self, name):
        self.active[name]["requests"] -= 1


class LoraBatcher:
    def __init__(self, manager: AdapterManager, model):
        self.manager = manager
        self.model = model

    def generate(self, req):
        slot = self.manager.activate(req.adapter)  # clean: deactivated in finally
        if slot is None:
            return None
        try:
            return self.model.generate(req, slot)
        finally:
            self.manager.deactivate(req.adapter)

    def admit(self, req, running):
        slot = self.manager.activate(req.adapter)  # leak: a rank mismatch returns while active
        if slot is None or self.model.rank(slot) > self.model.max_rank:
            return False
        running.append(req)
        return True

    def complete(self, req, running):
        running.remove(req)
        self.manager.deactivate(req.adapter)

    def preload(self, names):
        for name in names:
            self.manager.activate(name)  # clean: deactivated at once, stays resident but idle
            self.manager.deactivate(name)

    def delta_norm(self, name):
        slot = self.manager.activate(name)  # leak: a zero norm does not deactivate
        if slot is None:
            return 0.0
        norm = self.model.norm(slot)
        if norm > 0:
            self.manager.deactivate(name)
        return norm
