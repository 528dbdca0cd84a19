import asyncio
import time
from dataclasses import dataclass


class GpuTokens:
    def __init__(self, count):
        self._sem = asyncio.BoundedSemaphore(count)

    async def take(self):
        await self._sem.acquire()
        return time.monotonic()

    def put(self, token):
        self._sem.release()


@dataclass
class Request:
    rid: str
    prompt: str
    token: float = 0.0
    kept: bool = False
    text: str = ""


class Frontend:
    def __init__(self, tokens, model):
        self.tokens = tokens
        self.model = model
        self.results = asyncio.Queue()
        self.streams = {}
        self.cached = {}

    async def handle(self, request):
        if request.prompt in self.cached:
            return self.cached[request.prompt]
        request.token = await self.tokens.take()  # clean: deliver puts it back for every result
        request.text = await self.model(request.prompt)
        await self.results.put(request)
        return request.text

    async def deliver(self, send):
        while not self.results.empty():
            request = self.results.get_nowait()
            await send(request.rid, request.text)
            self.cached[request.prompt] = request.text
            self.tokens.put(request.token)

    async def open_stream(self, request):
        if request.rid in self.streams:
            return False
        request.token = await self.tokens.take()  # leak: close_stream keeps it for kept requests
        self.streams[request.rid] = request
        return True

    async def feed(self, rid, part):
        request = self.streams[rid]
        request.text += await self.model(request.prompt + part)
        request.kept = len(request.text) > 1000
        return request.text

    def close_stream(self, rid):
        request = self.streams.pop(rid, None)
        if request is None:
            return ""
        if not request.kept:
            self.tokens.put(request.token)
        return request.text


class Evaluator:
    def __init__(self, tokens):
        self.tokens = tokens
        self.running = []

    async def launch(self, prompts, model):
        for prompt in prompts:
            token = await self.tokens.take()  # leak: collect puts back those with an answer only
            self.running.append((token, await model(prompt)))

    def collect(self):
        answers = []
        for token, answer in self.running:
            if not answer:
                continue
            answers.append(answer)
            self.tokens.put(token)
        self.running.clear()
        return answers
