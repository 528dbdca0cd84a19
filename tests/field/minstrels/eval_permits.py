"""Evaluation harness: many tasks against rate-limited model endpoints.

Two things are scarce. A Permit of an endpoint allows one request in flight; a token grant is a share of the
tokens-per-minute budget and has to be settled with the number of tokens that were really used.
"""
import asyncio
import contextlib
import json
import logging

log = logging.getLogger("eval")


class Overloaded(Exception):
    pass


class BudgetExceeded(Exception):
    pass


class Permit:
    def __init__(self, gate, number):
        self.gate, self.number = gate, number

    def done(self):
        self.gate._return(self)


class Gate:
    def __init__(self, name, width):
        self.name = name
        self._free = list(range(width))
        self._waiters = []

    async def enter(self):
        while not self._free:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        return Permit(self, self._free.pop())  # clean: handed to the caller

    def enter_now(self):
        if not self._free:
            return None
        return Permit(self, self._free.pop())  # clean: handed to the caller

    def _return(self, permit):
        self._free.append(permit.number)
        while self._waiters:
            fut = self._waiters.pop(0)
            if not fut.done():
                fut.set_result(None)
                break


class TokenBudget:
    """Grants are plain integers; settle() must be called once for each."""

    def __init__(self, per_minute):
        self.per_minute = self.left = per_minute
        self.open = 0

    def grant(self, tokens):
        if tokens > self.per_minute:
            raise BudgetExceeded("%d tokens in one request" % tokens)
        if tokens > self.left:
            return 0
        self.left -= tokens
        self.open += 1
        return tokens

    def settle(self, granted, used):
        self.open -= 1
        self.left = min(self.per_minute, self.left + granted - used)


class Endpoint:
    def __init__(self, name, send, width, per_minute):
        self.name, self.send = name, send
        self.gate = Gate(name, width)
        self.budget = TokenBudget(per_minute)

    async def ask(self, prompt, max_tokens):
        """One request. Overloaded where the server says 429, None where the budget is used up."""
        permit = await self.gate.enter()  # clean: near miss, the finally covers the return None too
        try:
            granted = self.budget.grant(max_tokens)  # leak: Overloaded leaves without settle
            if not granted:
                return None
            status, body = await self.send(prompt, max_tokens)
            if status == 429:
                raise Overloaded(self.name)
            self.budget.settle(granted, body["used"])
            return body["text"]
        finally:
            permit.done()


async def ask_until(endpoint, prompt, max_tokens, tries):
    for k in range(tries):
        try:
            text = await endpoint.ask(prompt, max_tokens)
            if text is not None:
                return text
        except Overloaded:
            log.debug("attempt %d turned away", k)
        await asyncio.sleep(1.5 ** k)
    return ""


class StreamingAnswer:
    """Holds a permit as long as the chunks come. aclose() must be awaited."""
    def __init__(self, permit, chunks):
        self.permit, self.chunks, self.text = permit, chunks, []

    async def read(self, limit):
        async for c in self.chunks:
            self.text.append(c)
            if sum(map(len, self.text)) > limit:
                break
        return "".join(self.text)

    async def aclose(self):
        if self.permit is not None:
            self.permit.done()
            self.permit = None
        await self.chunks.aclose()


async def open_stream(endpoint, prompt, start):
    permit = endpoint.gate.enter_now()  # clean: near miss, moves into StreamingAnswer, given back here when start fails
    if permit is None:
        raise Overloaded(endpoint.name)
    try:
        chunks = await start(prompt)  # clean: moves into StreamingAnswer, which closes it in aclose
    except ConnectionError:
        permit.done()
        raise
    return StreamingAnswer(permit, chunks)


async def first_sentence(endpoint, prompt, start):
    try:
        ans = await open_stream(endpoint, prompt, start)  # leak: an answer without a full stop returns before aclose
    except (Overloaded, ConnectionError) as e:
        log.debug("no stream: %s", e)
        return None
    text = await ans.read(400)
    if "." not in text:
        return None
    await ans.aclose()
    return text.split(".")[0]


async def whole_answer(endpoint, prompt, start, limit=10000):
    async with contextlib.AsyncExitStack() as stack:
        ans = await open_stream(endpoint, prompt, start)  # clean: near miss, aclose is pushed on the stack before anything else
        stack.push_async_callback(ans.aclose)
        return await ans.read(limit)


class Task:
    def __init__(self, name, rows, scorer):
        self.name, self.rows, self.scorer, self.results = name, rows, scorer, {}


class Runner:
    def __init__(self, endpoint, out_path, timeout_s=120.0):
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self.out = open(out_path, "a")  # clean: kept on self, closed by the finally of evaluate()
        self.reserved, self.dropped = [], 0

    def reserve(self, n):
        """Permits for the interactive probes, so that the batch does not starve them."""
        for _ in range(n):
            p = self.endpoint.gate.enter_now()  # clean: near miss, kept in reserved, each one is used up by probe or unreserve
            if p is None:
                break
            self.reserved.append(p)
        return len(self.reserved)

    def unreserve(self):
        while self.reserved:
            self.reserved.pop().done()

    async def probe(self, prompt):
        permit = self.reserved.pop() if self.reserved else None
        if permit is None:
            permit = await self.endpoint.gate.enter()  # clean: near miss, done() in the finally whichever branch it came from
        try:
            status, body = await self.endpoint.send(prompt, 16)
            return status == 200 and bool(body["text"])
        finally:
            permit.done()

    async def row(self, task, i, row):
        text = await ask_until(self.endpoint, row["prompt"], row.get("max_tokens", 256), tries=5)
        task.results[i] = task.scorer(text, row)
        self.out.write(json.dumps({"task": task.name, "row": i, "text": text}) + "\n")

    async def long_row(self, task, i, row):
        """Rows that take two requests under one permit: a plan, then the answer."""
        permit = await self.endpoint.gate.enter()  # leak: wait_for in run_task cancels this without a finally
        _, plan = await self.endpoint.send(row["prompt"], 512)
        _, body = await self.endpoint.send(row["prompt"] + plan["text"], 512)
        permit.done()
        task.results[i] = task.scorer(body["text"], row)

    async def run_task(self, task):
        async def one(i, row):
            work = self.long_row if row.get("plan") else self.row
            try:
                await asyncio.wait_for(work(task, i, row), self.timeout_s)
            except asyncio.TimeoutError:
                self.dropped += 1
        await asyncio.gather(*(one(i, r) for i, r in enumerate(task.rows)))
        return sum(task.results.values()) / max(1, len(task.results))


async def calibrate(endpoint, prompts):
    """Tokens per answer, measured under a grant of a tenth of the minute."""
    share = endpoint.budget.per_minute // 10
    granted = endpoint.budget.grant(share)  # leak: a bad status breaks out and returns with the grant open
    if not granted:
        return None
    used = []
    for p in prompts:
        status, body = await endpoint.send(p, 64)
        if status != 200:
            break
        used.append(body["used"])
    else:
        endpoint.budget.settle(granted, sum(used))
    return sum(used) / max(1, len(used))


async def spread(endpoints, prompt):
    """The same prompt to every endpoint that has room right now."""
    held = {}
    for ep in endpoints:
        p = ep.gate.enter_now()  # leak: endpoints of the same name overwrite each other's entry
        if p is not None:
            held[ep.name] = (ep, p)
    try:
        return await asyncio.gather(*(ep.send(prompt, 128) for ep, _ in held.values()))
    finally:
        for _, p in held.values():
            p.done()


async def evaluate(endpoint, tasks, out_path):
    runner = Runner(endpoint, out_path)  # clean: its file is closed in finally
    try:
        runner.reserve(2)
        await runner.probe("ping")
        return {t.name: await runner.run_task(t) for t in tasks}
    finally:
        runner.unreserve()
        runner.out.close()
