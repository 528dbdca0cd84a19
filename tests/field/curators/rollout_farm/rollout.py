from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .engines import EngineLease, EnginePool

logger = logging.getLogger(__name__)


@dataclass
class Sample:
    prompt: str
    text: str
    version: int
    reward: float = 0.0


@dataclass
class Episode:
    episode_id: str
    turns: List[Sample] = field(default_factory=list)
    lease: Optional[EngineLease] = None
    judge: Optional[EngineLease] = None


class RolloutManager:
    def __init__(self, pool: EnginePool, reward: Callable[[str, str], float], timeout: float = 300.0) -> None:
        self.pool = pool
        self.reward = reward
        self.timeout = timeout
        self.episodes: Dict[str, Episode] = {}
        self._opening = asyncio.Lock()

    async def sample(self, prompt: str) -> Optional[Sample]:
        lease = await self.pool.lease("sample")  # clean: near miss, the finally gives it back on timeout and on cancellation
        try:
            text = await asyncio.wait_for(self.pool.engines[lease.engine](prompt), self.timeout)
            return Sample(prompt, text, lease.version, self.reward(prompt, text))
        except asyncio.TimeoutError:
            return None
        finally:
            self.pool.give_back(lease)

    async def sample_fresh(self, prompt: str, min_version: int) -> Optional[Sample]:
        lease = await self.pool.lease("fresh")  # leak: a lease of an outdated version returns None and is not given back
        if lease.version < min_version:
            logger.info("engine %d is behind", lease.engine)
            return None
        try:
            text = await self.pool.engines[lease.engine](prompt)
        finally:
            self.pool.give_back(lease)
        return Sample(prompt, text, lease.version, self.reward(prompt, text))

    async def open_episode(self, episode_id: str, judged: bool) -> Episode:
        async with self._opening:
            known = self.episodes.get(episode_id)
            if known is not None:
                return known
            episode = Episode(episode_id)
            episode.lease = await self.pool.lease(episode_id)  # clean: near miss, close_episode gives it back
            if judged:
                episode.judge = self.pool.lease_nowait(episode_id)  # leak: close_episode gives back lease and forgets judge
            self.episodes[episode_id] = episode
            return episode

    async def turn(self, episode_id: str, prompt: str) -> str:
        episode = self.episodes[episode_id]
        assert episode.lease is not None
        text = await self.pool.engines[episode.lease.engine](prompt)
        episode.turns.append(Sample(prompt, text, episode.lease.version))
        return text

    async def close_episode(self, episode_id: str) -> Optional[Episode]:
        episode = self.episodes.pop(episode_id, None)
        if episode is None:
            return None
        if episode.lease is not None:
            self.pool.give_back(episode.lease)
            episode.lease = None
        for sample in episode.turns:
            sample.reward = self.reward(sample.prompt, sample.text)
        return episode
