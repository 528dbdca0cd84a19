from collections import defaultdict, deque


class Upstream:
    def __init__(self, host, number):
        self.host = host
        self.number = number
        self.healthy = True


class UpstreamPool:
    def __init__(self, host, size):
        self.conns = [Upstream(host, i) for i in range(size)]

    def borrow(self):
        return self.conns.pop()

    def give_back(self, conn):
        self.conns.append(conn)


class Proxy:
    """Warm connections per route; the route's deque is used round robin."""

    def __init__(self, pool):
        self.pool = pool
        self.warm = defaultdict(deque)
        self.websockets = {}
        self.hits = 0

    def warm_up(self, route, count):
        while len(self.warm[route]) < count:
            self.warm[route].append(self.pool.borrow())  # leak: check drops the unhealthy ones

    def request(self, route, send):
        ready = self.warm[route]
        if ready:
            conn = ready[0]
            ready.rotate(-1)
            self.hits += 1
            return send(conn)
        conn = self.pool.borrow()  # clean: given back after the request
        answer = send(conn)
        self.pool.give_back(conn)
        return answer

    def check(self, ping):
        for route, ready in self.warm.items():
            for _ in range(len(ready)):
                conn = ready.popleft()
                conn.healthy = ping(conn)
                if not conn.healthy:
                    continue
                ready.append(conn)

    def upgrade(self, client):
        if client in self.websockets:
            return self.websockets[client].number
        conn = self.pool.borrow()  # clean: downgrade gives it back
        self.websockets[client] = conn
        return conn.number

    def downgrade(self, client):
        conn = self.websockets.pop(client, None)
        if conn is not None:
            self.pool.give_back(conn)

    def remove_route(self, route):
        for conn in self.warm.pop(route, ()):
            self.pool.give_back(conn)


class Shadow:
    def __init__(self, pool, share):
        self.pool = pool
        self.share = share
        self.conn = None
        self.enabled = False

    def arm(self, enabled):
        self.enabled = enabled
        if self.conn is None:
            self.conn = self.pool.borrow()  # leak: disarm gives back only when enabled

    def disarm(self):
        conn, self.conn = self.conn, None
        if self.enabled and conn is not None:
            self.pool.give_back(conn)
        self.enabled = False
