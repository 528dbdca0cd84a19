"""Slots of code sandboxes on one host.

The slot number fixes the cgroup, the network namespace and the scratch mount,
so a slot must be vacated before anybody else can run in it.
"""
import os
import shutil
import subprocess
import threading

NO_SLOT = -1


class SlotBoard:
    """Bitmap of the host's sandbox slots; bit set means occupied."""

    def __init__(self, width):
        self.width = width
        self.bits = 0
        self.guard = threading.Lock()

    def occupy(self):
        with self.guard:
            for i in range(self.width):
                if not self.bits >> i & 1:
                    self.bits |= 1 << i
                    return i
        return NO_SLOT

    def occupy_exact(self, i):
        with self.guard:
            if self.bits >> i & 1:
                return False
            self.bits |= 1 << i
            return True

    def vacate(self, i):
        with self.guard:
            self.bits &= ~(1 << i)

    def occupy_run(self, n):
        """n slots, not necessarily adjacent; None when the host is too full."""
        got = []
        while len(got) < n:
            i = self.occupy()  # leak: slots gathered so far are lost when the board runs out
            if i == NO_SLOT:
                return None
            got.append(i)
        return got


class Mounts:
    def __init__(self, root):
        self.root = root

    def attach(self, slot):
        path = os.path.join(self.root, f"sbx-{slot:03d}")
        if os.path.exists(path):
            return None
        os.makedirs(path)
        return path

    def detach(self, path):
        shutil.rmtree(path, ignore_errors=True)


class Sandbox:
    def __init__(self, slot, path):
        self.slot = slot
        self.path = path
        self.proc = None

    def start(self, argv):
        self.proc = subprocess.Popen(argv, cwd=self.path, stdout=subprocess.PIPE, text=True)  # clean: kept on self, reaped by stop
        return self

    def stop(self):
        if self.proc is not None:
            self.proc.kill()
            self.proc.communicate()
            self.proc = None


class SandboxHost:
    def __init__(self, board, mounts):
        self.board = board
        self.mounts = mounts
        self.live = {}
        self.parked = []

    def launch(self, job_id, argv):
        if job_id in self.live:
            return self.live[job_id]
        slot = self.board.occupy()  # leak: slot stays occupied when attach returns None
        if slot == NO_SLOT:
            return None
        path = self.mounts.attach(slot)  # clean: kept in the Sandbox of self.live, detached by teardown
        if path is None:
            return None
        box = Sandbox(slot, path)
        self.live[job_id] = box.start(argv)
        return box

    def teardown(self, job_id):
        box = self.live.pop(job_id, None)
        if box is None:
            return
        self._dispose(box)

    def _dispose(self, box):
        box.stop()
        self.mounts.detach(box.path)
        self.board.vacate(box.slot)

    def run_once(self, argv, timeout=30):
        slot = self.board.occupy()  # clean: outer finally
        if slot == NO_SLOT:
            raise RuntimeError("host full")
        try:
            path = self.mounts.attach(slot)  # clean: inner finally
            if path is None:
                raise RuntimeError("stale mount")
            try:
                done = subprocess.run(argv, cwd=path, capture_output=True, timeout=timeout)
                return done.returncode, done.stdout
            finally:
                self.mounts.detach(path)
        finally:
            self.board.vacate(slot)

    def run_each(self, scripts):
        results = {}
        for name, argv in scripts.items():
            slot = self.board.occupy()  # leak: the timeout handler continues without vacating
            if slot == NO_SLOT:
                results[name] = None
                continue
            try:
                done = subprocess.run(argv, capture_output=True, timeout=10)
            except subprocess.TimeoutExpired:
                results[name] = "timeout"
                continue
            results[name] = done.returncode
            self.board.vacate(slot)
        return results

    def park(self, n):
        """Keep n warm slots for latency-critical jobs."""
        while len(self.parked) < n:
            slot = self.board.occupy()  # clean: near miss, appended to self.parked, which unpark and shutdown drain
            if slot == NO_SLOT:
                break
            self.parked.append(slot)
        return len(self.parked)

    def unpark(self):
        if self.parked:
            return self.parked.pop()  # clean: handed to the caller
        return self.board.occupy()  # clean: handed to the caller

    def resize(self, job_id, argv):
        box = self.live[job_id]
        slot = self.board.occupy()  # leak: not vacated when argv is empty and the job is disposed of
        if slot == NO_SLOT:
            return False
        box.stop()
        if not argv:
            del self.live[job_id]
            self._dispose(box)
            return False
        self.board.vacate(box.slot)
        box.slot = slot
        box.start(argv)
        return True

    def fan(self, n, fn):
        slots = self.board.occupy_run(n)  # leak: early return on a false result skips the vacating loop
        if slots is None:
            return False
        for s in slots:
            if not fn(s):
                return False
        for s in slots:
            self.board.vacate(s)
        return True

    def shutdown(self):
        for job_id in list(self.live):
            self.teardown(job_id)
        while self.parked:
            self.board.vacate(self.parked.pop())
