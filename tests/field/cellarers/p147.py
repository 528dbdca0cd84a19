"""Address server: an address is free, offered or bound."""
import ipaddress
from enum import Enum, auto


class St(Enum):
    FREE = auto()
    OFFERED = auto()
    BOUND = auto()


class AddressPool:
    def __init__(self, cidr):
        self.state = {ip: St.FREE for ip in ipaddress.ip_network(cidr).hosts()}
        self.bound_to = {}

    def offer(self):
        ip = next((ip for ip, s in self.state.items() if s is St.FREE), None)
        if ip is not None:
            self.state[ip] = St.OFFERED
        return ip

    def bind(self, ip, mac):
        self.state[ip] = St.BOUND
        self.bound_to[mac] = ip

    def withdraw(self, ip):
        self.state[ip] = St.FREE

    def expire(self, mac):
        ip = self.bound_to.pop(mac, None)
        if ip is not None:
            self.state[ip] = St.FREE


def discover(pool, wire, mac):
    ip = pool.offer()  # clean: bound on request, withdrawn otherwise
    if ip is None:
        return None
    if wire.ask(mac, ip) != "REQUEST":
        pool.withdraw(ip)
        return None
    pool.bind(ip, mac)
    return ip


def discover_quiet(pool, wire, mac):
    ip = pool.offer()  # leak: for a client on the deny list the address stays offered
    if ip is None:
        return None
    if wire.denies(mac):
        return None
    pool.bind(ip, mac)
    return ip


def test_answer(pool, wire):
    ip = pool.offer()  # clean: withdrawn in finally
    if ip is None:
        return False
    try:
        return wire.announce(ip)
    finally:
        pool.withdraw(ip)


def has_room(pool):
    return pool.offer() is not None  # leak: the offered address is dropped after the test
