from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Permit:
    tool: str
    nonce: int


class ToolBroker:
    """Concurrency permits per tool; `search` and `browser` are scarce."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = dict(limits)
        self._granted: dict[str, set[int]] = {t: set() for t in limits}
        self._nonce = 0

    def ask(self, tool: str) -> Permit | None:
        granted = self._granted.get(tool)
        if granted is None or len(granted) >= self._limits[tool]:
            return None
        self._nonce += 1
        granted.add(self._nonce)
        return Permit(tool, self._nonce)

    def settle(self, permit: Permit) -> None:
        self._granted[permit.tool].discard(permit.nonce)

    def ask_patiently(self, tool: str, seconds: float) -> Permit | None:
        until = time.monotonic() + seconds
        permit = self.ask(tool)  # clean: near miss, asked again only while it is None, then handed on
        while permit is None and time.monotonic() < until:
            time.sleep(0.01)
            permit = self.ask(tool)  # clean: handed to the caller
        return permit

    def ask_all(self, tools: list[str]) -> list[Permit] | None:
        got: list[Permit] = []
        for tool in tools:
            permit = self.ask(tool)  # clean: near miss, settled again if one of the tools is busy
            if permit is None:
                for p in got:
                    self.settle(p)
                return None
            got.append(permit)
        return got
