from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from .media import Media, MediaLoader
from .permits import ByteBudget, EncoderRing


@dataclass
class Chat:
    cid: str
    media: list[Media] = field(default_factory=list)
    encoder: int | None = None
    audio_bytes: int = 0


class Server:
    def __init__(self, loader: MediaLoader, ring: EncoderRing, audio: ByteBudget) -> None:
        self.loader = loader
        self.ring = ring
        self.audio = audio
        self.chats: dict[str, Chat] = {}

    async def _encode(self, encoder: int, media: Media) -> list[float]:
        await asyncio.sleep(0)
        return [float(b) / 255 + encoder * 0 for b in media.data[:16]]

    async def attach(self, cid: str, parts: list[dict[str, Any]]) -> bool:
        chat = self.chats.setdefault(cid, Chat(cid))
        got: list[Media] = []
        for part in parts:
            media = self.loader.inline(part["kind"], part["raw"])  # clean: near miss, disposed when a later part fails, else it joins the chat
            if media is None:
                for m in got:
                    self.loader.dispose(m)
                return False
            got.append(media)
        chat.media.extend(got)
        return True

    async def attach_remote(self, cid: str, refs: list[tuple[str, str, int]]) -> int:
        n = 0
        for host, path, size in refs:
            media = await self.loader.load("image", host, path, size)  # leak: a chat closed meanwhile ends the loop, the media is not disposed
            if media is None:
                continue
            chat = self.chats.get(cid)
            if chat is None:
                return n
            chat.media.append(media)
            n += 1
        return n

    async def bind_encoder(self, cid: str) -> bool:
        chat = self.chats[cid]
        if chat.encoder is not None:
            return True
        encoder = self.ring.seize_nowait()  # clean: near miss, kept in the chat until close
        if encoder is None:
            return False
        chat.encoder = encoder
        return True

    def start_audio(self, cid: str, nbytes: int) -> bool:
        chat = self.chats[cid]
        if not self.audio.try_reserve(nbytes):  # leak: close and drop_media do not refund what audio_bytes holds
            return False
        chat.audio_bytes += nbytes
        return True

    async def embed(self, cid: str) -> list[list[float]]:
        chat = self.chats[cid]
        borrowed = chat.encoder is None
        encoder = await self.ring.seize() if borrowed else chat.encoder  # clean: near miss, loosed if borrowed, otherwise it is the chat's own
        try:
            return [await self._encode(encoder, m) for m in chat.media]
        finally:
            if borrowed:
                self.ring.loose(encoder)

    async def embed_one(self, media: Media, deadline: float) -> list[float] | None:
        encoder = await self.ring.seize()  # leak: past the deadline None is returned with the encoder seized
        try:
            vec = await asyncio.wait_for(self._encode(encoder, media), deadline)
        except asyncio.TimeoutError:
            return None
        except asyncio.CancelledError:
            self.ring.loose(encoder)
            raise
        self.ring.loose(encoder)
        return vec

    async def thumbnail(self, host: str, path: str, size: int) -> bytes | None:
        media = await self.loader.load("image", host, path, size)  # clean: near miss, the slice is a copy, the media is disposed
        if media is None:
            return None
        head = media.data[:1024]
        self.loader.dispose(media)
        return head

    def drop_media(self, chat: Chat) -> None:
        while chat.media:
            self.loader.dispose(chat.media.pop())

    def close(self, cid: str) -> None:
        chat = self.chats.pop(cid, None)
        if chat is None:
            return
        self.drop_media(chat)
        if chat.encoder is not None:
            self.ring.loose(chat.encoder)
            chat.encoder = None
