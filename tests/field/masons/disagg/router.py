from __future__ import annotations

import asyncio
from typing import Awaitable, Callable, Dict, Optional, Tuple

from .pools import InflightGate, Instances

Post = Callable[[str, bytes], Awaitable[bytes]]


class Router:
    def __init__(self, prefill: Instances, decode: Instances, gate: InflightGate, post: Post) -> None:
        self.prefill = prefill
        self.decode = decode
        self.gate = gate
        self.post = post
        self.sticky: Dict[str, str] = {}

    def pick_pair(self) -> Tuple[str, str]:
        return self.prefill.pick(), self.decode.pick()  # clean: both are returned to the caller

    async def generate(self, body: bytes) -> Optional[bytes]:
        await self.gate.enter()  # clean: near miss, the outer finally leaves on each return
        try:
            p, d = self.pick_pair()  # clean: near miss, unpicked by the inner finally, also on the handled timeout
            try:
                await self.post(p, body)
                return await self.post(d, body)
            except asyncio.TimeoutError:
                return None
            finally:
                self.prefill.unpick(p)
                self.decode.unpick(d)
        finally:
            self.gate.leave()

    async def prefill_only(self, body: bytes) -> bytes:
        p, _ = self.pick_pair()  # leak: the decode instance picked alongside is never unpicked
        try:
            return await self.post(p, body)
        finally:
            self.prefill.unpick(p)

    async def decode_only(self, body: bytes) -> Optional[bytes]:
        await self.gate.enter()  # leak: the cancelled way returns None without leave
        try:
            out = await self.post(next(iter(self.decode.load)), body)
        except asyncio.CancelledError:
            return None
        self.gate.leave()
        return out

    def stick(self, session: str) -> str:
        if session not in self.sticky:
            self.sticky[session] = self.decode.pick()  # clean: unstick lowers it
        return self.sticky[session]

    def unstick(self, session: str) -> None:
        url = self.sticky.pop(session, None)
        if url is not None:
            self.decode.unpick(url)
