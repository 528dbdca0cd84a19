"""Ports for sandboxes: always the lowest free one, from a heap."""
import heapq


class PortHeap:
    def __init__(self, low, high):
        self._heap = list(range(low, high))
        self._given = set()

    def pick_port(self):
        if not self._heap:
            raise OSError("out of ports")
        port = heapq.heappop(self._heap)
        self._given.add(port)
        return port

    def free_port(self, port):
        if port in self._given:
            self._given.remove(port)
            heapq.heappush(self._heap, port)


class Sandbox:
    def __init__(self, ports, runtime):
        self.ports = ports
        self.runtime = runtime
        self.port = None

    def up(self, image):
        port = self.ports.pick_port()  # clean: stored, or freed when the start fails
        if not self.runtime.start(image, port):
            self.ports.free_port(port)
            return False
        self.port = port
        return True

    def down(self):
        self.runtime.stop(self.port)
        self.ports.free_port(self.port)
        self.port = None


def run_once(ports, runtime, image):
    port = ports.pick_port()  # leak: a missing image keeps the port
    if not runtime.has(image):
        return None
    log = runtime.run(image, port)
    ports.free_port(port)
    return log


def pair(ports):
    control = ports.pick_port()  # clean: handed to the caller
    data = ports.pick_port()  # clean: handed to the caller
    return control, data


def proxy(ports, runtime, upstream):
    control, data = pair(ports)  # leak: the data port is never freed
    runtime.link(control, data, upstream)
    runtime.wait(control)
    ports.free_port(control)
