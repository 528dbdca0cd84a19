"""Permits for the judge endpoints (requests and tokens), functional style.

A grant is a tuple (budget name, amount). Whoever holds a grant hands it to
give() when the endpoint has answered.
"""
import asyncio
import contextlib
import functools
import logging
import re
import time

log = logging.getLogger("judge.budget")

_left = {"requests": 64, "tokens": 400_000, "embeddings": 128}
_conds = {}
_spent = {}


class Exhausted(Exception):
    pass


class RateLimited(Exception):
    def __init__(self, retry_after):
        super().__init__(f"retry after {retry_after}s")
        self.retry_after = retry_after


class BadVerdict(ValueError):
    pass


def _cond(name):
    if name not in _conds:
        _conds[name] = asyncio.Condition()
    return _conds[name]


async def take(name, n=1):
    cond = _cond(name)
    async with cond:
        await cond.wait_for(lambda: _left[name] >= n)
        _left[name] -= n  # clean: the grant is returned to the caller
    _spent[name] = _spent.get(name, 0) + n
    return (name, n)


async def take_now(name, n=1):
    async with _cond(name):
        _left[name] -= n  # leak: Exhausted is raised without adding the amount back
        if _left[name] < 0:
            raise Exhausted(f"{name}: {n}")
    return (name, n)


async def give(grant):
    name, n = grant
    cond = _cond(name)
    async with cond:
        _left[name] += n
        cond.notify_all()


@contextlib.asynccontextmanager
async def permit(name, n=1):
    grant = await take(name, n)  # clean: given back in the finally
    t0 = time.monotonic()
    try:
        yield grant
    finally:
        await give(grant)
        log.debug("%s held %.3fs", name, time.monotonic() - t0)


def limited(name):
    def deco(fn):
        @functools.wraps(fn)
        async def inner(*args, **kw):
            async with permit(name):  # clean: context manager
                return await fn(*args, **kw)
        return inner
    return deco


def estimate(prompt):
    return 64 + len(prompt) // 3


def parse(text):
    m = re.search(r"\[\[(\d+)\]\]", text)
    if m is None:
        raise BadVerdict(text[:80])
    return int(m.group(1)) / 10


@limited("embeddings")
async def embed(client, text):
    return await client.embed(text)


async def judge(client, prompt):
    grant = await take("requests")  # clean: given back in the finally
    try:
        return parse(await client.complete(prompt))
    finally:
        await give(grant)


async def judge_or_zero(client, prompt):
    """An unreadable verdict counts as zero."""
    grant = await take("requests")  # leak: BadVerdict is caught and returns before give()
    try:
        score = parse(await client.complete(prompt))
    except BadVerdict as e:
        log.warning("unreadable verdict: %s", e)
        return 0.0
    await give(grant)
    return score


async def _slow_call(client, prompt):
    grant = await take("tokens", estimate(prompt))  # leak: wait_for() in judge_deadline cancels the call before give()
    text = await client.complete(prompt)
    await give(grant)
    return text


async def judge_deadline(client, prompt, deadline=20.0):
    try:
        text = await asyncio.wait_for(_slow_call(client, prompt), deadline)
    except asyncio.TimeoutError:
        return None
    try:
        return parse(text)
    except BadVerdict:
        return None


async def judge_two_budgets(client, prompt):
    tokens = await take("tokens", estimate(prompt))  # leak: take_now() may raise Exhausted while the tokens are held
    request = await take_now("requests")  # clean: given back in the finally
    try:
        return parse(await client.complete(prompt))
    finally:
        await give(request)
        await give(tokens)


async def judge_topped_up(client, prompt):
    grants = []
    try:
        grants.append(await take("tokens", estimate(prompt)))  # clean: near miss, the list is given back in the finally
        draft = await client.complete(prompt)
        if len(draft) > 2000:
            grants.append(await take("tokens", len(draft) // 3))  # clean: the list is given back in the finally
            draft = await client.complete(prompt + "\n\nSummarise and score:\n" + draft)
        return parse(draft)
    finally:
        for g in reversed(grants):
            await give(g)


async def judge_backoff(client, prompt, tries=5):
    for i in range(tries):
        grant = await take("requests")  # clean: near miss, the limited branch gives before it sleeps
        try:
            text = await client.complete(prompt)
        except RateLimited as e:
            await give(grant)
            await asyncio.sleep(e.retry_after * (1 + i))
            continue
        await give(grant)
        return parse(text)
    raise Exhausted("judge_backoff")


async def rubric_backoff(client, prompt, rubric):
    scores = {}
    pending = list(rubric)
    while pending:
        item = pending.pop()
        grant = await take("requests")  # clean: given back before the item is tried again
        try:
            text = await client.complete(f"{prompt}\n\nCriterion: {item}")
        except RateLimited as e:
            await give(grant)
            pending.append(item)
            await asyncio.sleep(e.retry_after)
            continue
        await give(grant)
        with contextlib.suppress(BadVerdict):
            scores[item] = parse(text)
    return scores


async def stream(client, prompt):
    grant = await take("requests")  # leak: first_number() breaks out of the generator before the last line
    async for piece in client.stream(prompt):
        yield piece
    await give(grant)


async def stream_safely(client, prompt):
    grant = await take("requests")  # clean: near miss, aclosing() in the reader runs the finally
    try:
        async for piece in client.stream(prompt):
            yield piece
    finally:
        await give(grant)


async def first_number(client, prompt):
    text = ""
    async for piece in stream(client, prompt):
        text += piece
        if "]]" in text:
            break
    return parse(text)


async def first_line(client, prompt):
    text = ""
    async with contextlib.aclosing(stream_safely(client, prompt)) as pieces:
        async for piece in pieces:
            text += piece
            if "\n" in text:
                break
    return text.partition("\n")[0]


async def judge_group(client, prompts):
    """All answers of one GRPO group; failures are left out of the mean."""
    grants = [await take("requests") for _ in prompts]  # leak: grants of failed calls are skipped
    results = await asyncio.gather(*(client.complete(p) for p in prompts), return_exceptions=True)
    scores = []
    for grant, res in zip(grants, results):
        if isinstance(res, Exception):
            log.info("judge failed: %r", res)
            continue
        await give(grant)
        try:
            scores.append(parse(res))
        except BadVerdict:
            pass
    return sum(scores) / len(scores) if scores else None


def spent():
    return dict(_spent)
