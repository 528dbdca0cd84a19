"""LoRA adapter slots in GPU memory: registry, quota wrapper, router."""
import collections
import logging
import threading
import time

import torch

log = logging.getLogger("adapters")


class AdapterMissing(KeyError):
    pass


class SlotBank:
    """A/B matrices for `n` adapters, stacked so that the batched GEMM can index them."""

    def __init__(self, n, layers, d, r):
        self.a = torch.zeros(n, layers, r, d, device="cuda", dtype=torch.half)
        self.b = torch.zeros(n, layers, d, r, device="cuda", dtype=torch.half)
        self._open = set(range(n))

    def reserve_slot(self):
        return self._open.pop() if self._open else None  # clean: returned to the caller

    def free_slot(self, i):
        self.a[i].zero_()
        self.b[i].zero_()
        self._open.add(i)


class QuotaBank:
    """Per-tenant limit in front of the bank."""

    def __init__(self, bank, limit):
        self.bank = bank
        self.limit = limit
        self.by_tenant = collections.Counter()

    def reserve_slot(self, tenant):
        i = self.bank.reserve_slot()  # leak: slot is not freed when the tenant is over the limit
        if i is None:
            return None
        if self.by_tenant[tenant] >= self.limit:
            log.info("tenant %s over its limit", tenant)
            return None
        self.by_tenant[tenant] += 1
        return i

    def reserve_checked(self, tenant):
        if self.by_tenant[tenant] >= self.limit:
            return None
        i = self.bank.reserve_slot()  # clean: near miss, limit is checked before, slot goes to the caller
        if i is not None:
            self.by_tenant[tenant] += 1
        return i

    def free_slot(self, tenant, i):
        self.by_tenant[tenant] -= 1
        self.bank.free_slot(i)


class LoggedBank:
    """Wrapper of the quota wrapper, keeps hold times for the dashboard."""

    def __init__(self, inner, clock=time.monotonic):
        self.inner = inner
        self.clock = clock
        self.since = {}

    def open_for(self, tenant):
        i = self.inner.reserve_checked(tenant)  # clean: returned to the caller
        if i is None:
            return None
        self.since[i] = self.clock()
        return i

    def close_for(self, tenant, i):
        held = self.clock() - self.since.pop(i)
        log.debug("slot %d held %.1fs", i, held)
        self.inner.free_slot(tenant, i)

    def open_low(self, tenant, ceiling, tries=4):
        """Slot below `ceiling`, where the small-rank kernel can reach."""
        for _ in range(tries):
            i = self.open_for(tenant)  # leak: a slot above the ceiling is abandoned on the next try
            if i is not None and i < ceiling:
                return i
        return None


class Adapter:
    def __init__(self, name, tenant, slot):
        self.name = name
        self.tenant = tenant
        self.slot = slot
        self.users = 0
        self.stale = False


class AdapterRegistry:
    def __init__(self, bank, store):
        self.bank = bank          # LoggedBank
        self.store = store
        self.loaded = {}
        self.mu = threading.RLock()

    def use(self, name, tenant):
        """Counts a user of the adapter, loading it first where needed."""
        with self.mu:
            ad = self.loaded.get(name)
            if ad is None:
                ad = self._load(name, tenant)  # clean: near miss, kept in self.loaded until unload
                if ad is None:
                    return None
                self.loaded[name] = ad
            ad.users += 1
            return ad

    def _load(self, name, tenant):
        slot = self.bank.open_for(tenant)  # leak: slot stays open when the store lacks the adapter
        if slot is None:
            return None
        weights = self.store.get(name)
        if weights is None:
            raise AdapterMissing(name)
        self._fill(slot, weights)
        return Adapter(name, tenant, slot)

    def _fill(self, slot, weights):
        bank = self.bank.inner.bank
        for layer, (a, b) in enumerate(weights):
            bank.a[slot, layer].copy_(a)
            bank.b[slot, layer].copy_(b)

    def leave(self, ad):
        with self.mu:
            ad.users -= 1
            if ad.stale and ad.users == 0:
                self.bank.close_for(ad.tenant, ad.slot)

    def unload(self, name):
        with self.mu:
            ad = self.loaded.pop(name, None)
            if ad is None:
                return
            ad.stale = True
            if ad.users == 0:
                self.bank.close_for(ad.tenant, ad.slot)


class Router:
    def __init__(self, registry):
        self.reg = registry
        self.waiting = collections.deque()

    def forward(self, name, tenant, fn):
        ad = self.reg.use(name, tenant)  # clean: left by the finally
        if ad is None:
            return None
        try:
            return fn(ad.slot)
        finally:
            self.reg.leave(ad)

    def forward_batch(self, requests, fn):
        users = []
        index = []
        for r in requests:
            ad = self.reg.use(r["adapter"], r["tenant"])  # leak: strict mode returns without leaving the adapters gathered so far
            if ad is None:
                if r.get("strict"):
                    return None
                continue
            users.append(ad)
            index.append(ad.slot)
        out = fn(torch.tensor(index, device="cuda"))
        for ad in users:
            self.reg.leave(ad)
        return out

    def describe(self, name, tenant):
        ad = self.reg.use(name, tenant)  # leak: user count is not taken back after reading the slot
        return {"name": name, "slot": None if ad is None else ad.slot}

    def enqueue(self, request):
        ad = self.reg.use(request["adapter"], request["tenant"])  # clean: near miss, rides in the waiting tuple, left by pump or cancel_all
        if ad is None:
            return False
        self.waiting.append((request, ad))
        return True

    def pump(self, fn):
        n = 0
        while self.waiting:
            request, ad = self.waiting.popleft()  # clean: left by the finally
            try:
                fn(request, ad.slot)
                n += 1
            finally:
                self.reg.leave(ad)
        return n

    def pump_live(self, fn):
        while self.waiting:
            request, ad = self.waiting.popleft()  # leak: requests that were cancelled meanwhile are skipped without leave
            if request.get("cancelled"):
                continue
            fn(request, ad.slot)
            self.reg.leave(ad)

    def cancel_all(self):
        while self.waiting:
            _, ad = self.waiting.pop()
            self.reg.leave(ad)
