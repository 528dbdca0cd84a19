from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import AsyncIterator, Callable, Optional

from .models import LoadedModel, ModelCache
from .replicas import Replica, ReplicaSet


class ReplicaDied(Exception):
    pass


@dataclass
class Call:
    call_id: str
    replica: Replica
    model: Optional[LoadedModel] = None
    on_done: list[Callable[[], None]] = field(default_factory=list)

    def done(self) -> None:
        while self.on_done:
            self.on_done.pop()()


class Router:
    def __init__(self, replicas: ReplicaSet, models: ModelCache) -> None:
        self.replicas = replicas
        self.models = models
        self.calls: dict[str, Call] = {}

    async def _send(self, replica: Replica, text: str) -> str:
        await asyncio.sleep(0)
        if replica.draining:
            raise ReplicaDied(replica.name)
        return text.upper()

    async def handle(self, text: str, retries: int = 3) -> Optional[str]:
        for _ in range(retries):
            replica = self.replicas.choose()  # leak: a replica that died in the call is retried without lowering its count
            if replica is None:
                await asyncio.sleep(0.01)
                continue
            try:
                out = await self._send(replica, text)
            except ReplicaDied:
                continue
            self.replicas.dec_ongoing(replica)
            return out
        return None

    async def handle_sticky(self, text: str, names: set[str]) -> Optional[str]:
        replica = self.replicas.choose_preferring(names)  # clean: near miss, the handler's return runs the finally
        if replica is None:
            return None
        try:
            return await self._send(replica, text)
        except ReplicaDied:
            return None
        finally:
            self.replicas.dec_ongoing(replica)

    def open_call(self, call_id: str, model_id: str) -> bool:
        if call_id in self.calls:
            return False
        replica = self.replicas.choose()  # clean: near miss, lowered when the model is missing, else by the callback
        if replica is None:
            return False
        model = self.models.acquire_model(model_id)  # clean: near miss, a callback of the call releases it
        if model is None:
            self.replicas.dec_ongoing(replica)
            return False
        call = Call(call_id, replica, model)
        call.on_done.append(lambda: self.replicas.dec_ongoing(replica))
        call.on_done.append(lambda: self.models.release_model(model))
        self.calls[call_id] = call
        return True

    def open_plain(self, call_id: str, replica_name: str) -> bool:
        replica = self.replicas.get(replica_name)
        if replica is None or not self.replicas.inc_ongoing(replica):  # leak: no callback is set, so close_call has nothing to run
            return False
        self.calls[call_id] = Call(call_id, replica)
        return True

    def close_call(self, call_id: str) -> None:
        call = self.calls.pop(call_id, None)
        if call is not None:
            call.done()

    def switch_model(self, call_id: str, model_id: str) -> bool:
        call = self.calls[call_id]
        model = self.models.acquire_model(model_id)  # leak: the callback of the call still releases the model it started with
        if model is None:
            return False
        call.model = model
        return True

    async def stream(self, model_id: str, text: str) -> AsyncIterator[str]:
        model = self.models.acquire_model(model_id)  # clean: near miss, every end of the generator runs the finally
        if model is None:
            return
        try:
            for word in text.split():
                if word == "</s>":
                    return
                yield model.run(word)
                await asyncio.sleep(0)
        finally:
            self.models.release_model(model)

    async def compare(self, left: str, right: str, text: str) -> Optional[bool]:
        a = self.models.acquire_model(left)  # leak: kept when the right model cannot be loaded
        if a is None:
            return None
        b = self.models.acquire_model(right)  # clean: released with the left one
        if b is None:
            return None
        same = a.run(text) == b.run(text)
        self.models.release_model(b)
        self.models.release_model(a)
        return same
