"""Addresses of a subnet leased to clients by hardware id."""
import ipaddress


class AddressPool:
    def __init__(self, cidr):
        hosts = ipaddress.ip_network(cidr).hosts()
        self._virgin = hosts
        self._returned = []
        self._bound = {}

    def offer(self, mac):
        if self._returned:
            ip = self._returned.pop(0)
        else:
            ip = next(self._virgin, None)
            if ip is None:
                return None
        self._bound[ip] = mac
        return ip

    def expire(self, ip):
        if self._bound.pop(ip, None) is not None:
            self._returned.append(ip)


class DhcpServer:
    def __init__(self, pool, link):
        self.pool = pool
        self.link = link
        self.clients = {}

    def discover(self, mac):
        ip = self.pool.offer(mac)  # clean: kept for the client, or expired when refused
        if ip is None:
            return
        if self.link.confirm(mac, ip):
            self.clients[mac] = ip
        else:
            self.pool.expire(ip)

    def goodbye(self, mac):
        self.pool.expire(self.clients.pop(mac))

    def inform(self, mac):
        ip = self.pool.offer(mac)  # leak: an address in use by another is not expired
        if ip is None:
            return None
        if self.link.arp(ip):
            return None
        self.link.announce(mac, ip)
        self.clients[mac] = ip
        return ip


def utilisation(pool, link, macs):
    answered = 0
    for mac in macs:
        ip = pool.offer(mac)  # clean: expired each time round
        if ip is None:
            break
        answered += link.arp(ip)
        pool.expire(ip)
    return answered


def next_free(pool):
    ip = pool.offer("00:00:00:00:00:00")  # leak: only its text is returned
    return "full" if ip is None else f"next is {ip}"
