"""Placement from a made-up sysfs, locking and fences on stand-ins; and for real where the machine has several
nodes.
"""

import gc

import pytest
import torch

from reference_modules.pool import TensorPool
from reference_modules.pool.fences import EventFences
from reference_modules.pool.numa import Placement, bind, near_gpu, node_of, nodes, parse_list
from reference_modules.pool.pinned import PinnedMemory
from reference_modules.pool.store import BlockStore

GPU = "0000:3B:00.0"


def sysfs(root, node_list="0-1", gpu_node="1", distances=("10 21", "21 10")):
    base = root / "devices/system/node"
    base.mkdir(parents=True)
    (base / "has_memory").write_text(node_list + "\n")
    for number, distance in enumerate(distances):
        folder = base / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{number * 4}-{number * 4 + 3}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {1024 * (number + 1)} kB\n")
        (folder / "distance").write_text(distance + "\n")
    device = root / "bus/pci/devices" / GPU.lower()
    device.mkdir(parents=True)
    (device / "numa_node").write_text(gpu_node + "\n")
    return root


def test_lists_as_sysfs_writes_them():
    assert parse_list("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]
    assert parse_list("\n") == []


def test_nodes_are_read(tmp_path):
    first, second = nodes(sysfs(tmp_path))
    assert (first.number, first.total_bytes, first.distances) == (0, 1 << 20, (10, 21))
    assert second.processors == {4, 5, 6, 7}


def test_memory_goes_to_the_gpus_node(tmp_path):
    assert near_gpu(GPU, sysfs(tmp_path)).node == 1


def test_a_gpu_whose_node_has_no_memory_gets_the_nearest(tmp_path):
    three = sysfs(tmp_path, "0-1", "2", ("10 40 30", "40 10 20"))
    placement = near_gpu(GPU, three)
    assert placement.node == 1
    assert "no memory" in placement.reason


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        ({"node_list": "0", "distances": ("10",), "gpu_node": "0"}, "one memory node"),
        ({"gpu_node": "-1"}, "does not say which node"),
    ],
)
def test_where_there_is_nothing_to_choose_it_says_so(tmp_path, arrange, reason):
    placement = near_gpu(GPU, sysfs(tmp_path, **arrange))
    assert placement.node is None
    assert reason in placement.reason


def test_no_sysfs_and_unknown_devices(tmp_path):
    assert "does not list" in near_gpu(GPU, tmp_path / "nowhere").reason
    assert "knows no PCI device" in near_gpu("0000:ff:00.0", sysfs(tmp_path)).reason


class Runtime:
    def __init__(self, error=0):
        self.error = error
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.locked[address]


class FakeStream:
    def __init__(self, number):
        self.cuda_stream = number
        self.work = 0
        self.done = 0


class FakeEvent:
    def record(self, stream):
        self.stream, self.at = stream, stream.work

    def query(self):
        return self.stream.done >= self.at

    def synchronize(self):
        self.stream.done = max(self.stream.done, self.at)


class FakeCuda:
    Event = FakeEvent

    def __init__(self, error=0):
        self.runtime = Runtime(error)
        self.stream = FakeStream(7)

    def cudart(self):
        return self.runtime

    def current_stream(self, device):
        return self.stream


def pool_over(cuda, placement=Placement(None, "a test")):  # noqa: B008
    store = BlockStore(PinnedMemory(placement, cuda), fences=EventFences(torch.device("cpu"), cuda))
    return TensorPool(threshold_mb=0, store=store)


def test_blocks_are_locked_while_they_live():
    cuda = FakeCuda()
    pool = pool_over(cuda)
    lease = pool.allocate((5000,), torch.uint8)
    assert list(cuda.runtime.locked.values()) == [pool.stats().bytes_reserved]
    assert lease.data_ptr() in cuda.runtime.locked
    pool.deallocate(lease)
    pool.close()
    assert cuda.runtime.locked
    del lease
    gc.collect()
    assert cuda.runtime.locked == {}


def test_where_nothing_can_be_locked_memory_is_plain_and_counted():
    pool = pool_over(FakeCuda(error=2))
    with pool.lease((10,)):
        assert pool.stats().fallbacks == 1


def test_a_block_waits_for_the_work_of_its_stream():
    cuda = FakeCuda()
    pool = pool_over(cuda)
    lease = pool.allocate((10,))
    cuda.stream.work += 1  # a copy is under way
    pool.deallocate(lease)
    del lease
    second = pool.allocate((10,))
    assert pool.stats().hits == 0
    cuda.stream.done = 1
    third = pool.allocate((10,))
    assert pool.stats().hits == 1
    pool.deallocate(second)
    pool.deallocate(third)
    pool.close()


def test_a_block_waits_for_every_stream_that_was_seen():
    cuda = FakeCuda()
    pool = pool_over(cuda)
    one, two = cuda.stream, FakeStream(8)
    lease = pool.allocate((10,))
    cuda.stream = two
    pool.deallocate(pool.allocate((99,)))
    two.work += 1  # the second stream was given work on the first one's block
    pool.deallocate(lease)
    del lease
    cuda.stream = one
    pool.deallocate(pool.allocate((10,)))
    assert pool.stats().hits == 0
    two.done = 1
    pool.deallocate(pool.allocate((10,)))
    assert pool.stats().hits == 1
    pool.close()


def test_close_waits_for_the_work():
    cuda = FakeCuda()
    pool = pool_over(cuda)
    lease = pool.allocate((10,))
    cuda.stream.work += 1
    pool.deallocate(lease)
    del lease
    pool.close()
    assert cuda.stream.done == 1
    assert cuda.runtime.locked == {}


def test_a_refused_binding_is_said_and_the_memory_still_served():
    pool = pool_over(FakeCuda(), Placement(63, "a node that is not there"))
    with pool.lease((10,)):
        assert "refused node 63" in pool._store.memory.placement.reason


@pytest.mark.skipif(len(nodes()) < 2, reason="needs several memory nodes")
def test_memory_lies_where_it_was_bound():
    import mmap

    for node in nodes():
        mapped = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        bind(tensor.data_ptr(), 1 << 20, node.number)
        tensor.fill_(1)
        assert node_of(tensor.data_ptr()) == node.number
