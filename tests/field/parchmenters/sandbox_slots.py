"""Tool-call sandboxes for agentic rollouts."""
import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass

log = logging.getLogger("rollout.sandbox")


class SandboxTimeout(Exception):
    pass


class Box:
    def __init__(self, box_id: int, transport):
        self.box_id = box_id
        self.transport = transport
        self.on_exit = None

    async def ping(self) -> bool:
        return await self.transport.call(self.box_id, "ping", timeout=2) == "pong"

    async def exec(self, code: str, timeout: float) -> dict:
        try:
            return await asyncio.wait_for(self.transport.call(self.box_id, code), timeout)
        except asyncio.TimeoutError:
            raise SandboxTimeout(code[:40])

    async def wipe(self) -> None:
        await self.transport.call(self.box_id, "wipe", timeout=10)


@dataclass
class ToolCall:
    traj_id: str
    code: str
    timeout: float = 20.0


@dataclass
class ToolResult:
    text: str
    ok: bool


class BoxPool:
    """A fixed set of boxes in an asyncio queue."""

    def __init__(self, boxes: list[Box]):
        self._idle: asyncio.Queue[Box] = asyncio.Queue()
        self._dead: list[Box] = []
        for box in boxes:
            self._idle.put_nowait(box)

    async def rent(self, patience: float = 30.0) -> Box | None:
        try:
            return await asyncio.wait_for(self._idle.get(), patience)  # clean: returned to the caller
        except asyncio.TimeoutError:
            return None

    async def rent_checked(self, patience: float = 30.0) -> Box | None:
        """Like rent(), but the box has answered."""
        try:
            box = await asyncio.wait_for(self._idle.get(), patience)  # leak: a box that does not answer is neither queued again nor put with the dead
        except asyncio.TimeoutError:
            return None
        if not await box.ping():
            log.warning("box %d is silent", box.box_id)
            return None
        return box

    async def rent_first_alive(self) -> Box | None:
        while not self._idle.empty():
            box = self._idle.get_nowait()  # clean: near miss, silent boxes go to the dead list, which revive() empties
            if await box.ping():
                return box
            self._dead.append(box)
        return None

    def hand_in(self, box: Box) -> None:
        box.on_exit = None
        self._idle.put_nowait(box)

    async def revive(self) -> None:
        while self._dead:
            box = self._dead.pop()  # clean: wiped and queued
            try:
                await box.wipe()
            finally:
                self._idle.put_nowait(box)

    @asynccontextmanager
    async def borrowed(self, patience: float = 30.0):
        box = await self.rent(patience)  # clean: handed in by finally
        if box is None:
            raise SandboxTimeout("no box")
        try:
            yield box
        finally:
            self.hand_in(box)


class ToolRunner:
    def __init__(self, pool: BoxPool, max_egress: int = 8):
        self.pool = pool
        self.egress = asyncio.Semaphore(max_egress)
        self._pending: set[asyncio.Task] = set()

    async def run_call(self, call: ToolCall) -> ToolResult:
        box = await self.pool.rent()  # leak: the timeout branch returns without handing it in
        if box is None:
            return ToolResult("sandbox busy", False)
        try:
            out = await box.exec(call.code, call.timeout)
        except SandboxTimeout:
            return ToolResult(f"timed out after {call.timeout}s", False)
        self.pool.hand_in(box)
        return ToolResult(out["stdout"], out["code"] == 0)

    async def run_call_scoped(self, call: ToolCall) -> ToolResult:
        try:
            async with self.pool.borrowed(call.timeout) as box:  # clean: the context manager hands it in
                out = await box.exec(call.code, call.timeout)
        except SandboxTimeout:
            return ToolResult("timed out", False)
        return ToolResult(out["stdout"], out["code"] == 0)

    async def run_retrying(self, call: ToolCall, attempts: int = 3) -> ToolResult:
        for attempt in range(attempts):
            box = await self.pool.rent_checked()  # leak: an OOM-killed run goes round without handing in
            if box is None:
                await asyncio.sleep(0.5 * (attempt + 1))
                continue
            out = await box.exec(call.code, call.timeout)
            if out["code"] == 137:
                log.info("box %d was OOM-killed, attempt %d", box.box_id, attempt)
                continue
            self.pool.hand_in(box)
            return ToolResult(out["stdout"], out["code"] == 0)
        return ToolResult("out of memory", False)

    async def run_until_ok(self, call: ToolCall, attempts: int = 3) -> ToolResult:
        last = "no attempt"
        for _ in range(attempts):
            box = await self.pool.rent_checked()  # clean: near miss, finally covers the `continue` and the return
            if box is None:
                continue
            try:
                out = await box.exec(call.code, call.timeout)
                if out["code"] == 137:
                    last = "out of memory"
                    continue
                return ToolResult(out["stdout"], True)
            except SandboxTimeout:
                last = "timed out"
            finally:
                self.pool.hand_in(box)
        return ToolResult(last, False)

    async def start_many(self, calls: list[ToolCall]) -> list[asyncio.Task]:
        tasks = []
        for call in calls:
            box = await self.pool.rent()  # clean: near miss, the task's done callback hands it in
            if box is None:
                break
            task = asyncio.create_task(box.exec(call.code, call.timeout))
            task.add_done_callback(lambda _t, b=box: self.pool.hand_in(b))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            tasks.append(task)
        return tasks

    async def start_first(self, calls: list[ToolCall]) -> asyncio.Task | None:
        """Start the first call whose code is not blank."""
        for call in calls:
            box = await self.pool.rent()  # leak: a blank call is skipped while the box is held
            if box is None:
                return None
            if not call.code.strip():
                continue
            task = asyncio.create_task(box.exec(call.code, call.timeout))
            task.add_done_callback(lambda _t, b=box: self.pool.hand_in(b))
            return task
        return None

    async def fetch_url(self, box: Box, url: str) -> str | None:
        await self.egress.acquire()  # leak: a blocked scheme returns before the release
        if not url.startswith(("http://", "https://")):
            return None
        try:
            out = await box.exec(f"fetch {url}", 15)
            return out["stdout"]
        finally:
            self.egress.release()

class StatefulSessions:
    """Trajectories that keep one box over all their turns."""

    def __init__(self, pool: BoxPool):
        self.pool = pool
        self._boxes: dict[str, Box] = {}

    async def attach(self, traj_id: str) -> Box | None:
        if traj_id in self._boxes:
            return self._boxes[traj_id]
        box = await self.pool.rent()  # clean: in self._boxes, which detach() and close() hand in
        if box is not None:
            self._boxes[traj_id] = box
        return box

    async def swap(self, traj_id: str) -> Box | None:
        """A fresh box for a trajectory whose box went bad."""
        fresh = await self.pool.rent_checked()  # clean: near miss, the box it replaces is handed in
        if fresh is None:
            return self._boxes.get(traj_id)
        old = self._boxes.get(traj_id)
        self._boxes[traj_id] = fresh
        if old is not None:
            try:
                await old.wipe()
            finally:
                self.pool.hand_in(old)
        return fresh

    def detach(self, traj_id: str) -> None:
        box = self._boxes.pop(traj_id, None)
        if box is not None:
            self.pool.hand_in(box)

    def close(self) -> None:
        while self._boxes:
            _, box = self._boxes.popitem()
            self.pool.hand_in(box)
