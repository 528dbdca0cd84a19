"""Rundown gate: operations enter until the volume is being dismounted."""
import threading


class RundownGate:
    CLOSING = 1

    def __init__(self):
        self.word = 0
        self.cv = threading.Condition()

    def pass_in(self):
        with self.cv:
            if self.word & self.CLOSING:
                return False
            self.word += 2
            return True

    def pass_out(self):
        with self.cv:
            self.word -= 2
            if self.word == self.CLOSING:
                self.cv.notify_all()

    def run_down(self):
        with self.cv:
            self.word |= self.CLOSING
            self.cv.wait_for(lambda: self.word == self.CLOSING)


class Volume:
    def __init__(self, gate, dev):
        self.gate = gate
        self.dev = dev

    def read(self, lba, n):
        if not self.gate.pass_in():  # clean: closed gates give nothing, otherwise finally
            return None
        try:
            return self.dev.read(lba, n)
        finally:
            self.gate.pass_out()

    def write(self, lba, data):
        if not self.gate.pass_in():  # leak: a write-protected device returns inside the gate
            return -1
        if self.dev.readonly:
            return -1
        n = self.dev.write(lba, data)
        self.gate.pass_out()
        return n

    def flush(self):
        if self.gate.pass_in():  # clean: passes out in the branch
            self.dev.flush()
            self.gate.pass_out()

    def trim(self, ranges):
        for lba, n in ranges:
            if not self.gate.pass_in():  # leak: empty ranges continue inside the gate
                return
            if n == 0:
                continue
            self.dev.discard(lba, n)
            self.gate.pass_out()

    def dismount(self):
        self.gate.run_down()
        self.dev.close()
