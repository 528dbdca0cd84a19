"""Media decoder handles: a depot for the process, and magazines that are refilled from it."""
import atexit
import functools
import threading
import time
from collections import OrderedDict
from concurrent.futures import as_completed
from weakref import WeakValueDictionary


class DecoderDepot:
    def __init__(self, make, count):
        self._lock = threading.Lock()
        self._idle = [make() for _ in range(count)]

    def draw(self, k):
        """Up to k handles, fewer when there are not as many."""
        with self._lock:
            handles, self._idle = self._idle[:k], self._idle[k:]
        return handles

    def absorb(self, handles):
        with self._lock:
            self._idle.extend(handles)


class Magazine:
    def __init__(self, depot, size=8):
        self.depot = depot
        self.size = size
        self._rounds = []

    def get(self):
        if not self._rounds:
            self._rounds = self.depot.draw(self.size)  # clean: an empty list is replaced; put() returns what is too many and flush() the rest
        if not self._rounds:
            raise LookupError("no decoder")
        return self._rounds.pop()

    def put(self, handle):
        self._rounds.append(handle)
        if len(self._rounds) > 2 * self.size:
            self.depot.absorb(self._rounds[self.size:])
            del self._rounds[self.size:]

    def flush(self):
        self.depot.absorb(self._rounds)
        self._rounds = []


class ReaderBusy(RuntimeError):
    pass


def make_reader(magazine, codec_of):
    @functools.lru_cache(maxsize=4)
    def decoder_for(codec):
        handle = magazine.get()  # leak: a fifth codec pushes the least recently used handle out of the cache
        handle.configure(codec)
        return handle

    def read(path):
        return decoder_for(codec_of(path)).decode(path)

    return read


class CodecCache:
    def __init__(self, magazine, limit):
        self.magazine = magazine
        self.limit = limit
        self.handles = OrderedDict()

    def decoder_for(self, codec):
        if codec not in self.handles:
            if len(self.handles) >= self.limit:
                self._retire(*self.handles.popitem(last=False))
            self.handles[codec] = self.magazine.get()  # clean: the handle that is pushed out goes through _retire(), which puts it back
        self.handles.move_to_end(codec)
        return self.handles[codec]

    def _retire(self, codec, handle):
        handle.reset(codec)
        self.magazine.put(handle)

    def close(self):
        while self.handles:
            self._retire(*self.handles.popitem())


def decode_clip(depot, packets):
    spare = depot.draw(4)  # leak: a clip with fewer than four streams leaves handles in spare, and used alone is absorbed
    used = {}
    try:
        for packet in packets:
            if packet.stream not in used and spare:
                used[packet.stream] = spare.pop()
            if packet.stream in used:
                used[packet.stream].feed(packet)
        return {stream: handle.frames() for stream, handle in used.items()}
    finally:
        depot.absorb(used.values())


def first_decodable(depot, executor, paths):
    def attempt(path):
        handles = depot.draw(1)  # leak: the loop below ends at the first match, and the handles in the results of the other futures are not fetched
        return path, handles, bool(handles) and handles[0].probe(path)

    futures = [executor.submit(attempt, path) for path in paths]
    found = None
    for future in as_completed(futures):
        path, handles, matches = future.result()
        depot.absorb(handles)
        if matches:
            found = path
            break
    return found


class ThumbnailView:
    def __init__(self, magazine):
        self.magazine = magazine

    def _open(self, path):
        handle = self.magazine.get()  # leak: preload() calls this for the side effect and ignores the handle that comes back
        handle.open(path)
        return handle

    def show(self, path):
        handle = self._open(path)
        try:
            return handle.frame(0)
        finally:
            self.magazine.put(handle)

    def preload(self, paths):
        for path in paths:
            self._open(path)


def timed(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        fn(*args, **kwargs)
        wrapper.seconds += time.perf_counter() - start

    wrapper.seconds = 0.0
    return wrapper


@timed
def checkout_decoder(magazine, codec):
    handle = magazine.get()  # leak: the wrapper does not pass the return value on, so the caller gets None
    handle.configure(codec)
    return handle


def decode_keyframe(magazine, path, codec):
    handle = checkout_decoder(magazine, codec)
    if handle is None:
        return None
    try:
        return handle.keyframe(path)
    finally:
        magazine.put(handle)


class AudioReader:
    closed = False

    def __init__(self, magazine, path):
        self.magazine = magazine
        self.handle = magazine.get()  # leak: close() sets the flag on the class, and the close() of each other reader returns at once
        self.path = path

    def read(self, start, stop):
        return self.handle.decode_range(self.path, start, stop)

    def close(self):
        cls = type(self)
        if cls.closed:
            return
        cls.closed = True
        self.magazine.put(self.handle)


class VideoReader:
    def __init__(self, magazine, path):
        self.magazine = magazine
        self.handle = magazine.get()  # leak: a close() that raises ReaderBusy has set closed already, and the next close() does nothing
        self.path = path
        self.closed = False
        self.views = 0

    def view(self, index):
        self.views += 1
        return self.handle.frame(self.path, index)

    def unview(self):
        self.views -= 1

    def close(self):
        if self.closed:
            return
        self.closed = True
        if self.views:
            raise ReaderBusy(self.path)
        self.magazine.put(self.handle)


class OpenClip:
    def __init__(self, name, handle):
        self.name = name
        self.handle = handle


class ClipRegistry:
    def __init__(self, magazine):
        self.magazine = magazine
        self.clips = WeakValueDictionary()

    def open(self, name):
        clip = self.clips.get(name)
        if clip is None:
            clip = OpenClip(name, self.magazine.get())  # leak: the registry holds clips weakly, one that its user drops is gone before close_all()
            self.clips[name] = clip
        return clip

    def close_all(self):
        for clip in list(self.clips.values()):
            self.magazine.put(clip.handle)
        self.clips.clear()


def _borrow(magazine, codec):
    handle = magazine.get()  # clean: an unsupported codec puts it back, else the partial does so when probe_duration() calls it
    if not handle.supports(codec):
        magazine.put(handle)
        raise ValueError(codec)
    return handle, functools.partial(magazine.put, handle)


def probe_duration(magazine, path, codec):
    handle, done = _borrow(magazine, codec)
    try:
        return handle.duration(path)
    finally:
        done()


class LiveDecoder:
    def __init__(self, magazine):
        self.magazine = magazine
        self.handles = {}
        self.actions = {"start": self._start, "data": self._data, "end": self._end}

    def on_message(self, message):
        self.actions[message.kind](message)

    def _start(self, message):
        if message.channel not in self.handles:
            self.handles[message.channel] = self.magazine.get()  # clean: the end message reaches _end() through the table of actions

    def _data(self, message):
        self.handles[message.channel].feed(message.payload)

    def _end(self, message):
        handle = self.handles.pop(message.channel, None)
        if handle is not None:
            self.magazine.put(handle)


def install_default_decoder(magazine, registry):
    handle = magazine.get()  # clean: the exit hooks put it back and flush the magazine after that
    atexit.register(magazine.flush)
    atexit.register(magazine.put, handle)
    registry.default = handle
    registry.installed = True
