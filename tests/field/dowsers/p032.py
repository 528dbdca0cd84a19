"""Rendezvous ports for multi-node launch."""
import random


class PortRange:
    def __init__(self, low, high):
        self._avail = set(range(low, high))
        self._leased = {}

    def lease_port(self, job):
        if not self._avail:
            raise RuntimeError("no ports")
        port = random.choice(tuple(self._avail))
        self._avail.discard(port)
        self._leased[port] = job
        return port

    def end_lease(self, port):
        if self._leased.pop(port, None) is not None:
            self._avail.add(port)


class Launcher:
    def __init__(self, ports: PortRange, cluster):
        self.ports = ports
        self.cluster = cluster
        self.jobs = {}

    def launch(self, job, nodes):
        port = self.ports.lease_port(job)  # leak: too few nodes returns with the port leased
        if len(nodes) < job.min_nodes:
            return False
        self.cluster.start(job, nodes, port)
        self.jobs[job.id] = port
        return True

    def stop(self, job_id):
        port = self.jobs.pop(job_id)
        self.cluster.stop(job_id)
        self.ports.end_lease(port)

    def smoke(self, nodes):
        port = self.ports.lease_port("smoke")  # clean: finally
        try:
            return self.cluster.all_reduce_test(nodes, port)
        finally:
            self.ports.end_lease(port)

    def relaunch(self, job, nodes):
        for _ in range(3):
            port = self.ports.lease_port(job)  # leak: a failed start tries again and overwrites the port
            if self.cluster.start(job, nodes, port):
                self.jobs[job.id] = port
                return True
        return False

    def address(self, job, host):
        port = self.ports.lease_port(job)  # clean: handed to the caller
        return host, port
