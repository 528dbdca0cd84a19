# take: Ports.claim()
# give: Ports.disclaim(X)
# gets: optional
# type: object
class Ports:
    _taken = set()

    @classmethod
    def claim(cls):
        for port in range(9000, 9100):
            if port not in cls._taken:
                cls._taken.add(port)
                return port
        return None

    @classmethod
    def disclaim(cls, port):
        cls._taken.discard(port)
