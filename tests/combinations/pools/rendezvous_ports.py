# take: P.lease_port()
# give: P.yield_port(X)
# gets: optional
# type: PortRange
class PortRange:
    def __init__(self, lo=29500, hi=29600):
        self._lo = lo
        self._hi = hi
        self._cursor = lo
        self._leased = set()

    def _advance(self):
        self._cursor += 1
        if self._cursor >= self._hi:
            self._cursor = self._lo

    def lease_port(self):
        if len(self._leased) == self._hi - self._lo:
            return None
        while self._cursor in self._leased:
            self._advance()
        port = self._cursor
        self._leased.add(port)
        self._advance()
        return port

    def yield_port(self, port):
        if port not in self._leased:
            raise ValueError(f"port {port} was never leased")
        self._leased.discard(port)
