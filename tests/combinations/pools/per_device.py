# take: P.borrow("cuda:0")
# give: P.restore("cuda:0", X)
# gets: optional
class Pool:
    def __init__(self, devices, depth):
        self._by_device = {device: deque(range(depth)) for device in devices}

    def borrow(self, device):
        idle = self._by_device[device]
        return idle.popleft() if idle else None

    def restore(self, device, buf):
        self._by_device[device].append(buf)
