# take: await tune_in()
# give: tune_out(X)
# gets: value
"""Broadcast channels between trainer and rollout engines."""
import asyncio
from types import SimpleNamespace

_N = 4
_silent = [SimpleNamespace(no=i, version=0) for i in range(_N)]
_on_air = {}
_listeners = []


async def tune_in():
    while not _silent:
        ev = asyncio.Event()
        _listeners.append(ev)
        try:
            await ev.wait()
        finally:
            _listeners.remove(ev)
    ch = _silent.pop()
    _on_air[ch.no] = ch
    return ch


def tune_out(ch):
    del _on_air[ch.no]
    ch.version += 1
    _silent.append(ch)
    _wake()


def _wake():
    for ev in _listeners:
        ev.set()
