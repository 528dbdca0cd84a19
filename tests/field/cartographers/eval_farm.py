"""Runs evaluation suites against served checkpoints: each run gets a port, a sandbox and a worker process."""
import concurrent.futures as cf
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time

log = logging.getLogger("evalfarm")

BASE = 21000


class Ports:
    def __init__(self, lo=BASE, n=200):
        self._out = {}
        self._range = range(lo, lo + n)
        self._mx = threading.Lock()

    def allot(self, owner):
        with self._mx:
            for p in self._range:
                if p not in self._out:
                    self._out[p] = owner
                    return p
        return 0

    def surrender(self, port):
        with self._mx:
            self._out.pop(port, None)

    def allot_usable(self, owner, tries=8):
        """A port no other program on the host listens on."""
        for _ in range(tries):
            port = self.allot(owner)  # leak: one in use by another program stays allotted on the next try
            if not port:
                break
            s = socket.socket()  # clean: closed on both ways
            if s.connect_ex(("127.0.0.1", port)) != 0:
                s.close()
                return port
            s.close()
            log.debug("%d is taken on the host", port)
        return 0

    def allot_range(self, owner, n):
        got = []
        while len(got) < n:
            port = self.allot(owner)  # clean: near miss, all given up when the range runs out
            if not port:
                for p in got:
                    self.surrender(p)
                return []
            got.append(port)
        return got


class Sandboxes:
    """Scratch directories, wiped and reused."""

    def __init__(self, root, keep=16):
        self.root = root
        self.keep = keep
        self._shelf = []
        self._mx = threading.Lock()

    def open(self):
        with self._mx:
            if self._shelf:
                return self._shelf.pop()
        return tempfile.mkdtemp(dir=self.root)  # clean: returned to the caller

    def shut(self, path):
        for entry in os.listdir(path):
            full = os.path.join(path, entry)
            if os.path.isdir(full):
                shutil.rmtree(full)
            else:
                os.unlink(full)
        with self._mx:
            if len(self._shelf) < self.keep:
                self._shelf.append(path)
                return
        os.rmdir(path)


class Run:
    def __init__(self, ckpt, suite):
        self.ckpt = ckpt
        self.suite = suite
        self.port = 0
        self.box = None
        self.proc = None
        self.result = None


class Farm:
    def __init__(self, ports, boxes, workers=4):
        self.ports = ports
        self.boxes = boxes
        self.pool = cf.ThreadPoolExecutor(workers)
        self.active = {}
        self.crowd = threading.Semaphore(workers * 2)

    # --- one run

    def prepare(self, run):
        run.port = self.ports.allot(run.ckpt)  # clean: near miss, cleanup() gives it up, also after a failed prepare
        if not run.port:
            return False
        run.box = self.boxes.open()  # clean: cleanup() shuts it
        with open(os.path.join(run.box, "suite.txt"), "w") as f:  # clean: with statement
            f.write(run.suite)
        return True

    def cleanup(self, run):
        if run.proc is not None and run.proc.poll() is None:
            run.proc.kill()
            run.proc.wait()
        if run.port:
            self.ports.surrender(run.port)
            run.port = 0
        if run.box is not None:
            self.boxes.shut(run.box)
            run.box = None

    def execute(self, run):
        try:
            if not self.prepare(run):
                return None
            run.proc = subprocess.Popen(["serve", run.ckpt, "--port", str(run.port)], cwd=run.box)
            run.result = self.drive(run)
            return run.result
        finally:
            self.cleanup(run)

    def drive(self, run):
        for _ in range(30):
            s = socket.socket()  # leak: a refused try goes on without closing it
            if s.connect_ex(("127.0.0.1", run.port)) != 0:
                time.sleep(1)
                continue
            with s:
                s.sendall(run.suite.encode())
                return s.recv(1 << 16)
        return None

    # --- many runs

    def submit(self, ckpt, suite):
        self.crowd.acquire()  # clean: near miss, released by the future's callback
        run = Run(ckpt, suite)
        fut = self.pool.submit(self.execute, run)
        self.active[fut] = run
        fut.add_done_callback(self._over)
        return fut

    def _over(self, fut):
        self.active.pop(fut, None)
        self.crowd.release()

    def submit_if_new(self, ckpt, suite, seen):
        self.crowd.acquire()  # leak: a pair seen before returns with the permit
        if (ckpt, suite) in seen:
            return None
        seen.add((ckpt, suite))
        fut = self.pool.submit(self.execute, Run(ckpt, suite))
        fut.add_done_callback(lambda _f: self.crowd.release())
        return fut

    def submit_sharded(self, ckpt, suite, shards):
        ports = self.ports.allot_range(ckpt, shards)  # clean: near miss, each port goes to a run that cleanup() ends
        runs = []
        for p in ports:
            run = Run(ckpt, suite)
            run.port = p
            runs.append(run)
        return [self.pool.submit(self._execute_on_port, r) for r in runs]

    def _execute_on_port(self, run):
        try:
            run.box = self.boxes.open()  # clean: shut by cleanup()
            run.proc = subprocess.Popen(["serve", run.ckpt, "--port", str(run.port)], cwd=run.box)
            return self.drive(run)
        finally:
            self.cleanup(run)

    # --- helpers of the command line

    def smoke(self, ckpt):
        port = self.ports.allot_usable("smoke")  # clean: surrendered in finally
        if not port:
            return False
        try:
            return subprocess.run(["serve", ckpt, "--port", str(port), "--once"]).returncode == 0
        finally:
            self.ports.surrender(port)

    def golden(self, ckpt, expected):
        box = self.boxes.open()  # leak: a wrong output returns before the shut
        out = os.path.join(box, "out.txt")
        subprocess.run(["generate", ckpt, "-o", out], check=False)
        if not os.path.exists(out):
            self.boxes.shut(box)
            return False
        with open(out) as f:  # clean: with statement
            text = f.read()
        if text != expected:
            log.error("golden output differs for %s", ckpt)
            return False
        self.boxes.shut(box)
        return True

    def compare(self, old, new):
        """Serves two checkpoints side by side."""
        a = self.ports.allot("compare-old")  # leak: not surrendered when there is no port for the new one
        if not a:
            return None
        b = self.ports.allot("compare-new")  # clean: surrendered in finally
        if not b:
            log.warning("no second port")
            return None
        try:
            rc = subprocess.run(["abtest", old, str(a), new, str(b)]).returncode
            return rc == 0
        finally:
            self.ports.surrender(a)
            self.ports.surrender(b)
