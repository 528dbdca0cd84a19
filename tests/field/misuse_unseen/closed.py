"""Used after they were closed or given back, views among them. In our own words after the reports named."""

import json
import mmap
import os
import socket
import tempfile
import zipfile

import numpy as np


def store_settings(path, settings, owner):
    """After amd-debug-tools PR 42: the with has closed the number, which is then asked to change hands."""
    fd, staged = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(fd, "w") as handle:
        json.dump(settings, handle)
    os.fchown(fd, owner, -1)
    os.replace(staged, path)


def store_settings_fixed(path, settings, owner):
    fd, staged = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(fd, "w") as handle:
        os.fchown(fd, owner, -1)
        json.dump(settings, handle)
    os.replace(staged, path)


def advance(input_path, output_path, days):
    """After CHEEREIO issue 15: the file of the first block is meant to be written in the second."""
    with open(input_path) as config:
        settings = json.load(config)
    settings["days"] = days
    with open(output_path, "w") as output:
        config.write(json.dumps(settings))
    return output.name


def advance_fixed(input_path, output_path, days):
    with open(input_path) as config:
        settings = json.load(config)
    settings["days"] = days
    with open(output_path, "w") as output:
        output.write(json.dumps(settings))
    return output.name


def is_zip(stream):
    """After modelscan PR 10: the test closes the file that its caller goes on reading."""
    try:
        with zipfile.ZipFile(stream):
            return True
    except zipfile.BadZipFile:
        return False
    finally:
        stream.close()


def scan(path):
    stream = open(path, "rb")
    if is_zip(stream):
        return []
    return stream.read()


def is_zip_fixed(stream):
    try:
        with zipfile.ZipFile(stream):
            return True
    except zipfile.BadZipFile:
        return False


def scan_fixed(path):
    stream = open(path, "rb")
    if is_zip_fixed(stream):
        stream.close()
        return []
    content = stream.read()
    stream.close()
    return content


def discover(address, attempts):
    """After python-broadlink PR 359: closed in the loop, so that the second attempt has no socket."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(attempts):
        connection.sendto(b"hello", address)
        try:
            return connection.recv(2048)
        except TimeoutError:
            pass
        connection.close()
    return None


def discover_fixed(address, attempts):
    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        for _ in range(attempts):
            connection.sendto(b"hello", address)
            try:
                return connection.recv(2048)
            except TimeoutError:
                continue
        return None
    finally:
        connection.close()


def discover_anew(address, attempts):
    for _ in range(attempts):
        connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        connection.sendto(b"hello", address)
        connection.close()


async def handle(request, first, second):
    """After aiopg issue 288: the second query runs on a connection that somebody else may have by then."""
    async with request.app["db"].acquire_connection() as connection:
        await first(connection)
    await second.run(connection.cursor())


async def handle_fixed(request, first, second):
    async with request.app["db"].acquire_connection() as connection:
        await first(connection)
        await second.run(connection.cursor())


class Messages:
    """After WeixinBot PR 212: the first method closes the database, the others go on with it."""

    def __init__(self, path):
        self.database = open(path, "r+")

    def remove(self, key):
        self.database.write(key)
        self.database.close()
        self.database.flush()

    def remove_fixed(self, key):
        self.database.write(key)
        self.database.flush()
        self.database.close()


class VariableFile:
    """After SciPy PR 3960: variables are arrays over a map that leaving the with unmaps."""

    def read(self, path, name):
        with open(path, "rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            variable = np.ndarray((16,), dtype=">f4", buffer=mapped)
            mapped.close()
        return {name: variable}

    def read_copy(self, path, name):
        with open(path, "rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            variable = np.ndarray((16,), dtype=">f4", buffer=mapped).copy()
            mapped.close()
        return {name: variable}

    def read_open(self, path, name):
        handle = open(path, "rb")
        self.mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return {name: np.ndarray((16,), dtype=">f4", buffer=self.mapped)}


class Traces:
    """After gym-recording issue 6: each episode is kept, then the reader closes."""

    def __init__(self):
        self.rewards = []

    def scan(self, path, offsets):
        mapped = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        for offset in offsets:
            reward = np.frombuffer(mapped, dtype="f4", count=8, offset=offset)
            self.rewards.append(reward)
        mapped.close()

    def scan_copies(self, path, offsets):
        mapped = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        for offset in offsets:
            reward = np.frombuffer(mapped, dtype="f4", count=8, offset=offset)
            self.rewards.append(reward.copy())
        mapped.close()


def open_tree(path):
    """After asdf PR 1668: the tree of a file is looked at when the file is closed."""
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        tree = np.frombuffer(mapped, dtype="i8")
    return tree.max()


def open_tree_fixed(path):
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        tree = np.frombuffer(mapped, dtype="i8")
        largest = tree.max()
    return largest


class ResponseChain:
    """After projectdiscovery utils issue 709: the full response is a view of the pooled buffer."""

    def __init__(self, buffer_pool):
        self.buffer_pool = buffer_pool

    def full_response(self, headers, body):
        buffer = self.buffer_pool.allocate(len(headers) + len(body))
        buffer[: len(headers)] = headers
        buffer[len(headers) :] = body
        whole = buffer.view(-1)
        self.buffer_pool.deallocate(buffer)
        return whole

    def full_response_copied(self, headers, body):
        buffer = self.buffer_pool.allocate(len(headers) + len(body))
        buffer[: len(headers)] = headers
        buffer[len(headers) :] = body
        whole = buffer.clone()
        self.buffer_pool.deallocate(buffer)
        return whole


def checksum(chunk_pool, source):
    """After DitchOoM buffer PR 261: a slice that is kept reads what the next one to have the chunk writes."""
    chunk = chunk_pool.acquire(source.numel())
    chunk.copy_(source)
    header = chunk[:16]
    chunk_pool.release(chunk)
    return header.sum()


def checksum_fixed(chunk_pool, source):
    chunk = chunk_pool.acquire(source.numel())
    chunk.copy_(source)
    total = chunk[:16].sum()
    chunk_pool.release(chunk)
    return total
