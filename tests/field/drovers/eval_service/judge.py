"""Judging of answers: exact match, by execution, by a judge model."""
from __future__ import annotations

from typing import List

from .permits import PermitGate
from .sandbox import SandboxDead, SandboxPool


async def judge_quick(gate: PermitGate, answers: List[str], expected: str) -> bool:
    async with gate.quick_permit():  # clean: async with, the fault lies in the manager
        for a in answers:
            if a == "":
                raise ValueError("empty answer")
    return expected in answers


async def score_quick(gate: PermitGate, answers: List[str], expected: str) -> float:
    try:
        return 1.0 if await judge_quick(gate, answers, expected) else 0.0
    except ValueError:
        return 0.0


async def judge_code(gate: PermitGate, pool: SandboxPool, source: str) -> str:
    await gate.take()  # leak: not given back when no sandbox is idle
    sb = pool.checkout()  # clean: checked in in finally
    if sb is None:
        return "busy"
    try:
        return await sb.run(source)
    except SandboxDead:
        return "dead"
    finally:
        pool.checkin(sb)
        gate.give()
