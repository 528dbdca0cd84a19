"""Async decode service for evaluation runs: decode slots of the engine and a budget of tokens in flight."""
import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager


class SlotRing:
    def __init__(self, count):
        self._idle = asyncio.LifoQueue()
        for i in range(count):
            self._idle.put_nowait(i)

    async def occupy(self):
        return await self._idle.get()

    def occupy_nowait(self):
        return None if self._idle.empty() else self._idle.get_nowait()

    def vacate(self, slot):
        self._idle.put_nowait(slot)

    @asynccontextmanager
    async def occupied(self):
        slot = await self.occupy()  # clean: vacated when the block ends
        try:
            yield slot
        finally:
            self.vacate(slot)


class TokenBudget:
    def __init__(self, limit):
        self.left = limit
        self._more = asyncio.Condition()

    async def spend(self, n):
        async with self._more:
            await self._more.wait_for(lambda: self.left >= n)
            self.left -= n
        return n

    async def earn(self, n):
        async with self._more:
            self.left += n
            self._more.notify_all()


class DecodeService:
    def __init__(self, engine, slots, budget, cache=None):
        self.engine = engine
        self.slots = slots
        self.budget = budget
        self.cache = {} if cache is None else cache
        self.counts = defaultdict(int)

    async def run_suite(self, suite, max_new):
        """Greedy answers of a whole suite, one task a prompt; each task ends what was taken for it."""
        answers = {}
        tasks = {}
        skipped = []

        async def decode(slot, spent, tokens):
            try:
                return await self.engine.generate(slot, tokens, spent - len(tokens))
            finally:
                self.slots.vacate(slot)
                await self.budget.earn(spent)

        for name, tokens in suite.items():
            if not tokens:
                skipped.append(name)
                continue
            key = tuple(tokens)
            if key in self.cache:
                answers[name] = self.cache[key]
                self.counts["cached"] += 1
                continue
            spent = await self.budget.spend(len(tokens) + max_new)  # clean: near miss, the task earns it back
            slot = await self.slots.occupy()  # clean: near miss, the task vacates it
            tasks[name] = (key, asyncio.create_task(decode(slot, spent, tokens)))
        for name, (key, task) in tasks.items():
            answers[name] = await task
            self.cache[key] = answers[name]
            self.counts["decoded"] += 1
        self.counts["skipped"] += len(skipped)
        return answers, skipped

    async def run_choices(self, item, choices, stop_margin=None):
        """Index of the most likely choice; the shared context is prefilled once in a slot of its own."""
        spent = await self.budget.spend(len(item) + max(map(len, choices), default=0))  # clean: near miss, both returns
        context = await self.slots.occupy()  # leak: a clear winner returns with the context slot occupied
        await self.engine.prefill(context, item)
        scores = []
        memo = {}
        for index, choice in enumerate(choices):
            if not choice:
                scores.append(float("-inf"))
                continue
            key = (tuple(item), tuple(choice))
            if key in memo:
                scores.append(memo[key])
                continue
            if len(choice) == 1:
                table = await self.engine.next_logprobs(context)
                memo[key] = table[choice[0]]
                scores.append(memo[key])
                continue
            branch = await self.slots.occupy()  # clean: vacated once the choice is scored
            await self.engine.copy_state(context, branch)
            logprobs = await self.engine.score(branch, choice)
            self.slots.vacate(branch)
            memo[key] = sum(logprobs) / len(choice)
            scores.append(memo[key])
            self.counts["scored"] += 1
            if stop_margin is None or index == 0:
                continue
            ordered = sorted(scores, reverse=True)
            if ordered[0] - ordered[1] > stop_margin:
                await self.budget.earn(spent)
                self.counts["early"] += 1
                return scores.index(ordered[0])
        await self.budget.earn(spent)
        self.slots.vacate(context)
        return max(range(len(scores)), key=scores.__getitem__) if scores else None

    async def speculate(self, tokens, max_new, draft_len=4):
        """Draft in one slot, verify in the other; returns the new tokens."""
        produced = []
        draft, target = await asyncio.gather(
            self.slots.occupy(),  # leak: the finally vacates the target's slot only
            self.slots.occupy(),  # clean: near miss, vacated in the finally
        )
        try:
            await asyncio.gather(self.engine.prefill(draft, tokens), self.engine.prefill(target, tokens))
            while len(produced) < max_new:
                want = min(draft_len, max_new - len(produced))
                granted = await self.budget.spend(want)  # clean: near miss, earned on the empty draft and at the end
                guess = await self.engine.generate(draft, tokens + produced, want)
                if not guess:
                    await self.budget.earn(granted)
                    break
                accepted = await self.engine.verify(target, guess)
                produced.extend(guess[:accepted])
                if accepted < len(guess):
                    self.counts["rejected"] += len(guess) - accepted
                    await self.engine.rewind(draft, len(guess) - accepted)
                await self.budget.earn(granted)
                if produced and produced[-1] == self.engine.eos:
                    break
        finally:
            self.slots.vacate(target)
        self.counts["speculated"] += len(produced)
        return produced

    async def best_of(self, tokens, n, max_new):
        """Sample n answers at once in as many free slots as there are; the best by score."""
        lanes = []
        while len(lanes) < n and (slot := self.slots.occupy_nowait()) is not None:  # clean: near miss, all in lanes
            lanes.append(slot)
        if not lanes:
            async with self.slots.occupied() as only:  # clean: context manager
                return await self.engine.generate(only, tokens, max_new)
        spends = [self.budget.spend(max_new) for _ in lanes]  # leak: only the answers kept earn theirs back
        amounts = await asyncio.gather(*spends)
        answers = await asyncio.gather(*(self.engine.sample(s, tokens, max_new) for s in lanes))
        for slot in lanes:
            self.slots.vacate(slot)
        kept = []
        for amount, answer in zip(amounts, answers):
            if not answer or answer[-1] != self.engine.eos:
                self.counts["cut"] += 1
                continue
            kept.append((self.engine.rank(answer), answer))
            await self.budget.earn(amount)
        if not kept:
            return None
        return max(kept, key=lambda pair: pair[0])[1]

    async def warm(self, prompts, rounds):
        """Prefill each prompt in turn, the next slot taken while the last one still works."""
        busy = None
        done = 0
        for prompt in prompts * rounds:
            slot = await self.slots.occupy()  # leak: the one held when the loop ends is never vacated
            await self.engine.prefill(slot, prompt)
            if busy is not None:
                self.slots.vacate(busy)
            busy = slot
            done += 1
            if done % 100 == 0:
                await asyncio.sleep(0)
        self.counts["warmed"] += done
        return done
