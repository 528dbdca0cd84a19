"""Adaptive concurrency limit: each admission ends as success, as dropped or as ignored."""
import threading
import time


class Admission:
    def __init__(self, limiter):
        self._limiter = limiter
        self._began = time.monotonic()

    def on_success(self):
        self._limiter.settle(+0.1, time.monotonic() - self._began)

    def on_dropped(self):
        self._limiter.settle(-1.0, None)

    def on_ignore(self):
        self._limiter.settle(0.0, None)


class AdaptiveLimiter:
    def __init__(self, limit=20.0):
        self.limit = limit
        self.inflight = 0
        self._lock = threading.Lock()

    def knock(self):
        with self._lock:
            if self.inflight >= int(self.limit):
                return None
            self.inflight += 1
        return Admission(self)

    def settle(self, delta, rtt):
        with self._lock:
            self.inflight -= 1
            self.limit = max(1.0, self.limit + (delta if rtt is None or rtt < 1.0 else 0.0))


def call(limiter, service, request):
    a = limiter.knock()  # clean: settled in one of two ways
    if a is None:
        return 503
    try:
        status = service(request)
    except TimeoutError:
        a.on_dropped()
        return 504
    a.on_success()
    return status


def call_cached(limiter, service, request, cache):
    a = limiter.knock()  # leak: a hit in the cache returns without on_ignore
    if a is None:
        return None
    if request in cache:
        return cache[request]
    cache[request] = service(request)
    a.on_success()
    return cache[request]


def health(limiter, service):
    a = limiter.knock()  # leak: an unhealthy answer settles nothing
    ok = service("health")
    if ok and a:
        a.on_success()
    return ok
