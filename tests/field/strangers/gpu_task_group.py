"""Structured concurrency: cards are taken for tasks and brought back when the tasks end."""
import asyncio
from dataclasses import dataclass, field


@dataclass
class Card:
    index: int
    jobs: int = 0


@dataclass
class Rack:
    cards: list[Card] = field(default_factory=list)

    def obtain_card(self) -> Card | None:
        return self.cards.pop() if self.cards else None

    def return_card(self, card: Card) -> None:
        self.cards.append(card)


async def with_card(rack: Rack, card: Card, job) -> int:
    try:
        card.jobs += 1
        return await job(card.index)
    finally:
        rack.return_card(card)


async def run_all(rack: Rack, jobs) -> list[int]:
    results = []
    pending = list(jobs)
    while pending:
        job = pending.pop()
        card = rack.obtain_card()  # clean: near miss, the awaited coroutine returns it
        if card is None:
            pending.append(job)
            await asyncio.sleep(0.01)
            continue
        results.append(await with_card(rack, card, job))
    return results


async def run_first(rack: Rack, jobs) -> int | None:
    for job in jobs:
        card = rack.obtain_card()  # leak: a job without a name is skipped with the card in hand
        if card is None:
            return None
        if not job.__name__:
            continue
        return await with_card(rack, card, job)
    return None


async def run_shielded(rack: Rack, job) -> int | None:
    card = rack.obtain_card()  # clean: near miss, cancellation is caught, the card returned, and it is raised again
    if card is None:
        return None
    try:
        result = await job(card.index)
    except asyncio.CancelledError:
        rack.return_card(card)
        raise
    except Exception:
        rack.return_card(card)
        return None
    rack.return_card(card)
    return result


async def run_cancellable(rack: Rack, job) -> int | None:
    card = rack.obtain_card()  # leak: a cancelled job answers None and keeps the card
    if card is None:
        return None
    try:
        result = await job(card.index)
    except asyncio.CancelledError:
        return None
    except Exception:
        rack.return_card(card)
        raise
    rack.return_card(card)
    return result


async def reserve(rack: Rack, n: int) -> list[Card]:
    cards: list[Card] = []
    try:
        while len(cards) < n:
            card = rack.obtain_card()  # clean: near miss, all returned when cancelled while waiting, else handed over
            if card is None:
                await asyncio.sleep(0.01)
                continue
            cards.append(card)
    except BaseException:
        for card in cards:
            rack.return_card(card)
        raise
    return cards


async def run_wide(rack: Rack, n: int, job) -> int:
    cards = await reserve(rack, n)  # clean: near miss, a list of cards, all returned in finally
    try:
        return sum(await asyncio.gather(*(job(c.index) for c in cards)))
    finally:
        for card in cards:
            rack.return_card(card)


async def run_narrow(rack: Rack, job) -> int:
    card, spare = await reserve(rack, 2)  # leak: the spare is never returned
    try:
        return await job(card.index)
    finally:
        rack.return_card(card)
