# hands out TCP ports and GPUs to worker processes of a node
import json
import os
import subprocess
import sys


class PortBroker:
    def __init__(self, lo, hi):
        self.free_ports = set(range(lo, hi))

    def checkout_port(self):
        return self.free_ports.pop() if self.free_ports else None  # clean: handed out

    def checkin_port(self, p):
        self.free_ports.add(p)

    def checkout_range(self, k):
        ports = []
        for p in sorted(self.free_ports):
            if ports and p != ports[-1] + 1:
                ports = []
            ports.append(p)
            if len(ports) == k:
                self.free_ports -= set(ports)
                return ports
        return None

    def trim(self, keep):
        while len(self.free_ports) > keep:
            self.free_ports.pop()  # clean: near miss, the range is made smaller on purpose


class GpuBoard:
    def __init__(self, n):
        self.owner = [None] * n

    def seize(self, who):
        for i, o in enumerate(self.owner):
            if o is None:
                self.owner[i] = who
                return i
        raise LookupError("no gpu for " + who)

    def yield_(self, i):
        self.owner[i] = None


class Worker:
    def __init__(self, name, port, gpu, proc=None):
        self.name, self.port, self.gpu, self.proc = name, port, gpu, proc


class Supervisor:
    def __init__(self, ports, board, run_dir):
        self.ports = ports
        self.board = board
        self.run_dir = run_dir
        self.workers = {}
        self.logs = {}

    def spawn(self, name):
        if name in self.workers:
            return None
        port = self.ports.checkout_port()  # clean: near miss, put back when no gpu is left, else in the worker
        if port is None:
            return None
        try:
            gpu = self.board.seize(name)  # clean: in the worker, stop() yields
        except LookupError:
            self.ports.checkin_port(port)
            return None
        w = Worker(name, port, gpu)
        self.workers[name] = w
        return w

    def stop(self, name):
        w = self.workers.pop(name)
        self.ports.checkin_port(w.port)
        self.board.yield_(w.gpu)
        if w.proc is not None:
            w.proc.terminate()

    def stop_all(self):
        for n in list(self.workers):
            self.stop(n)
        for fh in self.logs.values():
            fh.close()
        self.logs = {}

    def spawn_quick(self, name):
        gpu = self.board.seize(name)  # leak: no port, no worker, the gpu stays seized
        port = self.ports.checkout_port()  # clean: in the worker
        if port is None:
            return None
        if name in self.workers:
            self.stop(name)
        self.workers[name] = Worker(name, port, gpu)
        return self.workers[name]

    def log_for(self, name):
        fh = self.logs.get(name)
        if fh is None:
            fh = self.logs[name] = open(os.path.join(self.run_dir, name + ".log"), "a")  # clean: stop_all() closes
        return fh

    def start_process(self, name, argv):
        w = self.spawn(name)  # clean: near miss, stopped again when the program does not exist
        if w is None:
            return False
        if not os.path.exists(argv[0]):
            self.stop(name)
            return False
        w.proc = subprocess.Popen(argv + ["--port", str(w.port)], stdout=self.log_for(name))  # clean: terminated by stop()
        return True

    def probe_ports(self, n):
        seen = []
        for _ in range(n):
            p = self.ports.checkout_port()  # leak: privileged ports are left out and not put back
            if p is None:
                break
            if p < 1024:
                continue
            seen.append(p)
        for p in seen:
            self.ports.checkin_port(p)
        return seen

    def rendezvous(self, k):
        rng = self.ports.checkout_range(k)  # clean: every port of the range goes back
        if rng is None:
            return None
        addr = "127.0.0.1:%d" % rng[0]
        for p in rng:
            self.ports.checkin_port(p)
        return addr

    def rendezvous_first(self, k):
        rng = self.ports.checkout_range(k)  # leak: only the first of the range goes back
        if not rng:
            return None
        self.ports.checkin_port(rng[0])
        return rng[0]

    def gang(self, name, k):
        gpus = []
        try:
            for i in range(k):
                gpus.append(self.board.seize("%s-%d" % (name, i)))  # leak: the LookupError handler clears the list and yields none
        except LookupError as e:
            sys.stderr.write("%s\n" % e)
            gpus.clear()
        return gpus

    def gang_strict(self, name, k):
        gpus = []
        try:
            for i in range(k):
                gpus.append(self.board.seize("%s-%d" % (name, i)))  # clean: near miss, the handler yields all before it raises again
        except LookupError:
            for g in gpus:
                self.board.yield_(g)
            raise
        return gpus

    def run_gang(self, name, k, fn):
        gpus = self.gang_strict(name, k)  # clean: yielded in finally
        try:
            return fn(gpus)
        finally:
            for g in gpus:
                self.board.yield_(g)

    def run_gang_even(self, name, k, fn):
        gpus = self.gang_strict(name, k)  # leak: the gpus with an odd place are left out of the slice
        out = fn(gpus)
        for g in gpus[::2]:
            self.board.yield_(g)
        return out

    def read_state(self):
        fh = open(os.path.join(self.run_dir, "state.json"))  # leak: an old version returns {} with the file open
        st = json.load(fh)
        if st.get("version") != 2:
            return {}
        fh.close()
        return st

    def move(self, name):
        w = self.workers[name]
        old = w.gpu
        w.gpu = self.board.seize(name)  # clean: near miss, the gpu before is yielded from its copy
        self.board.yield_(old)

    def rename_port(self, name):
        w = self.workers[name]
        p = self.ports.checkout_port()  # leak: a port equal to the one given for health checks is refused and lost
        if p is None or p == 8080:
            return False
        self.ports.checkin_port(w.port)
        w.port = p
        return True
