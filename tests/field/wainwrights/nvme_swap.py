"""Swap parameters to NVMe: aligned host buffers, file descriptors opened with O_DIRECT, and an AIO queue."""
import ctypes
import errno
import logging
import os
import threading
from contextlib import ExitStack, contextmanager
from enum import IntEnum, auto

import torch

log = logging.getLogger(__name__)
PAGE = 4096


class SwapState(IntEnum):
    GONE = auto()
    READING = auto()
    HERE = auto()
    WRITING = auto()


class SwapError(RuntimeError):
    pass


def round_up(n, to=PAGE):
    return (n + to - 1) // to * to


class AlignedBuffer:
    def __init__(self, libc, nbytes):
        self._libc = libc
        self.nbytes = round_up(nbytes)
        ptr = ctypes.c_void_p()
        rc = libc.posix_memalign(ctypes.byref(ptr), PAGE, self.nbytes)  # clean: on an error nothing was allocated
        if rc:
            raise MemoryError(os.strerror(rc))
        self.ptr = ptr

    def tensor(self, numel, dtype):
        raw = (ctypes.c_uint8 * self.nbytes).from_address(self.ptr.value)
        return torch.frombuffer(raw, dtype=dtype, count=numel)

    def destroy(self):
        if self.ptr:
            self._libc.free(self.ptr)
            self.ptr = None


class BufferManager:
    """A few aligned buffers of one size; grows to `most` on demand."""

    def __init__(self, nbytes, most):
        self._libc = ctypes.CDLL(None)
        self.nbytes = nbytes
        self.most = most
        self._made = 0
        self._idle = []
        self._cv = threading.Condition()

    def allocate(self, nbytes):
        if nbytes > self.nbytes:
            raise SwapError("%d bytes in buffers of %d" % (nbytes, self.nbytes))
        with self._cv:
            while not self._idle and self._made >= self.most:
                self._cv.wait()
            if self._idle:
                return self._idle.pop()  # clean: returned
            self._made += 1
        try:
            return AlignedBuffer(self._libc, self.nbytes)  # clean: returned
        except MemoryError:
            with self._cv:
                self._made -= 1
            raise

    def allocate_set(self, sizes):
        """One buffer for each size, in order."""
        return [self.allocate(n) for n in sizes]  # leak: a size over the limit raises SwapError and the list so far is lost

    def free(self, buf):
        with self._cv:
            self._idle.append(buf)
            self._cv.notify()

    def shrink(self):
        with self._cv:
            for buf in self._idle:
                buf.destroy()
            self._made -= len(self._idle)
            self._idle.clear()

    @contextmanager
    def temporary(self, nbytes):
        buf = self.allocate(nbytes)  # clean: finally
        try:
            yield buf
        finally:
            self.free(buf)


class AioQueue:
    """Thin wrapper over the extension.  At most `depth` requests; a request is a token until it is waited for."""

    def __init__(self, ext, depth):
        self._ext = ext
        self._room = threading.Semaphore(depth)

    def submit(self, op, fd, buf, nbytes):
        if not self._room.acquire(timeout=60.0):  # leak: a rejected submission raises SwapError without giving the room back
            raise SwapError("queue is stuck")
        token = self._ext.submit(op, fd, buf.ptr, nbytes)  # clean: returned, or an error number
        if token < 0:
            raise SwapError(os.strerror(-token))
        return token

    def wait(self, token):
        try:
            done = self._ext.wait(token)
        finally:
            self._room.release()
        return done


class Param:
    def __init__(self, name, tensor, path):
        self.name = name
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.numel = tensor.numel()
        self.nbytes = round_up(tensor.numel() * tensor.element_size())
        self.path = path
        self.state = SwapState.HERE
        self.data = tensor
        self.buf = None
        self.fd = -1
        self.token = None


class Swapper:
    def __init__(self, folder, manager, aio):
        self.folder = folder
        self.manager = manager
        self.aio = aio
        self.params = {}

    def register(self, name, tensor):
        if name in self.params:
            raise SwapError("%s registered twice" % name)
        self.params[name] = Param(name, tensor, os.path.join(self.folder, name + ".swp"))
        return self.params[name]

    # out

    def swap_out(self, p):
        if p.state is not SwapState.HERE:
            return
        if p.buf is None:
            p.buf = self.manager.allocate(p.nbytes)  # clean: finish_out() and release() give it back by p.buf
        p.buf.tensor(p.numel, p.dtype).copy_(p.data.view(-1))
        p.fd = os.open(p.path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)  # leak: finish_out() closes it only when all bytes were written
        p.token = self.aio.submit("w", p.fd, p.buf, p.nbytes)  # clean: waited for in finish_out()
        p.state = SwapState.WRITING

    def finish_out(self, p):
        if p.state is not SwapState.WRITING:
            return
        done = self.aio.wait(p.token)
        self.manager.free(p.buf)
        p.buf = p.token = None
        if done != p.nbytes:
            p.fd, p.state = -1, SwapState.HERE
            log.error("%s: %d of %d bytes written, stays in memory", p.name, done, p.nbytes)
            return
        os.close(p.fd)
        p.fd, p.data, p.state = -1, None, SwapState.GONE

    # in

    def swap_in(self, p):
        if p.state is not SwapState.GONE:
            return
        with ExitStack() as undo:
            buf = self.manager.allocate(p.nbytes)  # clean: near miss, the stack frees it unless pop_all() hands it to p
            undo.callback(self.manager.free, buf)
            fd = os.open(p.path, os.O_RDONLY | os.O_DIRECT)  # clean: the same stack
            undo.callback(os.close, fd)
            p.token = self.aio.submit("r", fd, buf, p.nbytes)  # clean: waited for in finish_in()
            p.buf, p.fd = buf, fd
            p.state = SwapState.READING
            undo.pop_all()

    def finish_in(self, p):
        if p.state is not SwapState.READING:
            return
        try:
            done = self.aio.wait(p.token)
        finally:
            os.close(p.fd)
            p.fd, p.token = -1, None
        if done != p.nbytes:
            self.manager.free(p.buf)
            p.buf, p.state = None, SwapState.GONE
            raise SwapError("%s: short read" % p.name)
        p.data = p.buf.tensor(p.numel, p.dtype).view(p.shape)
        p.state = SwapState.HERE

    def release(self, p):
        """Drop the tensor of a parameter that has not changed since it was read."""
        self.finish_in(p)
        if p.state is SwapState.HERE and p.buf is not None:
            self.manager.free(p.buf)
            p.buf, p.data, p.state = None, None, SwapState.GONE

    # several at once

    def gather(self, params, dtype):
        """Cast several parameters into one set of buffers and return a flat copy."""
        bufs = self.manager.allocate_set([p.nbytes for p in params])  # leak: a parameter that is away returns None with the set held
        for p, buf in zip(params, bufs):
            self.finish_in(p)
            if p.data is None:
                return None
            buf.tensor(p.numel, p.dtype).copy_(p.data.view(-1))
        flat = torch.cat([b.tensor(p.numel, p.dtype).to(dtype) for p, b in zip(params, bufs)])
        for buf in bufs:
            self.manager.free(buf)
        return flat

    def copy_file(self, src, dst, nbytes):
        with self.manager.temporary(nbytes) as buf:  # clean: context manager
            rfd = os.open(src, os.O_RDONLY | os.O_DIRECT)  # leak: the ENOSPC branch of the handler returns before the closes
            wfd = os.open(dst, os.O_CREAT | os.O_WRONLY, 0o600)  # leak: same, ENOSPC returns with it open
            try:
                got = os.readv(rfd, [(ctypes.c_uint8 * buf.nbytes).from_address(buf.ptr.value)])
                os.write(wfd, buf.tensor(got, torch.uint8).numpy())
            except OSError as exc:
                if exc.errno == errno.ENOSPC:
                    os.unlink(dst)
                    return False
                log.error("%s -> %s: %s", src, dst, exc)
            os.close(rfd)
            os.close(wfd)
        return True

    def verify(self, p, reference):
        fd = os.open(p.path, os.O_RDONLY)  # clean: near miss, fdopen takes it over and the with closes it
        with os.fdopen(fd, "rb") as fh:
            raw = fh.read(p.nbytes)
        return torch.equal(torch.frombuffer(bytearray(raw), dtype=p.dtype, count=p.numel), reference.view(-1))

    def close(self):
        for p in self.params.values():
            try:
                self.finish_out(p)
                self.release(p)
            except SwapError:
                log.exception("closing %s", p.name)
        self.manager.shrink()
