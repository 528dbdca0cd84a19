"""A lazily opened uplink of a weather station."""
import time


class SocketFarm:
    def __init__(self, sockets):
        self._parked = list(sockets)

    def lease_socket(self):
        return self._parked.pop()

    def park_socket(self, sock):
        self._parked.append(sock)


class Station:
    def __init__(self, farm, name):
        self.farm = farm
        self.name = name
        self._uplink = None
        self._scratch = None
        self.sent = 0

    @property
    def uplink(self):
        if self._uplink is None:
            self._uplink = self.farm.lease_socket()  # clean: kept until close
        return self._uplink

    @property
    def fresh(self):
        return self.farm.lease_socket()  # clean: each reading hands one to the caller

    def send(self, reading):
        self.uplink.write(f"{self.name} {reading}\n")
        self.sent += 1

    def send_urgent(self, reading):
        sock, stamp = self.fresh, time.time()  # clean: parked
        sock.write(f"! {stamp} {self.name} {reading}\n")
        self.farm.park_socket(sock)

    def reconnect(self):
        if self._uplink is not None:
            self.farm.park_socket(self._uplink)
        self._uplink = self.farm.lease_socket()  # clean: the old one was parked first

    def probe(self):
        peer = self.fresh.peer_name()  # leak: the property hands out a new one, dropped here
        return peer == self.name

    def rotate(self, hosts):
        for host in hosts:
            self._scratch = self.farm.lease_socket()  # leak: the next host overwrites the attribute
            self._scratch.connect(host)
        if self._scratch is not None:
            self.farm.park_socket(self._scratch)
            self._scratch = None

    def close(self):
        if self._uplink is not None:
            self.farm.park_socket(self._uplink)
            self._uplink = None
