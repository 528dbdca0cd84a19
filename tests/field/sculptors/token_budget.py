"""Concurrent token budget of an LLM gateway: tokens in flight, counted as plain numbers."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


class InflightTokens:
    """spend() takes up to the asked amount and says how much; the same amount has to be repaid."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.out = 0
        self._cond = asyncio.Condition()

    async def spend(self, want: int) -> int:
        async with self._cond:
            got = min(want, self.ceiling - self.out)
            self.out += got
            return got

    async def spend_exactly(self, want: int) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: self.out + want <= self.ceiling)
            self.out += want
            return want

    async def repay(self, amount: int) -> None:
        async with self._cond:
            self.out -= amount
            self._cond.notify_all()


@dataclass
class Prompt:
    text: str
    tokens: int
    max_new: int


class Gateway:
    def __init__(self, tokens: InflightTokens, backend, floor: int = 64) -> None:
        self.tokens = tokens
        self.backend = backend
        self.floor = floor
        self.held: dict[str, int] = {}

    async def generate(self, prompt: Prompt) -> str:
        amount = await self.tokens.spend_exactly(prompt.tokens + prompt.max_new)  # clean: repaid in finally
        try:
            return await self.backend.generate(prompt.text, prompt.max_new)
        finally:
            await self.tokens.repay(amount)

    async def generate_short(self, prompt: Prompt) -> str | None:
        granted = await self.tokens.spend(prompt.max_new)  # leak: a grant below the floor is not repaid
        if granted < self.floor:
            log.info("only %d tokens left", granted)
            return None
        text = await self.backend.generate(prompt.text, granted)
        await self.tokens.repay(granted)
        return text

    async def generate_some(self, prompt: Prompt) -> str | None:
        granted = await self.tokens.spend(prompt.max_new)  # clean: near miss, the small grant is repaid too
        if granted < self.floor:
            if granted > 0:
                await self.tokens.repay(granted)
            return None
        text = await self.backend.generate(prompt.text, granted)
        await self.tokens.repay(granted)
        return text

    async def batch(self, prompts: list[Prompt]) -> list[str]:
        total = 0
        texts = []
        for prompt in prompts:
            amount = await self.tokens.spend_exactly(prompt.tokens)  # clean: near miss, summed, repaid below
            total += amount
            texts.append(prompt.text)
        answers = await self.backend.generate_many(texts)
        await self.tokens.repay(total)
        return answers

    async def rank(self, prompts: list[Prompt]) -> list[float]:
        amount = 0
        for prompt in prompts:
            amount = await self.tokens.spend_exactly(prompt.tokens)  # leak: only the last amount is repaid
        scores = await self.backend.score([p.text for p in prompts])
        if prompts:
            await self.tokens.repay(amount)
        return scores

    async def open_chat(self, chat: str, tokens: int) -> bool:
        granted = await self.tokens.spend(tokens)  # clean: near miss, kept in held, repaid by close_chat
        if not granted:
            return False
        self.held[chat] = self.held.get(chat, 0) + granted
        return True

    async def close_chat(self, chat: str) -> None:
        amount = self.held.pop(chat, 0)
        if amount:
            await self.tokens.repay(amount)

    async def prime(self, prompt: Prompt) -> None:
        await self.tokens.spend_exactly(prompt.tokens)  # leak: the amount is never repaid
        await self.backend.prefill(prompt.text)

    async def embed(self, prompt: Prompt) -> list[float]:
        await self.tokens.spend_exactly(prompt.tokens)  # clean: near miss, repaid by the prompt's own number
        vector = await self.backend.embed(prompt.text)
        await self.tokens.repay(prompt.tokens)
        return vector
