"""Collectors (asyncio) and the learner (a thread)."""
import asyncio
import logging
import threading
import time

from .engine import EngineFull, SessionTable
from .replay import StaleChunk
from .seats import EnvError

log = logging.getLogger("farm")


async def play(seat, session, max_turns):
    rows, obs = [], seat.env.reset()
    for _ in range(max_turns):
        action = await session.extend(obs, 128)
        obs, reward, done = seat.env.step(action)
        if obs is None:
            raise EnvError(f"seat {seat.index} lost its process")
        rows.append((action, reward))
        if done:
            break
    return rows


async def collector(pool, table, replay, stop, max_turns=8):
    """Plays episodes until stop is set. Every episode fills one chunk."""
    while not stop.is_set():
        try:
            seat = await pool.sit()  # leak: EngineFull or EnvError in the episode marks the seat or sleeps, but nobody stands up
        except EnvError as e:
            log.error("%s", e)
            continue
        try:
            table.start(seat.index)
            rows = await play(seat, table.current(seat.index), max_turns)  # clean: near miss, the table owns it, end() or end_all() closes it
            if not any(r for _, r in rows):
                table.start(seat.index)
                rows = await play(seat, table.current(seat.index), 2 * max_turns)  # clean: the table owns it as above
        except EngineFull:
            await asyncio.sleep(1.0)
            continue
        except EnvError:
            seat.broken = True
            continue
        table.end(seat.index)
        pool.stand(seat)
        store(replay, rows, table.engine.version)


def store(replay, rows, version, min_rows=2):
    try:
        chunk = replay.reserve()  # leak: episodes that are too short return without commit or abort
    except StaleChunk as e:
        log.debug("episode not stored: %s", e)
        return False
    if len(rows) < min_rows:
        return False
    replay.commit(chunk, rows, version)
    return True


async def evaluate(pool, table, games):
    """Mean reward over a number of episodes; a broken environment counts as zero."""
    total = 0.0
    for _ in range(games):
        try:
            async with pool.seated() as seat:  # clean: async with
                try:
                    session = table.current(seat.index)  # clean: stays in the table, the finally ends it
                    rows = await play(seat, session, 16)
                finally:
                    table.end(seat.index)
        except (EnvError, EngineFull) as e:
            log.info("evaluation game lost: %s", e)
            continue
        total += sum(r for _, r in rows)
    return total / max(1, games)


def import_episodes(replay, episodes, version):
    """Fills the ring from a file of recorded episodes, before the collectors start."""
    n = 0
    for rows in episodes:
        try:
            chunk = replay.reserve()  # clean: near miss, commit or abort on each way
        except StaleChunk:
            break
        if not all(len(r) == 2 for r in rows):
            replay.abort(chunk)
            continue
        replay.commit(chunk, list(rows), version)
        n += 1
    return n


class Learner(threading.Thread):
    def __init__(self, replay, engine, update, k=8):
        super().__init__(daemon=True)
        self.replay, self.engine, self.update, self.k = replay, engine, update, k
        self.stop = threading.Event()
        self.skipped = 0

    def run(self):
        while not self.stop.is_set():
            try:
                chunks = self.replay.sample(self.k, self.engine.version)  # clean: near miss, the finally unpins what came back
            except StaleChunk:
                self.skipped += 1
                continue
            try:
                if not chunks:
                    time.sleep(0.5)
                    continue
                self.update([r for c in chunks for r in c.rows])
                self.engine.version += 1
            finally:
                for c in chunks:
                    self.replay.unpin(c)

    def show(self):
        c = self.replay.newest()  # clean: unpinned below
        if c is not None:
            print(c.index, c.version, len(c.rows))
            self.replay.unpin(c)


async def main(pool, engine, replay, update, seconds):
    stop = asyncio.Event()
    table = SessionTable(engine)
    learner = Learner(replay, engine, update)
    learner.start()
    tasks = [asyncio.create_task(collector(pool, table, replay, stop)) for _ in range(pool.n)]
    await asyncio.sleep(seconds)
    stop.set()
    learner.stop.set()
    await asyncio.gather(*tasks)
    table.end_all()
    return await evaluate(pool, table, 10)
