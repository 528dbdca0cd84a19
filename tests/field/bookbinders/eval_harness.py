"""Evaluation harness: cases run in sandboxes, answers are graded by a judge behind a gate."""
import logging
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

log = logging.getLogger("harness")


class FarmError(Exception):
    pass


class FarmBusy(FarmError):
    pass


class BootFailed(FarmError):
    pass


class RateLimited(Exception):
    pass


@dataclass
class Case:
    id: str
    image: str
    setup: str
    prompt: str
    tests: list
    judge_inside: bool = False


@dataclass
class Outcome:
    case: str
    status: str
    score: float = 0.0


class SandboxFarm:
    def __init__(self, sandboxes):
        self._cv = threading.Condition()
        self._ready = deque(sandboxes)
        self.boot_failures = 0

    def lease(self, image, timeout=60.0):
        with self._cv:
            if not self._cv.wait_for(lambda: self._ready, timeout):
                raise FarmBusy(image)
            box = self._ready.popleft()  # leak: one that doesn't boot isn't put back among the ready
        if not box.boot(image):
            self.boot_failures += 1
            raise BootFailed(box.name)
        return box

    def surrender(self, box):
        box.wipe()
        with self._cv:
            self._ready.append(box)
            self._cv.notify()


class JudgeGate:
    def __init__(self, n):
        self._sem = threading.Semaphore(n)
        self.busy_s = 0.0

    def enter(self):
        self._sem.acquire()  # clean: the caller leaves
        return time.monotonic()

    def leave(self, since):
        self.busy_s += time.monotonic() - since
        self._sem.release()


def judged(gate, client, answer, rubric, tries=3):
    for attempt in range(tries):
        since = gate.enter()  # clean: near miss, the continue passes through the finally
        try:
            return client.grade(answer, rubric)
        except RateLimited:
            log.debug("judge is busy, attempt %d", attempt)
            continue
        finally:
            gate.leave(since)
    return None


def run_case(farm, case, model):
    box = farm.lease(case.image)  # leak: a failed setup returns before the try that surrenders
    result = box.run(case.setup)
    if result.rc != 0:
        log.warning("%s: setup ended with %d", case.id, result.rc)
        return Outcome(case.id, "setup")
    try:
        box.write("answer.py", model(case.prompt))
        passed = sum(box.run(t).rc == 0 for t in case.tests)
        return Outcome(case.id, "ok", passed / max(1, len(case.tests)))
    finally:
        farm.surrender(box)


@contextmanager
def case_env(farm, gate, case):
    with ExitStack() as stack:
        box = farm.lease(case.image)  # clean: surrendered by the stack
        stack.callback(farm.surrender, box)
        if case.judge_inside:
            since = gate.enter()  # clean: near miss, only under the condition, and left by the stack
            stack.callback(gate.leave, since)
        yield box


def run_agentic(farm, gate, case, agent):
    try:
        with case_env(farm, gate, case) as box:  # clean: the context manager surrenders it
            steps = 0
            while steps < 30 and agent.step(box, case.prompt):
                steps += 1
            return Outcome(case.id, "ok", float(box.run(case.tests[0]).rc == 0))
    except FarmError as e:
        return Outcome(case.id, f"farm: {e}")


class Episode:
    """A talk of several turns in one sandbox, that is replaced when it dies."""

    def __init__(self, farm, case):
        self._farm = farm
        self._case = case
        self._box = farm.lease(case.image)  # leak: recover() binds a new one over it
        self.history = []
        self.recoveries = 0

    def turn(self, text):
        result = self._box.run(text)
        if result.rc == 137:
            self.recover()
            result = self._box.run(text)
        self.history.append((text, result.out))
        return result

    def recover(self):
        self.recoveries += 1
        log.info("%s: sandbox died, recovery %d", self._case.id, self.recoveries)
        self._box = self._farm.lease(self._case.image)  # leak: the next recovery binds another over it
        for text, _ in self.history:
            self._box.run(text)

    def close(self):
        if self._box is not None:
            self._farm.surrender(self._box)
            self._box = None


def run_dialogue(farm, case, turns):
    ep = Episode(farm, case)  # clean: closed in the finally
    try:
        for t in turns:
            if ep.turn(t).rc != 0:
                return Outcome(case.id, "turn failed")
        return Outcome(case.id, "ok", 1.0)
    finally:
        ep.close()


class Suite:
    """Leases in the caller's thread, so that cases start in order, and works in the executor's."""

    def __init__(self, farm, model, workers=8):
        self._farm = farm
        self._model = model
        self._ex = ThreadPoolExecutor(workers)
        self._futs = []

    def launch(self, case):
        box = self._farm.lease(case.image)  # leak: abort() cancels queued futures, whose _work() then never surrenders
        self._futs.append(self._ex.submit(self._work, box, case))

    def _work(self, box, case):
        try:
            box.write("answer.py", self._model(case.prompt))
            ok = all(box.run(t).rc == 0 for t in case.tests)
            return Outcome(case.id, "ok", float(ok))
        finally:
            self._farm.surrender(box)

    def results(self):
        return [f.result() for f in self._futs]

    def abort(self):
        for f in self._futs:
            f.cancel()
        self._ex.shutdown(wait=True)


def duel(farm, case, left, right):
    """Two models on the same case, side by side."""
    one = farm.lease(case.image)  # clean: near miss, the handler surrenders it when there's no second
    try:
        two = farm.lease(case.image)  # clean: surrendered in the finally
    except FarmError:
        farm.surrender(one)
        raise
    scores = []
    try:
        for box, model in ((one, left), (two, right)):
            box.write("answer.py", model(case.prompt))
            scores.append(sum(box.run(t).rc == 0 for t in case.tests))
    finally:
        farm.surrender(two)
        farm.surrender(one)
    return scores[0] - scores[1]


def lease_patiently(farm, image, tries=3):
    for n in range(tries):
        try:
            return farm.lease(image, timeout=10.0)  # clean: goes to the caller
        except FarmError as e:
            log.info("try %d for %s: %r", n, image, e)
            time.sleep(2 ** n)
    return None


def check_images(farm, images):
    broken = []
    for image in images:
        box = lease_patiently(farm, image)  # clean: surrendered, when there is one
        if box is None:
            broken.append(image)
            continue
        try:
            if box.run("python3 -V").rc != 0:
                broken.append(image)
        finally:
            farm.surrender(box)
    return broken
