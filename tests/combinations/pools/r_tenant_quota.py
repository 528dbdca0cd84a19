# take: P.admit(key, n)
# give: P.discharge(key, n)
# gets: answer
# type: BurstyTenantLedger
import collections


class TenantLedger:
    def __init__(self, default_cap, caps=None):
        self.caps = collections.defaultdict(lambda: default_cap, caps or {})
        self.in_use = collections.Counter()

    def cap_of(self, tenant):
        return self.caps[tenant]

    def admit(self, tenant, tokens):
        if self.in_use[tenant] + tokens > self.cap_of(tenant):
            return False
        self.in_use[tenant] += tokens
        return True

    def discharge(self, tenant, tokens):
        self.in_use[tenant] -= tokens
        if self.in_use[tenant] <= 0:
            del self.in_use[tenant]


class BurstyTenantLedger(TenantLedger):
    """A tenant alone on the gateway may go over its share by `burst`."""

    def __init__(self, default_cap, caps=None, burst=1.5):
        super().__init__(default_cap, caps)
        self.burst = burst

    def cap_of(self, tenant):
        base = super().cap_of(tenant)
        alone = not any(t != tenant for t in self.in_use if self.in_use[t])
        return int(base * self.burst) if alone else base
