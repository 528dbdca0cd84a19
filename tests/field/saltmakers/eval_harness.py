"""Runs benchmark tasks against an API model, with code tasks executed in sandboxes."""
import argparse
import json
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager


class RateLimited(Exception):
    pass


class SandboxError(Exception):
    pass


class ApiQuota:
    """Semaphore-backed quota: at most `n` requests on the wire."""

    def __init__(self, n):
        self._sem = threading.BoundedSemaphore(n)
        self.waits = 0

    def enter(self):
        if not self._sem.acquire(blocking=False):  # clean: near miss, both ways of entering are left by leave()
            self.waits += 1
            self._sem.acquire()  # clean: left by leave()

    def enter_within(self, seconds):
        return self._sem.acquire(timeout=seconds)  # clean: result handed to the caller

    def leave(self):
        self._sem.release()

    @contextmanager
    def request(self):
        self.enter()  # clean: left in finally
        try:
            yield self
        finally:
            self.leave()


class Sandbox:
    def __init__(self, port):
        self.port = port
        self.dirty = False

    def start(self):
        return self.port > 0

    def run(self, code, timeout):
        if "import os" in code:
            raise SandboxError("forbidden import")
        self.dirty = True
        return {"ok": True, "stdout": code[:10]}

    def wipe(self):
        self.dirty = False


class SandboxFarm:
    def __init__(self, ports):
        self.idle_ports = sorted(ports, reverse=True)
        self.parked = []

    def obtain(self):
        if self.parked:
            return self.parked.pop()  # clean: handed to the caller
        if not self.idle_ports:
            raise SandboxError("no port left")
        port = self.idle_ports.pop()  # leak: a sandbox that does not start keeps its port
        box = Sandbox(port)
        if not box.start():
            raise SandboxError(f"start on {port}")
        return box

    def dispose(self, box, broken=False):
        if broken:
            self.idle_ports.append(box.port)
            return
        if box.dirty:
            box.wipe()
        self.parked.append(box)

    @contextmanager
    def using(self):
        box = self.obtain()  # clean: disposed of in finally
        broken = False
        try:
            yield box
        except SandboxError:
            broken = True
            raise
        finally:
            self.dispose(box, broken)


class ApiModel:
    def __init__(self, client, quota, max_tries=5):
        self.client = client
        self.quota = quota
        self.max_tries = max_tries

    def complete(self, prompt):
        with self.quota.request():  # clean: with statement
            return self.client.complete(prompt)

    def complete_retry(self, prompt):
        delay = 0.5
        for attempt in range(self.max_tries):
            self.quota.enter()  # leak: still entered when a rate-limited attempt sleeps and goes round
            try:
                text = self.client.complete(prompt)
            except RateLimited:
                time.sleep(delay)
                delay *= 2
                continue
            self.quota.leave()
            return text
        return None

    def loglikelihood(self, ctx, cont):
        for attempt in range(self.max_tries):
            self.quota.enter()  # clean: near miss, finally runs before the continue takes effect
            try:
                return self.client.score(ctx, cont)
            except RateLimited:
                continue
            finally:
                self.quota.leave()
        return float("-inf")

    def complete_or_none(self, prompt, seconds):
        if not self.quota.enter_within(seconds):  # leak: an empty answer returns without leave
            return None
        text = self.client.complete(prompt)
        if not text:
            return None
        self.quota.leave()
        return text.strip()


class CodeTask:
    name = "code"

    def __init__(self, farm, docs):
        self.farm = farm
        self.docs = docs

    def grade(self, doc, answer):
        with self.farm.using() as box:  # clean: with statement
            return box.run(answer + "\n" + doc["test"], timeout=10)["ok"]

    def grade_all(self, answers):
        box = self.farm.obtain()  # clean: near miss, the one that broke is disposed of before a fresh one takes its name
        marks = []
        try:
            for doc, answer in zip(self.docs, answers):
                try:
                    marks.append(box.run(answer + doc["test"], timeout=10)["ok"])
                except SandboxError:
                    marks.append(False)
                    self.farm.dispose(box, broken=True)
                    box = None
                    box = self.farm.obtain()  # clean: disposed of in finally
        finally:
            if box is not None:
                self.farm.dispose(box)
        return marks

    def grade_pass_at_k(self, doc, samples):
        passed = 0
        for code in samples:
            box = self.farm.obtain()  # leak: a sample without a function is skipped with the box in hand
            if "def " not in code:
                continue
            try:
                passed += box.run(code + doc["test"], timeout=5)["ok"]
            except SandboxError:
                self.farm.dispose(box, broken=True)
            else:
                self.farm.dispose(box)
        return passed

    def verify_reference(self, doc):
        box = self.farm.obtain()  # leak: SandboxError is turned into False and the box forgotten
        try:
            res = box.run(doc["reference"], timeout=30)
        except SandboxError:
            return False
        self.farm.dispose(box)
        return res["ok"]


def evaluate(model, task, out):
    tally = Counter()
    for i, doc in enumerate(task.docs):
        answer = model.complete_retry(doc["prompt"])
        if answer is None:
            tally["missing"] += 1
            continue
        ok = task.grade(doc, answer)
        tally["pass" if ok else "fail"] += 1
        out.write(json.dumps({"doc": i, "ok": ok}) + "\n")
    return tally


def main(client, docs):
    ap = argparse.ArgumentParser()
    ap.add_argument("--concurrency", type=int, default=8)
    ap.add_argument("--ports", type=int, nargs="+", default=[9000, 9001])
    args = ap.parse_args()
    model = ApiModel(client, ApiQuota(args.concurrency))
    print(evaluate(model, CodeTask(SandboxFarm(args.ports), docs), sys.stdout))
