import collections
import logging

from .regions import PinLimit, RegionTable

log = logging.getLogger("gradstream.recv")


class ShapeChanged(RuntimeError):
    pass


class Receiver:
    def __init__(self, table: RegionTable, model, depth: int = 4):
        self.table = table
        self.model = model
        self.depth = depth
        self._posted = collections.OrderedDict()
        self._scratch = {}
        self.bad = 0

    def post(self, addr: int, nbytes: int) -> bool:
        if len(self._posted) >= self.depth:
            return False
        region = self.table.try_register(addr, nbytes)  # leak: on_complete() pops the region of a failed completion and returns without deregistering it
        if region is None:
            return False
        self._posted[region.key] = region
        return True

    def on_complete(self, key: int, status: int, name: str) -> None:
        region = self._posted.pop(key)
        if status != 0:
            self.bad += 1
            log.error("completion of %s: status %d", name, status)
            return
        try:
            self.model.load_from(name, region.addr, region.nbytes)
        finally:
            self.table.deregister(region)

    def scratch_for(self, name: str, addr: int, nbytes: int):
        """Dequantisation space, one for each parameter name."""
        have = self._scratch.get(name)
        if have is not None and have.nbytes >= nbytes:
            return have
        region = self.table.register(addr, nbytes)  # leak: a region that is too small is overwritten in the table
        self._scratch[name] = region
        return region

    def load_pair(self, name: str, weight_addr: int, scale_addr: int, nbytes: int) -> bool:
        weight = self.table.try_register(weight_addr, nbytes)  # clean: deregistered when the second one fails and in the finally
        if weight is None:
            return False
        scale = self.table.try_register(scale_addr, nbytes // 128)  # clean: deregistered in the finally
        if scale is None:
            self.table.deregister(weight)
            return False
        try:
            self.model.dequantise(name, weight.addr, scale.addr)
        finally:
            self.table.deregister(scale)
            self.table.deregister(weight)
        return True

    def check_shape(self, name: str, addr: int, nbytes: int) -> None:
        region = self.table.register(addr, nbytes)  # clean: the finally deregisters also when ShapeChanged is raised
        try:
            expected = self.model.nbytes(name)
            if region.nbytes != expected:
                raise ShapeChanged(f"{name}: {region.nbytes} != {expected}")
        finally:
            self.table.deregister(region)

    def refill(self, addrs, nbytes: int) -> int:
        n = 0
        for addr in addrs:
            try:
                self.check_shape("*", addr, nbytes)
            except (ShapeChanged, PinLimit):
                continue
            n += self.post(addr, nbytes)
        return n

    def close(self) -> None:
        for region in [*self._posted.values(), *self._scratch.values()]:
            self.table.deregister(region)
        self._posted.clear()
        self._scratch.clear()
