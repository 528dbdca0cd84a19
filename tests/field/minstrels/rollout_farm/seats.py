"""A seat is a running environment. Environments are expensive to start, so seats are reused."""
import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Callable

log = logging.getLogger("farm.seats")


class EnvError(Exception):
    pass


@dataclass
class Seat:
    index: int
    env: Any
    episodes: int = 0
    broken: bool = False


def build(make_env: Callable, index: int):
    env = make_env(index)
    if env.action_space is None:
        raise EnvError(f"environment {index} came up without actions")
    return env


class SeatPool:
    def __init__(self, make_env: Callable, n: int):
        self.make_env = make_env
        self.n = n
        self._free: asyncio.Queue[Seat] = asyncio.Queue()
        for i in range(n):
            self._free.put_nowait(Seat(i, build(make_env, i)))

    async def sit(self) -> Seat:
        seat = await self._free.get()  # leak: when a broken seat cannot be rebuilt, EnvError leaves with it and the pool is one smaller
        if seat.broken:
            seat.env = build(self.make_env, seat.index)
            seat.broken = False
        return seat

    def stand(self, seat: Seat) -> None:
        seat.episodes += 1
        self._free.put_nowait(seat)

    @contextlib.asynccontextmanager
    async def seated(self):
        seat = await self.sit()  # clean: the finally stands up
        try:
            yield seat
        except EnvError:
            seat.broken = True
            raise
        finally:
            self.stand(seat)
