from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


@dataclass(eq=False)
class Sandbox:
    number: int
    language: str
    runs: int = 0
    files: List[str] = field(default_factory=list)

    async def execute(self, code: str) -> int:
        self.runs += 1
        proc = await asyncio.create_subprocess_exec("run-in-sandbox", str(self.number), self.language, code)
        return await proc.wait()


class SandboxPool:
    def __init__(self, per_language: int, languages: List[str]) -> None:
        self._idle: Dict[str, Deque[Sandbox]] = {
            lang: deque(Sandbox(i, lang) for i in range(per_language)) for lang in languages
        }
        self._turn = asyncio.Condition()

    async def check_out(self, language: str) -> Sandbox:
        async with self._turn:
            await self._turn.wait_for(lambda: bool(self._idle[language]))
            return self._idle[language].popleft()

    def check_out_nowait(self, language: str) -> Optional[Sandbox]:
        idle = self._idle.get(language)
        if not idle:
            return None
        return idle.popleft()

    async def check_in(self, box: Sandbox) -> None:
        box.files.clear()
        async with self._turn:
            self._idle[box.language].append(box)
            self._turn.notify_all()
