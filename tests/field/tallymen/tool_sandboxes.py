"""Sandboxes in which agents run their tools."""
import asyncio
import contextlib
import logging
import shlex
from collections import defaultdict

log = logging.getLogger("sandboxes")


class BootError(Exception):
    pass


class SandboxDied(Exception):
    pass


class NoMount(Exception):
    pass


class Sandbox:
    def __init__(self, driver, image, handle):
        self.driver = driver
        self.image = image
        self.handle = handle
        self.dirty = False
        self.runs = 0

    async def healthy(self):
        return await self.driver.ping(self.handle)

    async def setup(self):
        return await self.driver.run(self.handle, "setup.sh") == 0

    async def exec(self, cmd):
        self.runs += 1
        self.dirty = self.dirty or "install" in cmd
        code, out = await self.driver.exec(self.handle, shlex.split(cmd))
        if code is None:
            raise SandboxDied(self.image)
        return out

    async def destroy(self):
        await self.driver.remove(self.handle)


class SandboxPool:
    def __init__(self, driver, boots=4, keep=8):
        self.driver = driver
        self.keep = keep
        self._boots = asyncio.Semaphore(boots)
        self._idle = defaultdict(list)
        self.broken = 0

    async def checkout(self, image):
        while self._idle[image]:
            sb = self._idle[image].pop()  # leak: an unhealthy one is counted and not destroyed
            if await sb.healthy():
                return sb
            self.broken += 1
        return await self._boot(image)  # clean: handed to the caller

    async def _boot(self, image):
        await self._boots.acquire()  # clean: released in the finally
        try:
            sb = await self.driver.create(image)  # leak: when the setup fails BootError is raised and the sandbox runs on
            if not await sb.setup():
                raise BootError(image)
            return sb
        finally:
            self._boots.release()

    async def checkin(self, sb):
        if sb.dirty or len(self._idle[sb.image]) >= self.keep:
            await sb.destroy()
        else:
            self._idle[sb.image].append(sb)

    @contextlib.asynccontextmanager
    async def use(self, image):
        sb = await self.checkout(image)  # clean: checked in by the finally
        try:
            yield sb
        finally:
            await self.checkin(sb)

    async def close(self):
        for sbs in self._idle.values():
            while sbs:
                await sbs.pop().destroy()  # clean: destroyed on the spot


class Mounts:
    """Mount points on this machine."""

    def __init__(self, paths):
        self._free = list(paths)

    def mount(self, sb):
        if not self._free:
            raise NoMount(sb.image)
        path = self._free.pop()  # clean: handed to the caller
        sb.driver.bind(sb.handle, path)
        return path

    def unmount(self, sb, path):
        sb.driver.unbind(sb.handle, path)
        self._free.append(path)


class ToolRunner:
    def __init__(self, pool, mounts):
        self.pool = pool
        self.mounts = mounts
        self._sessions = {}
        self._session_lock = asyncio.Lock()
        self._background = set()

    async def run_tool(self, image, cmd, timeout=30.0):
        try:
            sb = await self.pool.checkout(image)  # leak: after the timeout an error is returned and the sandbox forgotten
        except BootError as exc:
            return {"error": f"boot: {exc}"}
        try:
            out = await asyncio.wait_for(sb.exec(cmd), timeout)
        except asyncio.TimeoutError:
            sb.dirty = True
            return {"error": "timeout"}
        except SandboxDied:
            await sb.destroy()
            return {"error": "died"}
        await self.pool.checkin(sb)
        return {"output": out}

    async def quick(self, image, cmd):
        async with self.pool.use(image) as sb:  # clean: SandboxDied is caught inside the block
            try:
                return await sb.exec(cmd)
            except SandboxDied:
                sb.dirty = True
                return None

    # sessions keep a sandbox over several calls

    async def open_session(self, sid, image):
        async with self._session_lock:
            if sid in self._sessions:
                return False
            self._sessions[sid] = await self.pool.checkout(image)  # leak: end_session() checks in clean sandboxes only
            return True

    async def in_session(self, sid, cmd):
        return await self._sessions[sid].exec(cmd)

    async def end_session(self, sid):
        sb = self._sessions.pop(sid, None)
        if sb is None:
            return
        if not sb.dirty:
            await self.pool.checkin(sb)

    # several

    async def matrix(self, images, cmd):
        sbs = [await self.pool.checkout(i) for i in images]  # leak: BootError for a later image loses the earlier ones
        try:
            outs = await asyncio.gather(*(sb.exec(cmd) for sb in sbs), return_exceptions=True)
            return dict(zip(images, outs))
        finally:
            for sb in sbs:
                await self.pool.checkin(sb)

    async def _racer(self, image, cmd):
        sb = await self.pool.checkout(image)  # clean: near miss, a cancelled racer passes through the finally, and the checkin there is shielded
        try:
            return await sb.exec(cmd)
        finally:
            sb.dirty = True
            await asyncio.shield(self.pool.checkin(sb))

    async def race(self, image, cmds):
        tasks = [asyncio.create_task(self._racer(image, c)) for c in cmds]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for t in pending:
            t.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for t in done:
            if t.exception() is None:
                return t.result()
        return None

    async def stubborn(self, image, cmd, tries=3):
        sb = None
        try:
            for attempt in range(tries):
                if sb is None:
                    sb = await self.pool.checkout(image)  # clean: near miss, only after the dead one was destroyed
                try:
                    return await sb.exec(cmd)
                except SandboxDied:
                    log.warning("attempt %d: %s died", attempt, image)
                    dead, sb = sb, None
                    await dead.destroy()
            return None
        finally:
            if sb is not None:
                await self.pool.checkin(sb)

    async def upload(self, image, files):
        sb = await self.pool.checkout(image)  # leak: mount() raises NoMount outside of the try
        path = self.mounts.mount(sb)  # clean: unmounted in the finally
        try:
            for name, data in files.items():
                with open(f"{path}/{name}", "wb") as fh:  # clean: closed with the block
                    fh.write(data)
            return await sb.exec("ls /mnt")
        finally:
            self.mounts.unmount(sb, path)
            await self.pool.checkin(sb)

    async def detach(self, image, cmd):
        sb = await self.pool.checkout(image)  # clean: near miss, the task checks it in, and the task is kept
        task = asyncio.create_task(self._finish(sb, cmd))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _finish(self, sb, cmd):
        try:
            await sb.exec(cmd)
        except SandboxDied:
            sb.dirty = True
        finally:
            await self.pool.checkin(sb)

    async def shutdown(self):
        if self._background:
            await asyncio.wait(self._background)
        for sid in list(self._sessions):
            await self.end_session(sid)
        await self.pool.close()
