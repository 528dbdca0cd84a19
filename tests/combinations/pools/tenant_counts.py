# take: P.charge(key, n)
# give: P.credit(key, n)
# gets: answer
class Pool:
    def __init__(self, quotas):
        self.quotas = quotas
        self.used = {tenant: 0 for tenant in quotas}

    def charge(self, tenant, tokens):
        if self.used[tenant] + tokens > self.quotas[tenant]:
            return False
        self.used[tenant] += tokens
        return True

    def credit(self, tenant, tokens):
        self.used[tenant] -= tokens
