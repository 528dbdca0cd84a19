from __future__ import annotations

import asyncio
from typing import Any, Dict, List, Optional, Sequence

from .channels import ChannelManager
from .stubs import EncoderStub, ModelStub


class Router:
    """Keeps one stub per target for as long as the target is in rotation."""

    def __init__(self, mgr: ChannelManager) -> None:
        self.mgr = mgr
        self._lock = asyncio.Lock()
        self._stubs: Dict[str, ModelStub] = {}

    async def stub_for(self, target: str) -> ModelStub:
        async with self._lock:
            stub = self._stubs.get(target)
            if stub is None:
                stub = await ModelStub.connect(self.mgr, target)  # clean: near miss, only made when absent, kept in the table
                self._stubs[target] = stub
            return stub

    def retire(self, target: str) -> None:
        stub = self._stubs.pop(target, None)
        if stub is not None:
            stub.close()

    def shutdown(self) -> None:
        for target in list(self._stubs):
            self.retire(target)

    async def one_shot(self, target: str, body: Any) -> Any:
        stub = await ModelStub.connect(self.mgr, target)  # clean: closed by the finally
        try:
            return await stub.infer(body)
        finally:
            stub.close()

    async def broadcast(self, targets: Sequence[str], body: Any) -> List[Any]:
        stubs: List[ModelStub] = []
        for target in targets:
            stubs.append(await ModelStub.connect(self.mgr, target))  # clean: every stub of the list is closed
        replies = await asyncio.gather(*(s.infer(body) for s in stubs))
        for stub in stubs:
            stub.close()
        return list(replies)

    async def first_answer(self, targets: Sequence[str], body: Any) -> Any:
        for target in targets:
            stub = await ModelStub.connect(self.mgr, target)  # leak: the stub that answers is not closed
            reply = await stub.infer(body)
            if reply is not None:
                return reply
            stub.close()
        return None

    async def encode_all(self, target: str, images: List[bytes]) -> Optional[List[int]]:
        encoder = await EncoderStub.connect_checked(self.mgr, target, version=2)  # leak: an empty image list returns without close
        if encoder is None:
            return None
        if not images:
            return []
        sizes = await encoder.encode(images)
        encoder.close()
        return sizes


class SessionRouter:
    """Pins chat sessions to a worker of their own."""

    def __init__(self, mgr: ChannelManager) -> None:
        self.mgr = mgr
        self._by_session: Dict[str, ModelStub] = {}

    async def bind(self, session: str, target: str) -> None:
        stub = await ModelStub.connect(self.mgr, target)  # leak: binding a session again overwrites its open stub
        self._by_session[session] = stub

    async def infer(self, session: str, body: Any) -> Any:
        return await self._by_session[session].infer(body)

    def end(self, session: str) -> None:
        stub = self._by_session.pop(session, None)
        if stub is not None:
            stub.close()
