"""VLAN numbers for tenants' networks: contiguous ranges are carved out and merged again."""


class VlanSpace:
    def __init__(self, lo=100, hi=4000):
        self.gaps = [(lo, hi)]

    def carve(self, n):
        for i, (a, b) in enumerate(self.gaps):
            if b - a >= n:
                if b - a == n:
                    del self.gaps[i]
                else:
                    self.gaps[i] = (a + n, b)
                return range(a, a + n)
        return None

    def merge(self, r):
        self.gaps.append((r.start, r.stop))
        self.gaps.sort()
        joined = self.gaps[:1]
        for a, b in self.gaps[1:]:
            if a == joined[-1][1]:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self.gaps = joined


class Fabric:
    def __init__(self, space, switch):
        self.space = space
        self.switch = switch
        self.tenants = {}

    def onboard(self, tenant, n):
        r = self.space.carve(n)  # clean: stored under the tenant, merged by offboard()
        if r is not None:
            self.tenants[tenant] = r

    def offboard(self, tenant):
        r = self.tenants.pop(tenant, None)
        if r:
            self.space.merge(r)

    def loop_test(self):
        r = self.space.carve(2)  # clean: merged in finally
        if r is None:
            return None
        try:
            return self.switch.loop(r.start, r.stop - 1)
        finally:
            self.space.merge(r)

    def provision(self, tenant, n):
        r = self.space.carve(n)  # leak: a switch that refuses a number returns with the range carved out
        if r is None:
            return False
        for vid in r:
            if not self.switch.create(vid):
                return False
        self.tenants[tenant] = r
        return True

    def fits(self, n):
        found = self.space.carve(n)  # leak: the range found for the test stays carved out
        return found is not None
