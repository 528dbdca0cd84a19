"""Floating licences: seats for each feature, several users of one host share a seat."""
from collections import defaultdict


class LicenceServer:
    def __init__(self, seats):
        self.seats = dict(seats)
        self.hosts = defaultdict(dict)

    def check_out(self, feature, host):
        users = self.hosts[feature]
        if host in users:
            users[host] += 1
            return True
        if len(users) >= self.seats.get(feature, 0):
            return False
        users[host] = 1
        return True

    def check_in(self, feature, host):
        users = self.hosts[feature]
        users[host] -= 1
        if users[host] == 0:
            del users[host]


class Toolchain:
    def __init__(self, licences, host):
        self.licences = licences
        self.host = host

    def synthesize(self, design, tool):
        if not self.licences.check_out("synth", self.host):  # clean: checked in within finally
            return None
        try:
            return tool.run(design)
        finally:
            self.licences.check_in("synth", self.host)

    def simulate(self, design, tool, seconds):
        if not self.licences.check_out("sim", self.host):  # leak: an empty testbench returns with the seat
            return None
        bench = tool.find_bench(design)
        if bench is None:
            return None
        waves = tool.simulate(bench, seconds)
        self.licences.check_in("sim", self.host)
        return waves

    def try_features(self, names, use):
        for name in names:
            if self.licences.check_out(name, self.host):  # clean: checked in at once
                use(name)
                self.licences.check_in(name, self.host)

    def pick_feature(self, names):
        for name in names:
            if self.licences.check_out(name, self.host):  # leak: every seat found is taken, none goes back
                print("available:", name)
