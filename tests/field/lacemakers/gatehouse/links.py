"""Upstream links by host. hire() gives a link, dismiss() takes it back, scrap() forgets a dead one."""
import collections


class Link:
    def __init__(self, host, transport):
        self.host = host
        self.transport = transport
        self.dead = False

    async def ask(self, body):
        reply = await self.transport.exchange(self.host, body)
        if reply is None:
            self.dead = True
        return reply


class LinkPool:
    def __init__(self, transport, per_host=8):
        self.transport = transport
        self.per_host = per_host
        self._idle = collections.defaultdict(list)
        self._count = collections.Counter()

    def hire(self, host):
        while self._idle[host]:
            link = self._idle[host].pop()  # clean: a dead one is scrapped and the next tried
            if not link.dead:
                return link
            self.scrap(link)
        if self._count[host] >= self.per_host:
            return None
        self._count[host] += 1
        return Link(host, self.transport)

    def dismiss(self, link):
        if link.dead:
            self.scrap(link)
        else:
            self._idle[link.host].append(link)

    def scrap(self, link):
        self._count[link.host] -= 1

    def hire_any(self, hosts):
        for host in hosts:
            link = self.hire(host)  # clean: only None goes on to the next host
            if link is not None:
                return link
        return None

    def hire_fresh(self, host):
        """A link that has not been used; idle ones are no good for a handshake."""
        link = self.hire(host)  # leak: an idle link is passed over and lost to the count
        if link is not None and link.transport.used(link):
            return None
        return link
