from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

logger = logging.getLogger(__name__)


class SlotTable:
    def __init__(self, size: int) -> None:
        self._free = deque(range(size))
        self.size = size

    def take(self) -> int:
        return self._free.popleft() if self._free else -1

    def put(self, slot: int) -> None:
        self._free.append(slot)

    def available(self) -> int:
        return len(self._free)


class PageAllocator:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        pages, self._free = self._free[:n], self._free[n:]
        return pages

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)


class EnvPool:
    def __init__(self, names: list[str]) -> None:
        self._idle = list(names)

    def borrow(self) -> Optional[str]:
        return self._idle.pop() if self._idle else None

    def give_back(self, env: str) -> None:
        self._idle.append(env)


@dataclass(eq=False)
class RolloutRequest:
    rid: str
    prompt: list[int]
    max_new: int
    needs_env: bool = False
    status: str = "waiting"
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    env: Optional[str] = None
    output: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class RolloutEngine:
    def __init__(self, slots: SlotTable, pages: PageAllocator, envs: EnvPool) -> None:
        self.slots = slots
        self.pages = pages
        self.envs = envs
        self.waiting: deque[RolloutRequest] = deque()
        self.running: dict[str, RolloutRequest] = {}

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.page_size)

    def submit(self, req: RolloutRequest) -> None:
        self.waiting.append(req)

    def admit(self) -> list[RolloutRequest]:
        admitted: list[RolloutRequest] = []
        while self.waiting and self.slots.available():
            req = self.waiting[0]
            pages = self.pages.alloc(self._pages_for(req.length + 1))  # clean: near miss, freed on the env refusal, else kept by the request until _release_kv
            if pages is None:
                break
            if req.needs_env and req.env is None:
                req.env = self.envs.borrow()  # leak: abort() of a request drops its env
                if req.env is None:
                    self.pages.free(pages)
                    break
            req.pages = pages
            req.slot = self.slots.take()  # clean: near miss, availability is checked by the loop, _release_kv puts it back
            req.status = "running"
            self.waiting.popleft()
            self.running[req.rid] = req
            admitted.append(req)
        return admitted

    def _release_kv(self, req: RolloutRequest) -> None:
        if req.slot >= 0:
            self.slots.put(req.slot)
            req.slot = -1
        self.pages.free(req.pages)
        req.pages = []

    def grow(self, req: RolloutRequest) -> bool:
        need = self._pages_for(req.length + 1) - len(req.pages)
        if need <= 0:
            return True
        extra = self.pages.alloc(need)  # clean: near miss, None-checked and appended to the request's pages
        if extra is None:
            return False
        req.pages.extend(extra)
        return True

    def preempt(self, req: RolloutRequest) -> None:
        self.running.pop(req.rid)
        self._release_kv(req)
        req.status = "preempted"
        self.waiting.appendleft(req)

    def finish(self, req: RolloutRequest) -> None:
        self.running.pop(req.rid)
        self._release_kv(req)
        if req.env is not None:
            self.envs.give_back(req.env)
            req.env = None
        req.status = "finished"

    def abort(self, rid: str) -> bool:
        req = self.running.pop(rid, None)
        if req is None:
            return False
        self._release_kv(req)
        req.status = "finished"
        return True

    def step(self, tokens: dict[str, int], eos: int) -> list[RolloutRequest]:
        done: list[RolloutRequest] = []
        for req in list(self.running.values()):
            if not self.grow(req):
                self.preempt(req)
                continue
            req.output.append(tokens[req.rid])
            if tokens[req.rid] == eos or len(req.output) >= req.max_new:
                self.finish(req)
                done.append(req)
        return done

    def fork(self, req: RolloutRequest, rid: str) -> Optional[RolloutRequest]:
        slot = self.slots.take()  # leak: stays taken when the pages are refused
        if slot < 0:
            return None
        pages = self.pages.alloc(len(req.pages))  # clean: near miss, None-checked, moves into the child registered in running
        if pages is None:
            return None
        child = RolloutRequest(rid, list(req.prompt), req.max_new, status="running")
        child.output = list(req.output)
        child.slot, child.pages = slot, pages
        self.running[rid] = child
        return child

    def fork_group(self, req: RolloutRequest, n: int) -> list[RolloutRequest]:
        children: list[RolloutRequest] = []
        for i in range(n):
            slot = self.slots.take()  # clean: near miss, put back when the pages are refused
            if slot < 0:
                break
            pages = self.pages.alloc(len(req.pages))  # leak: a child past its token budget is dropped with its pages
            if pages is None:
                self.slots.put(slot)
                break
            child = RolloutRequest(f"{req.rid}-{i}", list(req.prompt), req.max_new, slot=slot)
            child.output = list(req.output)
            if len(child.output) >= child.max_new:
                self.slots.put(slot)
                continue
            child.pages = pages
            child.status = "running"
            self.running[child.rid] = child
            children.append(child)
        return children

    def probe_envs(self) -> int:
        healthy = 0
        seen: list[str] = []
        while (env := self.envs.borrow()) is not None:  # leak: an env whose name is marked stale is never given back
            if env.endswith(".stale"):
                logger.warning("env %s is stale", env)
                continue
            seen.append(env)
            healthy += 1
        for env in seen:
            self.envs.give_back(env)
        return healthy

    def drain(self) -> None:
        for req in list(self.running.values()):
            self.finish(req)
        for req in self.waiting:
            if req.env is not None:
                self.envs.give_back(req.env)
                req.env = None
        self.waiting.clear()
