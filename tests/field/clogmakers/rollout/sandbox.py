import asyncio
import logging

logger = logging.getLogger(__name__)


class ToolError(Exception):
    pass


class Sandbox:
    def __init__(self, fleet, image, handle):
        self.fleet = fleet
        self.image = image
        self.handle = handle
        self.calls = 0

    async def call(self, command, timeout=30):
        self.calls += 1
        code, out = await self.fleet.runtime.exec(self.handle, command, timeout)
        if code < 0:
            raise ToolError(out)
        return out

    async def stop(self):
        if self.handle is not None:
            handle, self.handle = self.handle, None
            await self.fleet._remove(handle)


class Fleet:
    """Containers, at most `limit` at a time."""

    def __init__(self, runtime, limit):
        self.runtime = runtime
        self._permits = asyncio.Semaphore(limit)
        self.running = 0

    async def start(self, image):
        await self._permits.acquire()  # clean: near miss, released when there is no container, else by _remove
        try:
            handle = await self.runtime.create(image)  # clean: it belongs to the sandbox that is returned
        except BaseException:
            self._permits.release()
            raise
        self.running += 1
        return Sandbox(self, image, handle)

    async def _remove(self, handle):
        try:
            await self.runtime.remove(handle)
        finally:
            self.running -= 1
            self._permits.release()


class Toolbox:
    """The tools of one episode, with a sandbox for those that need one."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.sandbox = None

    async def use_image(self, image):
        if self.sandbox is not None and self.sandbox.image == image:
            return
        self.sandbox = await self.fleet.start(image)  # leak: a change of the image rebinds the sandbox that is still running

    async def run(self, tool, args):
        if tool == "python":
            await self.use_image("python:3.11")
            return await self.sandbox.call(["python", "-c", args])
        if tool == "shell":
            await self.use_image(args.get("image", "debian:12"))
            return await self.sandbox.call(["sh", "-c", args["command"]])
        raise ToolError(f"no tool {tool}")

    async def close(self):
        if self.sandbox is not None:
            await self.sandbox.stop()
            self.sandbox = None
