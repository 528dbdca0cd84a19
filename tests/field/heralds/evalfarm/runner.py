from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from .sandbox import BootError, Outcome, Sandbox, SandboxDied, SandboxPool

log = logging.getLogger("evalfarm.runner")


@dataclass
class Problem:
    name: str
    tests: list[tuple[str, str]]


@dataclass
class Verdict:
    problem: str
    passed: int = 0
    total: int = 0
    notes: list[str] = field(default_factory=list)


async def grade(pool: SandboxPool, problem: Problem, code: str) -> Verdict:
    """All tests of a problem in one sandbox."""
    verdict = Verdict(problem.name, total=len(problem.tests))
    async with pool.session() as box:  # clean: async with
        for stdin, want in problem.tests:
            out = await box.run(code, stdin)
            if out.compile_error:
                verdict.notes.append("does not compile")
                return verdict
            verdict.passed += out.ok and out.stdout.strip() == want.strip()
    return verdict


async def grade_stubborn(pool: SandboxPool, problem: Problem, code: str, attempts: int = 3) -> Verdict:
    """For problems that are known to kill sandboxes."""
    verdict = Verdict(problem.name, total=len(problem.tests))
    for attempt in range(attempts):
        box = await pool.borrow()  # leak: after SandboxDied the loop borrows another without discarding this one
        try:
            outs = [await box.run(code, stdin) for stdin, _ in problem.tests]
        except SandboxDied as exc:
            verdict.notes.append(f"attempt {attempt}: {exc}")
            continue
        await pool.give_back(box)
        verdict.passed = sum(o.ok and o.stdout.strip() == w.strip() for o, (_, w) in zip(outs, problem.tests))
        return verdict
    return verdict


async def pass_at_k(pool: SandboxPool, problem: Problem, samples: list[str]) -> float:
    async def one(code: str) -> bool:
        try:
            box = await pool.borrow()  # clean: BootError means there is none, else given back or discarded
        except BootError as exc:
            log.error("%s: %s", problem.name, exc)
            return False
        try:
            outs = [await box.run(code, stdin) for stdin, _ in problem.tests]
        except SandboxDied:
            await pool.discard(box)
            return False
        await pool.give_back(box)
        return all(o.ok and o.stdout.strip() == w.strip() for o, (_, w) in zip(outs, problem.tests))

    results = await asyncio.gather(*(one(code) for code in samples))
    return sum(results) / max(1, len(results))


async def differential(py: SandboxPool, cpp: SandboxPool, left: str, right: str, stdin: str) -> bool | None:
    """Do two programs agree? None when it cannot be told."""
    try:
        a = await py.borrow()  # leak: BootError of the other pool is caught below and a is not given back
        b = await cpp.borrow()  # clean: given back by the finally of the inner try
        try:
            x, y = await asyncio.gather(a.run(left, stdin), b.run(right, stdin))
            return x.stdout == y.stdout
        finally:
            await py.give_back(a)
            await cpp.give_back(b)
    except (BootError, SandboxDied) as exc:
        log.warning("differential: %s", exc)
        return None


class Repl:
    """A sandbox that keeps its state between cells, for tool using models."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.box: Sandbox | None = None
        self.restarts = 0

    async def __aenter__(self) -> "Repl":
        self.box = await self.pool.borrow()  # leak: cell() rebinds box after SandboxDied and nobody discards this one
        return self

    async def cell(self, code: str) -> Outcome:
        try:
            return await self.box.run(code)
        except SandboxDied as exc:
            self.restarts += 1
            self.box = await self.pool.borrow()  # leak: lost when the next cell kills it, by the same rebinding
            return Outcome(False, error=str(exc))

    async def __aexit__(self, *exc_info: object) -> None:
        if self.box is not None:
            await self.pool.give_back(self.box)
            self.box = None
