from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable

from .broker import Permit, ToolBroker
from .workspace import Scope, Workspace, WorkspacePool

log = logging.getLogger(__name__)

Tool = Callable[[Workspace, str], str]


class ToolFailure(Exception):
    pass


@dataclass
class Turn:
    agent: str
    workspace: Workspace | None = None
    permits: list[Permit] = field(default_factory=list)


class AgentRunner:
    def __init__(self, pool: WorkspacePool, broker: ToolBroker, tools: dict[str, Tool]) -> None:
        self.pool = pool
        self.broker = broker
        self.tools = tools
        self.turns: dict[str, Turn] = {}

    def begin_turn(self, agent: str, tools: list[str]) -> Turn | None:
        if agent in self.turns:
            return self.turns[agent]
        ws = self.pool.open_workspace()  # leak: busy tools return None with the workspace still open
        if ws is None:
            return None
        permits = self.broker.ask_all(tools)  # clean: kept in the turn, end_turn and cancel_turn settle them
        if permits is None:
            return None
        turn = self.turns[agent] = Turn(agent, ws, permits)
        return turn

    def end_turn(self, agent: str) -> None:
        turn = self.turns.pop(agent)
        for permit in turn.permits:
            self.broker.settle(permit)
        if turn.workspace is not None:
            self.pool.close_workspace(turn.workspace)

    def cancel_turn(self, agent: str) -> bool:
        if agent not in self.turns:
            return False
        self.end_turn(agent)
        return True

    def add_tool(self, agent: str, tool: str) -> bool:
        turn = self.turns[agent]
        if any(p.tool == tool for p in turn.permits):
            return True
        permit = self.broker.ask_patiently(tool, 1.0)  # clean: near miss, joins the turn's permits
        if permit is None:
            return False
        turn.permits.append(permit)
        return True

    def reset_workspace(self, agent: str) -> bool:
        turn = self.turns[agent]
        fresh = self.pool.open_workspace()  # leak: the turn's former workspace is overwritten without being closed
        if fresh is None:
            return False
        turn.workspace = fresh
        return True

    def call_adhoc(self, tool: str, arg: str) -> str:
        permit = self.broker.ask_patiently(tool, 5.0)  # leak: a full workspace pool answers "busy" before the settle
        if permit is None:
            return "busy"
        with Scope(self.pool) as ws:
            if ws is None:
                return "busy"
            reply = self.tools[tool](ws, arg)
        self.broker.settle(permit)
        return reply

    def call_safely(self, tool: str, arg: str) -> str:
        permit = self.broker.ask(tool)  # clean: near miss, finally settles on every return
        if permit is None:
            return "busy"
        try:
            with Scope(self.pool) as ws:
                return "busy" if ws is None else self.tools[tool](ws, arg)
        except ToolFailure as exc:
            log.info("%s failed: %s", tool, exc)
            return "failed"
        finally:
            self.broker.settle(permit)
