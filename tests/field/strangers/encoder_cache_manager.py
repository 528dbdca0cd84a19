"""Multimodal encoder outputs: budget per image, shared among requests."""


class EncoderBudget:
    def __init__(self, tokens):
        self.tokens = tokens

    def reserve(self, n):
        if n > self.tokens:
            return None
        self.tokens -= n
        return {"n": n}

    def unreserve(self, grant):
        self.tokens += grant["n"]


class EncoderCacheManager:
    def __init__(self, tokens):
        self.budget = EncoderBudget(tokens)
        self.cached = {}     # image hash -> (grant, set of request ids)
        self.freeable = {}   # image hash -> grant

    def get(self, request, image):
        entry = self.cached.get(image)
        if entry is None and image in self.freeable:
            entry = self.cached[image] = (self.freeable.pop(image), set())
        if entry is None:
            return False
        entry[1].add(request)
        return True

    def add(self, request, image, n):
        if self.get(request, image):
            return True
        grant = self.budget.reserve(n)  # clean: near miss, cached -> freeable -> unreserved by reclaim or clear
        if grant is None and self.reclaim(n):
            grant = self.budget.reserve(n)  # clean: near miss, second try after reclaiming, same life
        if grant is None:
            return False
        self.cached[image] = (grant, {request})
        return True

    def release(self, request):
        for image in [i for i, (_, users) in self.cached.items() if request in users]:
            grant, users = self.cached[image]
            users.discard(request)
            if not users:
                del self.cached[image]
                self.freeable[image] = grant

    def reclaim(self, n):
        while self.freeable and self.budget.tokens < n:
            _, grant = self.freeable.popitem()
            self.budget.unreserve(grant)
        return self.budget.tokens >= n

    def clear(self):
        for grant, _ in self.cached.values():
            self.budget.unreserve(grant)
        self.cached.clear()
        self.reclaim(float("inf"))


class ProfileRun:
    """Dry run before the engine starts."""

    def __init__(self, manager):
        self.manager = manager
        self.peak = 0

    def try_sizes(self, sizes):
        for n in sizes:
            grant = self.manager.budget.reserve(n)  # leak: a new peak continues before unreserve
            if grant is None:
                return self.peak
            if n > self.peak:
                self.peak = n
                continue
            self.manager.budget.unreserve(grant)
        return self.peak

    def bisect(self, low, high):
        while low < high:
            mid = (low + high + 1) // 2
            grant = self.manager.budget.reserve(mid)  # clean: near miss, unreserved in the branch that got it
            if grant is None:
                high = mid - 1
            else:
                self.manager.budget.unreserve(grant)
                low = mid
        return low

    def fill(self, n):
        grants = []
        while True:
            grant = self.manager.budget.reserve(n)  # leak: the last of the list is popped and never unreserved
            if grant is None:
                break
            grants.append(grant)
        count = len(grants)
        if grants:
            grants.pop()
        for grant in grants:
            self.manager.budget.unreserve(grant)
        return count
