from dataclasses import dataclass, field
from typing import List, Optional


class Hugepages:
    def __init__(self, n):
        self._pages = list(range(n))

    def map(self):
        return self._pages.pop()

    def unmap(self, page):
        self._pages.append(page)


@dataclass
class NicQueue:
    number: int
    rx: List[int] = field(default_factory=list)
    tx: List[int] = field(default_factory=list)
    stats: Optional[int] = None


@dataclass
class Port:
    name: str
    queues: dict = field(default_factory=dict)
    mtu: int = 1500


class Nic:
    def __init__(self, pages):
        self.pages = pages
        self.ports = {}

    def add_port(self, name):
        return self.ports.setdefault(name, Port(name))

    def add_queue(self, name, number, ring):
        port = self.add_port(name)
        if number in port.queues:
            return False
        queue = NicQueue(number)
        for _ in range(ring):
            queue.rx.append(self.pages.map())  # clean: drop_queue unmaps every rx page
            queue.tx.append(self.pages.map())  # leak: drop_queue pairs tx with the shortened list of rx
        queue.stats = self.pages.map()  # clean: drop_queue unmaps it
        port.queues[number] = queue
        return True

    def drop_queue(self, name, number):
        queue = self.ports[name].queues.pop(number, None)
        if queue is None:
            return 0
        freed = 0
        while queue.rx:
            self.pages.unmap(queue.rx.pop())
            freed += 1
        for _, page in zip(queue.rx, queue.tx):
            self.pages.unmap(page)
            freed += 1
        self.pages.unmap(queue.stats)
        return freed

    def set_mtu(self, name, mtu):
        port = self.ports[name]
        port.mtu = mtu
        for number in list(port.queues):
            self.drop_queue(name, number)


class Control:
    def __init__(self, pages):
        self.pages = pages
        self.page: Optional[int] = None

    def command(self, text):
        if self.page is None:
            self.page = self.pages.map()  # leak: reset forgets the page before stop looks at it
        return f"{self.page}:{text}"

    def reset(self):
        self.page = None

    def stop(self):
        self.reset()
        if self.page is not None:
            self.pages.unmap(self.page)
