"""Code-execution sandboxes for RL rollouts: warm pool with flavours and owner-decided return."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Optional

log = logging.getLogger("sandbox")


@dataclass
class Sandbox:
    name: str
    flavour: str
    runs: int = 0
    born: float = 0.0

    def execute(self, code: str) -> Optional[str]:
        self.runs += 1
        return code or None


class SandboxPool:
    def __init__(self, flavours: dict[str, int]) -> None:
        self._warm: "OrderedDict[str, Sandbox]" = OrderedDict()
        for flavour, count in flavours.items():
            for i in range(count):
                name = f"{flavour}-{i}"
                self._warm[name] = Sandbox(name, flavour, born=time.monotonic())

    def draft(self, flavour: str) -> Optional[Sandbox]:
        for name, sb in self._warm.items():
            if sb.flavour == flavour:
                return self._warm.pop(name)  # clean: to the caller
        return None

    def draft_oldest(self) -> Optional[Sandbox]:
        if not self._warm:
            return None
        _, sb = self._warm.popitem(last=False)  # clean: to the caller
        return sb

    def dismiss(self, sb: Sandbox) -> None:
        self._warm[sb.name] = sb


class Episode:
    """Runs code; dismisses the sandbox itself only if told to own it."""

    def __init__(self, pool: SandboxPool, sb: Sandbox, owns: bool) -> None:
        self.pool = pool
        self.sb = sb
        self.owns = owns

    def run(self, steps: list[str]) -> list[str]:
        out = []
        for code in steps:
            text = self.sb.execute(code)
            if text is None:
                break
            out.append(text)
        if self.owns:
            self.pool.dismiss(self.sb)
        return out


class RolloutWorker:
    def __init__(self, pool: SandboxPool, reward: Callable[[list[str]], float]) -> None:
        self.pool = pool
        self.reward = reward
        self.lent: dict[int, Sandbox] = {}

    def rollout(self, steps: list[str]) -> float:
        sb = self.pool.draft("python")  # clean: near miss, the episode owns it and dismisses it after the run
        if sb is None:
            return 0.0
        return self.reward(Episode(self.pool, sb, owns=True).run(steps))

    def rollout_shared(self, attempts: list[list[str]]) -> float:
        sb = self.pool.draft("python")  # leak: a perfect reward returns early from a sandbox the episodes do not own
        if sb is None:
            return 0.0
        best = 0.0
        for steps in attempts:
            best = max(best, self.reward(Episode(self.pool, sb, owns=False).run(steps)))
            if best >= 1.0:
                return best
        self.pool.dismiss(sb)
        return best

    def rollout_last_owns(self, attempts: list[list[str]]) -> float:
        if not attempts:
            return 0.0
        sb = self.pool.draft("python")  # clean: near miss, the last episode is the owner and attempts is not empty
        if sb is None:
            return 0.0
        total = 0.0
        for i, steps in enumerate(attempts):
            total += self.reward(Episode(self.pool, sb, owns=i == len(attempts) - 1).run(steps))
        return total / len(attempts)

    def judge(self, code: str, borrow: bool) -> Optional[str]:
        sb = self.pool.draft("judge")  # leak: with borrow unset nobody dismisses it
        if sb is None:
            return None
        text = sb.execute(code)
        if borrow:
            self.pool.dismiss(sb)
        return text

    def lend_to(self, task: int) -> bool:
        if task in self.lent:
            return False
        sb = self.pool.draft_oldest()  # clean: in lent until end_task
        if sb is None:
            return False
        self.lent[task] = sb
        return True

    def refresh(self, task: int, flavour: str) -> bool:
        sb = self.pool.draft(flavour)  # leak: the task's earlier sandbox is replaced undismissed
        if sb is None:
            return False
        self.lent[task] = sb
        return True

    def exchange(self, task: int, flavour: str) -> bool:
        sb = self.pool.draft(flavour)  # clean: near miss, the earlier one is dismissed, an unknown task dismisses the new one
        if sb is None:
            return False
        old = self.lent.get(task)
        if old is None:
            self.pool.dismiss(sb)
            return False
        self.lent[task] = sb
        self.pool.dismiss(old)
        return True

    def end_task(self, task: int) -> None:
        sb = self.lent.pop(task, None)
        if sb is not None:
            self.pool.dismiss(sb)


def with_sandbox(pool: SandboxPool, flavour: str, fn: Callable[[Sandbox], bool], fallback: str) -> bool:
    sb = pool.draft(flavour) or pool.draft(fallback)  # clean: near miss, one of the two at most and dismissed after fn
    if sb is None:
        return False
    ok = fn(sb)
    pool.dismiss(sb)
    return ok


def screen(pool: SandboxPool, codes: list[str], limit: int) -> list[str]:
    good: list[str] = []
    for code in codes:
        sb = pool.draft_oldest()  # leak: a worn sandbox is logged and passed over
        if sb is None:
            break
        if sb.runs > limit:
            log.info("%s is worn out", sb.name)
            continue
        if sb.execute(code) is not None:
            good.append(code)
        pool.dismiss(sb)
    return good
