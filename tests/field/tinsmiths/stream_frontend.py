"""Async streaming front end: per-request lanes, detokenizer states and SSE connections."""
from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from typing import Any, AsyncIterator, Deque, Dict, List, Optional

logger = logging.getLogger(__name__)

END = object()


class Lane:
    def __init__(self, no: int) -> None:
        self.no = no
        self.q: "asyncio.Queue[Any]" = asyncio.Queue()
        self.closed = False


class LanePool:
    def __init__(self, n: int) -> None:
        self._parked: Deque[Lane] = deque(Lane(i) for i in range(n))
        self._waiters: Deque[asyncio.Future] = deque()

    async def lend(self) -> Lane:
        while not self._parked:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        lane = self._parked.popleft()  # clean: returned
        lane.closed = False
        return lane

    def lend_nowait(self) -> Optional[Lane]:
        return self._parked.popleft() if self._parked else None

    async def lend_clean(self) -> Lane:
        """A lane with an empty queue."""
        while True:
            lane = await self.lend()  # leak: one with leftovers is overwritten on the next turn
            if lane.q.empty():
                return lane
            logger.warning("lane %d has leftovers", lane.no)

    def park(self, lane: Lane) -> None:
        lane.closed = True
        self._parked.append(lane)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


class DetokStates:
    def __init__(self, make) -> None:
        self._make = make
        self._spare: List[Any] = []

    def get(self) -> Any:
        return self._spare.pop() if self._spare else self._make()

    def put(self, st: Any) -> None:
        st.reset()
        self._spare.append(st)


class LaneLease:
    """async with LaneLease(pool) as lane"""

    def __init__(self, pool: LanePool, keep_on_error: bool = False) -> None:
        self.pool = pool
        self.keep_on_error = keep_on_error
        self.lane: Optional[Lane] = None

    async def __aenter__(self) -> Lane:
        self.lane = await self.pool.lend()  # leak: __aexit__ returns early on an error with keep_on_error
        return self.lane

    async def __aexit__(self, et, ev, tb) -> bool:
        if et is not None and self.keep_on_error:
            logger.error("stream failed: %s", ev)
            self.lane = None
            return False
        self.pool.park(self.lane)
        self.lane = None
        return False


class StateLease:
    def __init__(self, states: DetokStates) -> None:
        self.states = states

    def __enter__(self) -> Any:
        self.st = self.states.get()  # clean: put by __exit__ on every way out
        return self.st

    def __exit__(self, et, ev, tb) -> bool:
        self.states.put(self.st)
        return False


class Frontend:
    def __init__(self, lanes: LanePool, states: DetokStates, engine: Any) -> None:
        self.lanes = lanes
        self.states = states
        self.engine = engine
        self.streams: Dict[str, Lane] = {}
        self.detok: Dict[str, Any] = {}
        self._bg: set = set()

    async def completions(self, rid: str, body: Dict[str, Any]) -> Dict[str, Any]:
        lane = await self.lanes.lend()  # leak: not parked when the engine refuses the request
        if not await self.engine.submit(rid, body, lane.q):
            return {"error": {"code": 503}}
        parts: List[str] = []
        while True:
            item = await lane.q.get()
            if item is END:
                break
            parts.append(item)
        self.lanes.park(lane)
        return {"text": "".join(parts)}

    async def chat(self, rid: str, body: Dict[str, Any]) -> Dict[str, Any]:
        lane = await self.lanes.lend()  # clean: parked in finally
        try:
            if not await self.engine.submit(rid, body, lane.q):
                return {"error": {"code": 503}}
            parts = []
            while (item := await lane.q.get()) is not END:
                parts.append(item)
            return {"message": "".join(parts)}
        finally:
            self.lanes.park(lane)

    async def stream(self, rid: str, body: Dict[str, Any]) -> AsyncIterator[bytes]:
        lane = await self.lanes.lend()  # leak: the stop-string return passes over park
        await self.engine.submit(rid, body, lane.q)
        stops = body.get("stop", [])
        while (item := await lane.q.get()) is not END:
            yield f"data: {json.dumps(item)}\n\n".encode()
            if any(s in item for s in stops):
                self.engine.abort(rid)
                return
        self.lanes.park(lane)

    async def stream_chat(self, rid: str, body: Dict[str, Any]) -> AsyncIterator[bytes]:
        async with LaneLease(self.lanes) as lane:  # clean: near miss, without keep_on_error the exit always parks
            await self.engine.submit(rid, body, lane.q)
            while (item := await lane.q.get()) is not END:
                with StateLease(self.states) as st:  # clean: a context manager
                    yield st.decode(item)

    async def open_ws(self, rid: str) -> bool:
        if rid in self.streams:
            return False
        lane = self.lanes.lend_nowait()  # clean: close_ws() parks it
        if lane is None:
            return False
        self.streams[rid] = lane
        self.detok[rid] = self.states.get()  # clean: close_ws() puts it
        return True

    async def close_ws(self, rid: str) -> None:
        lane = self.streams.pop(rid, None)
        if lane is not None:
            self.lanes.park(lane)
        st = self.detok.pop(rid, None)
        if st is not None:
            self.states.put(st)

    async def resume_ws(self, rid: str, ws: Any) -> None:
        lane = self.lanes.lend_nowait()  # leak: not parked when the stream was closed in the meantime
        if lane is None:
            await ws.send("busy")
            return
        history = await self.engine.history(rid)
        old = self.streams.get(rid)
        if old is None:
            await ws.send("gone")
            return
        for h in history:
            lane.q.put_nowait(h)
        self.streams[rid] = lane
        self.lanes.park(old)

    async def fan_out(self, rid: str, body: Dict[str, Any], n: int) -> List[str]:
        lanes: List[Lane] = []
        try:
            for i in range(n):
                lane = self.lanes.lend_nowait()  # clean: near miss, all of lanes are parked in finally
                if lane is None:
                    return []
                lanes.append(lane)
                await self.engine.submit(f"{rid}-{i}", body, lane.q)
            return [await self._drain(x) for x in lanes]
        finally:
            for x in lanes:
                self.lanes.park(x)

    async def _drain(self, lane: Lane) -> str:
        out = []
        while (item := await lane.q.get()) is not END:
            out.append(item)
        return "".join(out)

    async def background(self, rid: str, body: Dict[str, Any]) -> None:
        lane = await self.lanes.lend()  # clean: near miss, given to the task, which parks it
        task = asyncio.create_task(self._pump(rid, body, lane))
        self._bg.add(task)
        task.add_done_callback(self._bg.discard)

    async def _pump(self, rid: str, body: Dict[str, Any], lane: Lane) -> None:
        try:
            await self.engine.submit(rid, body, lane.q)
            self.engine.store(rid, await self._drain(lane))
        finally:
            self.lanes.park(lane)

    def detok_once(self, ids: List[int]) -> str:
        st = self.states.get()  # leak: not put back for an incomplete character
        text = st.decode(ids)
        if text.endswith("\ufffd"):
            return text[:-1]
        self.states.put(st)
        return text

    async def shutdown(self) -> None:
        for rid in list(self.streams):
            await self.close_ws(rid)
