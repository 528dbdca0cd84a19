"""Runs model-written code in pooled sandboxes and scores it (pass@k)."""
from __future__ import annotations

import contextlib
import enum
import json
import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, ContextManager, Iterator, Sequence

logger = logging.getLogger("eval.sandbox")


class Verdict(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    TIMEOUT = "timeout"
    INVALID = "invalid"


@dataclass
class Sandbox:
    sid: int
    dirty: bool = False
    history: list[str] = field(default_factory=list)

    def run(self, code: str) -> Verdict:
        self.dirty = True
        self.history.append(code)
        return Verdict.PASS if "return" in code else Verdict.FAIL

    def scrub(self) -> None:
        self.dirty = False
        self.history.clear()


class SandboxPool:
    def __init__(self, size: int) -> None:
        self._by_id = {i: Sandbox(i) for i in range(size)}
        self._vacant = list(self._by_id)

    def rent(self) -> Sandbox:
        if not self._vacant:
            raise LookupError("no sandbox")
        return self._by_id[self._vacant.pop()]

    def hand_back(self, sb: Sandbox) -> None:
        sb.scrub()
        self._vacant.append(sb.sid)

    def rented(self) -> ContextManager[Sandbox]:
        stack = contextlib.ExitStack()
        sb = self.rent()  # clean: near miss, the callback of the returned stack hands it back
        stack.callback(self.hand_back, sb)

        @contextlib.contextmanager
        def cm() -> Iterator[Sandbox]:
            with stack:
                yield sb

        return cm()


def score_one(pool: SandboxPool, code: str) -> Verdict:
    if not code.strip():
        return Verdict.INVALID
    with pool.rented() as sb:  # clean: with block
        return sb.run(code)


def score_with_setup(pool: SandboxPool, setup: str, code: str) -> Verdict:
    sb = pool.rent()  # leak: a failing setup returns before hand_back
    if setup and sb.run(setup) is not Verdict.PASS:
        return Verdict.INVALID
    v = sb.run(code)
    pool.hand_back(sb)
    return v


def score_until_pass(pool: SandboxPool, samples: Sequence[str]) -> int:
    """Index of the first passing sample or -1."""
    for i, code in enumerate(samples):
        sb = pool.rent()  # leak: break on a pass comes before hand_back
        if sb.run(code) is Verdict.PASS:
            break
        pool.hand_back(sb)
    else:
        return -1
    return i


def first_pass(pool: SandboxPool, samples: Sequence[str]) -> int:
    sb = pool.rent()  # clean: near miss, one sandbox for all, break and else meet at hand_back
    for i, code in enumerate(samples):
        if sb.run(code) is Verdict.PASS:
            break
        sb.scrub()
    else:
        i = -1
    pool.hand_back(sb)
    return i


def pass_at_k(pool: SandboxPool, samples: Sequence[str], k: int) -> float:
    chosen = random.sample(list(samples), k)
    with contextlib.ExitStack() as stack:
        boxes = []
        for _ in chosen:
            try:
                boxes.append(stack.enter_context(pool.rented()))  # clean: on the stack
            except LookupError:
                break
        verdicts = [b.run(c) for b, c in zip(boxes, chosen)]
    return float(any(v is Verdict.PASS for v in verdicts))


class Tournament:
    """Two sandboxes, champion and challenger."""

    def __init__(self, pool: SandboxPool, judge: Callable[[Verdict, Verdict], bool]) -> None:
        self.pool = pool
        self.judge = judge
        self.champion: Sandbox | None = None

    def crown(self, code: str) -> bool:
        challenger = self.pool.rent()  # clean: near miss, one of the two is handed back, the other is the champion
        v = challenger.run(code)
        if self.champion is None:
            self.champion = challenger
            return True
        if self.judge(v, self.champion.run(self.champion.history[-1])):
            old, self.champion = self.champion, challenger
            self.pool.hand_back(old)
            return True
        self.pool.hand_back(challenger)
        return False

    def retire(self) -> None:
        if self.champion is not None:
            self.pool.hand_back(self.champion)
            self.champion = None

    def exhibition(self, a: str, b: str) -> bool:
        left = self.pool.rent()  # leak: a timeout on the right returns with the left still rented
        right = self.pool.rent()  # clean: handed back first of all
        va, vb = left.run(a), right.run(b)
        self.pool.hand_back(right)
        if vb is Verdict.TIMEOUT:
            return False
        self.pool.hand_back(left)
        return self.judge(va, vb)

    def dirty_check(self) -> bool:
        return self.pool.rent().dirty  # leak: the sandbox is only looked at


def write_report(path: Path, verdicts: dict[str, Verdict], append: bool) -> bool:
    fh = open(path, "a" if append else "w")  # leak: nothing to report returns with the file open
    if not verdicts:
        return False
    for name, v in verdicts.items():
        fh.write(json.dumps({"name": name, "verdict": v.value}) + "\n")
    fh.close()
    return True


def read_report(path: Path) -> Iterator[tuple[str, Verdict]]:
    with open(path) as fh:  # clean: with block in a generator
        for line in fh:
            rec = json.loads(line)
            if rec.get("verdict") is None:
                continue
            yield rec["name"], Verdict(rec["verdict"])
