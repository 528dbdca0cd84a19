"""Used, or handed on, after its release. Written in our own words after the bug reports that each names."""

import csv
import mmap
from multiprocessing.shared_memory import SharedMemory
from xml.etree import ElementTree

import numpy as np


def write_results(path, rows):
    """After gridpath PR 576: the last row is written one level too far to the left."""
    with open(path, "w") as handle:
        writer = csv.writer(handle)
        for row in rows:
            writer.writerow(row)
    handle.write("end\n")


def write_results_fixed(path, rows):
    with open(path, "w") as handle:
        writer = csv.writer(handle)
        for row in rows:
            writer.writerow(row)
        handle.write("end\n")
    print(handle.name)


def read_index(path, offsets):
    """After cdflib PR 24: the block that follows the header was not indented with it."""
    with open(path, "rb") as handle:
        handle.seek(0)
        size = int.from_bytes(handle.read(4), "big")
    entries = []
    for offset in offsets:
        handle.seek(offset)
        entries.append(handle.read(size))
    return entries


def read_index_fixed(path, offsets):
    with open(path, "rb") as handle:
        handle.seek(0)
        size = int.from_bytes(handle.read(4), "big")
        entries = []
        for offset in offsets:
            handle.seek(offset)
            entries.append(handle.read(size))
    if handle.closed:
        return entries
    return None


def parse(stream_path):
    """After obspy issue 489: the parser closes what it was given, the caller goes back to its start."""
    stream = open(stream_path, "rb")
    root = parse_and_close(stream)
    stream.seek(0)
    return root, stream.read()


def parse_and_close(stream):
    root = ElementTree.parse(stream)
    stream.close()
    return root


def parse_fixed(stream_path):
    stream = open(stream_path, "rb")
    first = stream.read()
    stream.seek(0)
    return parse_and_close(stream), first


def read_sources(path):
    """After SCons PR 3361: closed after the first part, and the second is read from it."""
    project = open(path)
    line = project.readline()
    while line and "# End" not in line:
        line = project.readline()
    project.close()
    sources = project.readline()
    return sources


def read_sources_fixed(path):
    project = open(path)
    line = project.readline()
    while line and "# End" not in line:
        line = project.readline()
    sources = project.readline()
    project.close()
    return sources


def query(connection_pool, statement):
    """After asyncpg PR 99: the rows are fetched when the connection is already somebody else's."""
    connection = connection_pool.get_conn()
    try:
        connection.execute(statement)
    finally:
        connection_pool.put_conn(connection)
    return connection.fetchall()


def query_fixed(connection_pool, statement):
    connection = connection_pool.get_conn()
    try:
        connection.execute(statement)
        return connection.fetchall()
    finally:
        connection_pool.put_conn(connection)


def read_answer(pool_manager, url):
    """After urllib3 issue 103: read from a connection that has gone back."""
    response = pool_manager.urlopen("GET", url, preload_content=False)
    status = response.status
    response.release_conn()
    return status, response.read()


def read_answer_fixed(pool_manager, url):
    response = pool_manager.urlopen("GET", url, preload_content=False)
    body = response.read()
    response.release_conn()
    return response.status, body


def load_cached(allocator, backend, key):
    """After LMCache issue 2238: the tensor of a chunk whose last reference is gone."""
    memory_object = allocator.allocate_object(key.shape)
    backend.load(key, memory_object)
    memory_object.ref_count_down()
    return memory_object.tensor.clone()


def load_cached_fixed(allocator, backend, key):
    memory_object = allocator.allocate_object(key.shape)
    backend.load(key, memory_object)
    copy = memory_object.tensor.clone()
    memory_object.ref_count_down()
    return copy


def total_of_map(path):
    """After numpy issue 9537: an array over a map that was closed."""
    with open(path, "rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    values = np.frombuffer(mapped, dtype="f4")
    mapped.close()
    return values.sum()


def total_of_map_fixed(path):
    with open(path, "rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    values = np.frombuffer(mapped, dtype="f4")
    total = values.sum()
    mapped.close()
    return total


def attach(name, shape):
    """After CPython issue 102349: the array is a view of a segment that is unmapped here."""
    segment = SharedMemory(name=name)
    array = np.ndarray(shape, dtype=np.int32, buffer=segment.buf)
    segment.close()
    return array


def attach_fixed(name, shape):
    segment = SharedMemory(name=name)
    array = np.ndarray(shape, dtype=np.int32, buffer=segment.buf)
    copy = array.copy()
    segment.close()
    return copy


def progress_of(workers):
    """After kaldo PR 310: counters are read when the segment is closed."""
    segment = SharedMemory(create=True, size=8 * workers)
    progress = np.ndarray((workers,), dtype=np.int64, buffer=segment.buf)
    progress.fill(0)
    segment.close()
    segment.unlink()
    return int(progress.sum())


def load_weights(loader, names):
    """After fastsafetensors issue 57: tensors over a buffer that is released before they are used."""
    buffer = loader.copy_files_to_device()
    weights = [buffer.get_tensor(name) for name in names]
    buffer.close()
    return weights


def load_weight(loader, name):
    buffer = loader.copy_files_to_device()
    weight = buffer.get_tensor(name)
    buffer.close()
    return weight


def load_weight_fixed(loader, name):
    buffer = loader.copy_files_to_device()
    weight = buffer.get_tensor(name).clone()
    buffer.close()
    return weight


def first_frame(path):
    """After dcimg PR 5: an array over the map of a file that the with statement closes."""
    with open(path, "rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        frames = np.frombuffer(mapped, dtype="u2")
        frame = frames[:1024]
        mapped.close()
    return frame


def read_dataset(path, shape):
    """After openNCEM issue 25: the same in on_memory mode, handed out in a dictionary."""
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, dtype="f4").reshape(shape)
        metadata = {"shape": shape}
    return {"data": data, **metadata}


def read_dataset_fixed(path, shape):
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.array(np.frombuffer(mapped, dtype="f4")).reshape(shape)
        metadata = {"shape": shape}
    return {"data": data, **metadata}
