"""A weighted semaphore for coroutines, with the heavy ones served in order."""
import asyncio
from collections import deque


class Weighted:
    def __init__(self, capacity):
        self._left = capacity
        self._waiting = deque()

    async def acquire(self, weight):
        if self._left >= weight and not self._waiting:
            self._left -= weight
            return
        fut = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, fut))
        await fut

    def release(self, weight):
        self._left += weight
        while self._waiting and self._waiting[0][0] <= self._left:
            w, fut = self._waiting.popleft()
            if not fut.cancelled():
                self._left -= w
                fut.set_result(None)


class Transcoder:
    def __init__(self, gate, ffmpeg):
        self.gate = gate
        self.ffmpeg = ffmpeg

    def _weight(self, video):
        return 4 if video.height > 1080 else 1

    async def transcode(self, video):
        w = self._weight(video)
        await self.gate.acquire(w)  # clean: released in finally
        try:
            return await self.ffmpeg.run(video)
        finally:
            self.gate.release(w)

    async def poster(self, video):
        await self.gate.acquire(1)  # leak: a video without frames does not release
        frame = await self.ffmpeg.frame(video, 0)
        if frame is None:
            return None
        image = frame.to_png()
        self.gate.release(1)
        return image

    async def concat(self, videos):
        w = sum(map(self._weight, videos))
        await self.gate.acquire(w)  # clean: released before the return
        joined = await self.ffmpeg.concat(videos)
        self.gate.release(w)
        return joined


async def probe_all(gate, ffmpeg, videos):
    infos = {}
    for video in videos:
        await gate.acquire(1)  # leak: the break leaves one unit taken
        info = await ffmpeg.probe(video)
        if info is None:
            break
        infos[video] = info
        gate.release(1)
    return infos
