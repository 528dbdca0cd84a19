from dataclasses import dataclass, field


class MacPool:
    def __init__(self, n):
        self._macs = ["02:00:00:00:00:%02x" % i for i in range(n)]

    def draw_mac(self):
        return self._macs.pop(0)

    def return_mac(self, mac):
        self._macs.append(mac)


@dataclass
class Nic:
    mac: str
    network: str
    up: bool = False


@dataclass
class Machine:
    name: str
    host: str
    nics: dict = field(default_factory=dict)


class Placement:
    def __init__(self, macs):
        self.macs = macs
        self.machines = {}
        self.uplinks = {}

    def create(self, name, host, networks):
        if name in self.machines:
            return None
        machine = Machine(name, host)
        for network in sorted(set(networks)):
            mac = self.macs.draw_mac()  # leak: detach pops the nic out of the record only
            machine.nics[network] = Nic(mac, network)
        self.machines[name] = machine
        return machine

    def attach(self, name, network):
        nics = self.machines[name].nics
        old = nics.get(network)
        if old is not None:
            self.macs.return_mac(old.mac)
        nics[network] = Nic(self.macs.draw_mac(), network, up=True)  # leak: detach pops the nic only

    def detach(self, name, network):
        nic = self.machines[name].nics.pop(network, None)
        return nic is not None and nic.up

    def destroy(self, name):
        machine = self.machines.pop(name, None)
        if machine is None:
            return 0
        for nic in machine.nics.values():
            self.macs.return_mac(nic.mac)
        return len(machine.nics)

    def add_uplink(self, host):
        if host not in self.uplinks:
            self.uplinks[host] = Nic(self.macs.draw_mac(), "uplink", True)  # clean: remove_uplink returns it
        return self.uplinks[host].mac

    def remove_uplink(self, host):
        nic = self.uplinks.pop(host, None)
        if nic is not None:
            self.macs.return_mac(nic.mac)

    def migrate(self, name, host, copy):
        mac = self.macs.draw_mac()  # clean: returned after the copy
        ok = copy(self.machines[name], host, mac)
        self.macs.return_mac(mac)
        if ok:
            self.machines[name].host = host
        return ok
