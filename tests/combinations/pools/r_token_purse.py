# take: await spend(n)
# give: earn(n)
# gets: answer
import asyncio


def _purse(total, patience):
    purse = total
    topped_up = asyncio.Event()

    async def pay(n):
        """True once n tokens of generation budget are ours, False when patience runs out."""
        nonlocal purse
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while purse < n:
            topped_up.clear()
            try:
                await asyncio.wait_for(topped_up.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return False
        purse -= n
        return True

    def put_back(n):
        nonlocal purse
        purse = min(total, purse + n)
        topped_up.set()

    return pay, put_back


spend, earn = _purse(total=131072, patience=5.0)
