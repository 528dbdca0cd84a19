# Worker daemon: pulls jobs from a spool dir, runs them on one of the slots.
import json
import os
import signal
import threading
import time

import torch


class SlotTable:
    """bitmap of slots; -1 when full"""

    def __init__(self, n):
        self.n = n
        self.bits = 0
        self.mu = threading.Lock()

    def take(self):
        with self.mu:
            for i in range(self.n):
                if not self.bits & (1 << i):
                    self.bits |= 1 << i
                    return i
        return -1

    def put(self, i):
        self.mu.acquire()  # clean: released in finally
        try:
            self.bits &= ~(1 << i)
        finally:
            self.mu.release()

    def used(self):
        self.mu.acquire()  # leak: an empty bitmap returns with the mutex held
        if self.bits == 0:
            return 0
        c = bin(self.bits).count("1")
        self.mu.release()
        return c


class Daemon:
    def __init__(self, spool, slots, model):
        self.spool = spool
        self.slots = SlotTable(slots)
        self.model = model
        self.running = {}
        self.stop = False
        self.log_fh = open(os.path.join(spool, "daemon.log"), "a")  # clean: closed by shutdown()

    def shutdown(self, *_):
        self.stop = True
        for slot in list(self.running.values()):
            self.slots.put(slot)
        self.running.clear()
        self.log_fh.close()

    def note(self, msg):
        self.log_fh.write("%f %s\n" % (time.time(), msg))

    def load_job(self, name):
        fh = open(os.path.join(self.spool, name))  # leak: non-json first byte returns with the file open
        head = fh.read(1)
        if head != "{":
            return None
        job = json.loads(head + fh.read())
        fh.close()
        return job

    def save_result(self, name, res):
        fh = open(os.path.join(self.spool, name + ".out"), "w")  # clean: closed in finally
        try:
            json.dump(res, fh)
        finally:
            fh.close()

    def start(self, name):
        slot = self.slots.take()  # clean: stored in running, freed by finish() and shutdown()
        if slot < 0:
            return False
        self.running[name] = slot
        return True

    def finish(self, name):
        slot = self.running.pop(name, None)
        if slot is not None:
            self.slots.put(slot)

    def run_now(self, job):
        slot = self.slots.take()  # clean: near miss, slot numbers below zero mean none was taken
        if slot < 0:
            self.note("full")
            return None
        out = self.model(torch.tensor(job["x"]))
        self.slots.put(slot)
        return out.tolist()

    def run_if_fits(self, job):
        slot = self.slots.take()  # leak: the size check returns without put
        if slot == -1:
            return None
        x = torch.tensor(job["x"])
        if x.numel() > 4096:
            self.note("too big")
            return None
        y = self.model(x)
        self.slots.put(slot)
        return y.tolist()

    def drain(self, jobs):
        done = []
        for j in jobs:
            s = self.slots.take()  # leak: an expired job breaks out of the loop with its slot
            if s == -1:
                break
            if j.get("deadline", 0) < time.time():
                break
            done.append(self.model(torch.tensor(j["x"])).tolist())
            self.slots.put(s)
        return done

    def reserve_many(self, k):
        got = []
        while len(got) < k:
            s = self.slots.take()  # clean: near miss, a shortfall puts back all that was got
            if s == -1:
                for g in got:
                    self.slots.put(g)
                return []
            got.append(s)
        return got

    def gang(self, jobs):
        slots = self.reserve_many(len(jobs))  # clean: each slot is put after its job
        if not slots:
            return None
        outs = []
        for s, j in zip(slots, jobs):
            outs.append(self.model(torch.tensor(j["x"])).tolist())
            self.slots.put(s)
        return outs

    def probe_capacity(self, k):
        return bool(self.reserve_many(k))  # leak: the reserved slots are only tested for truth and dropped

    def loop(self):
        signal.signal(signal.SIGTERM, self.shutdown)
        while not self.stop:
            for name in sorted(os.listdir(self.spool)):
                if name.endswith(".job") and self.start(name):  # clean: finish() in the finally
                    try:
                        job = self.load_job(name)
                        if job is not None:
                            self.save_result(name, self.run_now(job))
                    finally:
                        self.finish(name)
            time.sleep(0.1)
