"""Byte budgets for each tenant; the lease is the number of bytes itself."""
from collections import defaultdict


class TenantBudgets:
    def __init__(self, default_bytes):
        self._left = defaultdict(lambda: default_bytes)

    def debit(self, tenant, nbytes):
        granted = min(nbytes, self._left[tenant])
        self._left[tenant] -= granted
        return granted

    def credit(self, tenant, nbytes):
        self._left[tenant] += nbytes

    def left(self, tenant):
        return self._left[tenant]


class PromptCache:
    def __init__(self, budgets: TenantBudgets, store):
        self.budgets = budgets
        self.store = store
        self.charged = {}

    def put(self, tenant, key, blob):
        got = self.budgets.debit(tenant, len(blob))  # leak: a partial grant returns False uncredited
        if got < len(blob):
            return False
        self.store.write(key, blob)
        self.charged[key] = (tenant, got)
        return True

    def evict(self, key):
        tenant, got = self.charged.pop(key)
        self.store.delete(key)
        self.budgets.credit(tenant, got)

    def put_or_refuse(self, tenant, key, blob):
        got = self.budgets.debit(tenant, len(blob))  # clean: credited or kept for evict()
        if got < len(blob):
            self.budgets.credit(tenant, got)
            return False
        self.store.write(key, blob)
        self.charged[key] = (tenant, got)
        return True

    def transcode(self, tenant, blob):
        got = self.budgets.debit(tenant, 2 * len(blob))  # clean: finally
        try:
            return self.store.recode(blob, chunk=max(1, got))
        finally:
            self.budgets.credit(tenant, got)

    def estimate(self, tenant, blobs):
        total = 0
        for blob in blobs:
            got = self.budgets.debit(tenant, len(blob))  # leak: break at an empty budget skips the credit
            if got < len(blob):
                break
            total += self.store.ratio(blob)
            self.budgets.credit(tenant, got)
        return total
