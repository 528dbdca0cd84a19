"""Least-loaded replica choice: route to one, settle when its request is over."""
import heapq
import itertools


class ReplicaRouter:
    def __init__(self, urls):
        self._heap = []
        self._tie = itertools.count()
        self._inflight = {}
        for u in urls:
            self._inflight[u] = 0
            heapq.heappush(self._heap, (0, next(self._tie), u))

    def route(self):
        while True:
            count, _, url = heapq.heappop(self._heap)
            if count == self._inflight[url]:
                self._bump(url, +1)
                return url

    def settle(self, url):
        self._bump(url, -1)

    def _bump(self, url, by):
        self._inflight[url] += by
        heapq.heappush(self._heap, (self._inflight[url], next(self._tie), url))


class Gateway:
    def __init__(self, router: ReplicaRouter, http):
        self.router = router
        self.http = http

    def complete(self, body):
        url = self.router.route()  # clean: settled in finally
        try:
            return self.http.post(url, body)
        finally:
            self.router.settle(url)

    def complete_cached(self, body, cache):
        url = self.router.route()  # leak: a cached reply returns without settling
        reply = cache.get((url, body))
        if reply is not None:
            return reply
        reply = self.http.post(url, body)
        self.router.settle(url)
        return reply

    def complete_retry(self, body):
        for _ in range(3):
            url = self.router.route()  # leak: a failed try continues without settling
            reply = self.http.post(url, body)
            if reply.status >= 500:
                continue
            self.router.settle(url)
            return reply
        return None

    def stream(self, body):
        url = self.router.route()  # clean: settled in the generator's finally
        try:
            yield from self.http.stream(url, body)
        finally:
            self.router.settle(url)
