# take: await P.dial(key)
# give: P.hang_up(X)
# gets: value
# type: HttpSwitchboard
import abc
import asyncio
from collections import defaultdict, deque


class Line:
    def __init__(self, host, reader, writer):
        self.host, self.reader, self.writer = host, reader, writer
        self.calls = 0


class Switchboard(abc.ABC):
    max_idle = 16

    def __init__(self):
        self._quiet = defaultdict(deque)

    @abc.abstractmethod
    async def _connect(self, host) -> Line: ...

    async def dial(self, host):
        lines = self._quiet[host]
        while lines:
            line = lines.pop()
            if not line.writer.is_closing():
                return line
        return await self._connect(host)

    def hang_up(self, line):
        line.calls += 1
        lines = self._quiet[line.host]
        if line.writer.is_closing():
            return
        if len(lines) >= self.max_idle:
            line.writer.close()
        else:
            lines.append(line)


class HttpSwitchboard(Switchboard):
    async def _connect(self, host):
        name, _, port = host.partition(":")
        return Line(host, *await asyncio.open_connection(name, int(port or 80)))
