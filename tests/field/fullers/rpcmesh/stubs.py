from __future__ import annotations

from typing import Any, List, Optional

from .channels import Channel, ChannelManager


class ModelStub:
    """Owns one leased channel until `close`."""

    def __init__(self, mgr: ChannelManager, channel: Channel) -> None:
        self._mgr = mgr
        self._channel: Optional[Channel] = channel

    @classmethod
    async def connect(cls, mgr: ChannelManager, target: str) -> "ModelStub":
        channel = await mgr.lease(target)  # clean: moved into the stub whose close gives it back
        return cls(mgr, channel)

    async def infer(self, body: Any) -> Any:
        return await self._channel.unary("infer", body)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._mgr.give_back(channel)


class EncoderStub(ModelStub):
    @classmethod
    async def connect_v2(cls, mgr: ChannelManager, target: str) -> Optional["EncoderStub"]:
        channel = await mgr.lease(target)  # leak: a refused handshake returns None and the channel stays leased
        if not await channel.hello(version=2):
            return None
        return cls(mgr, channel)

    @classmethod
    async def connect_checked(cls, mgr: ChannelManager, target: str, version: int) -> Optional["EncoderStub"]:
        channel = await mgr.lease(target)  # clean: near miss, given back when the handshake is refused
        if not await channel.hello(version):
            mgr.give_back(channel)
            return None
        return cls(mgr, channel)

    async def encode(self, images: List[bytes]) -> List[int]:
        return [len(await self.infer(image)) for image in images]
