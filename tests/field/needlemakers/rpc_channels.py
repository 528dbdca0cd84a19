"""Channel pool for the inter-shard RPC plane (one pool per process)."""
import heapq
import itertools
import random
import threading
import time


class PoolExhausted(RuntimeError):
    pass


class TargetDown(RuntimeError):
    pass


class RpcError(RuntimeError):
    def __init__(self, code, msg=""):
        super().__init__(f"{code}: {msg}")
        self.code = code


class Channel:
    def __init__(self, target, dialer):
        self.target = target
        self.sock = dialer(target)
        self.born = time.monotonic()
        self.broken = False

    def call(self, method, body, deadline=1.0):
        reply = self.sock.exchange(method, body, deadline)
        if reply.code:
            if reply.code >= 500:
                self.broken = True
            raise RpcError(reply.code, reply.message)
        return reply.body

    def close(self):
        self.sock.close()


class ChannelPool:
    def __init__(self, dialer, limit=64, max_age=300.0):
        self._dialer = dialer
        self._budget = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._seq = itertools.count()
        self._idle = {}      # target -> heap of (born, seq, channel)
        self._down = set()
        self._max_age = max_age

    def mark_down(self, target):
        with self._lock:
            self._down.add(target)

    def lease(self, target, timeout=2.0):
        if not self._budget.acquire(timeout=timeout):  # leak: permit kept when the target is down
            raise PoolExhausted(target)
        with self._lock:
            if target in self._down:
                raise TargetDown(target)
            heap = self._idle.setdefault(target, [])
            while heap:
                born, _, chan = heapq.heappop(heap)  # clean: returned to the caller, or closed when too old
                if time.monotonic() - born > self._max_age:
                    chan.close()
                    continue
                return chan
        return Channel(target, self._dialer)

    def try_lease(self, target):
        if not self._budget.acquire(blocking=False):  # clean: released when nothing is idle, else goes with the channel
            return None
        with self._lock:
            heap = self._idle.get(target)
            if not heap:
                self._budget.release()
                return None
            return heapq.heappop(heap)[2]  # clean: returned to the caller

    def hand_back(self, chan):
        with self._lock:
            if chan.broken:
                chan.close()
            else:
                heapq.heappush(self._idle.setdefault(chan.target, []), (chan.born, next(self._seq), chan))
        self._budget.release()

    def borrowed(self, target):
        return _Borrowed(self, target)


class _Borrowed:
    def __init__(self, pool, target):
        self._pool, self._target = pool, target
        self._chan = None

    def __enter__(self):
        self._chan = self._pool.lease(self._target)  # leak: __exit__ returns before hand_back on RpcError below 500
        return self._chan

    def __exit__(self, et, ev, tb):
        if et is not None and issubclass(et, RpcError) and ev.code < 500:
            return True
        self._pool.hand_back(self._chan)
        return False


class ShardClient:
    def __init__(self, pool, targets):
        self.pool = pool
        self.targets = list(targets)
        self._sticky = {}
        self._lock = threading.Lock()

    def ping(self, target):
        chan = self.pool.lease(target)  # clean: finally
        try:
            return chan.call("Ping", b"") == b"pong"
        except RpcError:
            return False
        finally:
            self.pool.hand_back(chan)

    def lookup(self, key, attempts=3):
        last = None
        for _ in range(attempts):
            target = random.choice(self.targets)
            chan = self.pool.lease(target)  # leak: a retry after RpcError leases anew without handing back
            try:
                body = chan.call("Lookup", key)
            except RpcError as exc:
                last = exc
                time.sleep(0.01)
                continue
            self.pool.hand_back(chan)
            return body
        raise last

    def store(self, key, value, attempts=3):
        for n in range(attempts):
            chan = self.pool.lease(self.targets[n % len(self.targets)])  # clean: handed back in both the handler and the else
            try:
                chan.call("Store", key + b"\0" + value)
            except RpcError as exc:
                self.pool.hand_back(chan)
                if exc.code < 500:
                    raise
            else:
                self.pool.hand_back(chan)
                return True
        return False

    def copy_shard(self, src, dst, keys):
        a = self.pool.lease(src)  # clean: near miss, handed back by the outer finally even when the second lease is refused
        try:
            b = self.pool.try_lease(dst)  # clean: None-checked, handed back by the inner finally
            if b is None:
                return 0
            try:
                for k in keys:
                    b.call("Store", k + b"\0" + a.call("Lookup", k))
                return len(keys)
            finally:
                self.pool.hand_back(b)
        finally:
            self.pool.hand_back(a)

    def sticky(self, session_id, target):
        """Same channel for the whole session; end_session gives it up."""
        with self._lock:
            chan = self._sticky.get(session_id)
            if chan is None or chan.broken:
                chan = self.pool.lease(target)  # leak: a broken sticky channel is overwritten in the table and never handed back
                self._sticky[session_id] = chan
            return chan

    def end_session(self, session_id):
        with self._lock:
            chan = self._sticky.pop(session_id, None)
        if chan is not None:
            self.pool.hand_back(chan)

    def watch(self, target, topic):
        chan = self.pool.lease(target)  # clean: near miss, generator hands it back in its finally
        try:
            cursor = b"0"
            while True:
                cursor, _, event = chan.call("Poll", topic + cursor, 30.0).partition(b"\n")
                if event == b"EOF":
                    return
                yield event
        finally:
            self.pool.hand_back(chan)

    def elect(self, key):
        best = None
        best_rank = -1
        for t in self.targets:
            chan = self.pool.try_lease(t)  # leak: the channel of an earlier candidate is dropped when a better one replaces it
            if chan is None:
                continue
            rank = hash((key, t)) & 0xFFFF
            if rank > best_rank:
                best, best_rank = chan, rank
            else:
                self.pool.hand_back(chan)
        if best is None:
            return None
        try:
            return best.call("Elect", key)
        finally:
            self.pool.hand_back(best)
