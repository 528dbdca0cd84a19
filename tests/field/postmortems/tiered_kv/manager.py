"""Moves pages between the tiers on behalf of the scheduler."""
from __future__ import annotations

from .tiers import make_tiers


class TierManager:
    def __init__(self, device, host):
        self.device, self.host = make_tiers(device, host)
        self.on_device = {}
        self.on_host = {}
        self.loading = {}

    def put(self, key):
        if key in self.on_device:
            return True
        page = self.device.obtain(key)  # clean: on_device owns it, drop() and shutdown() relinquish
        if page is None:
            return False
        self.on_device[key] = page
        return True

    def back_up(self, key):
        page = self.on_device.get(key)
        if page is None:
            return False
        twin = self.host.mirror(page)  # leak: a key backed up twice loses its first host page
        if twin is None:
            return False
        self.on_host[key] = twin
        return True

    def back_up_once(self, key):
        page = self.on_device.get(key)
        if page is None or key in self.on_host:
            return False
        twin = self.host.mirror(page)  # clean: near miss, the key is not on the host yet, drop() relinquishes it
        if twin is None:
            return False
        self.on_host[key] = twin
        return True

    def begin_load(self, key):
        if key in self.loading or key in self.on_device:
            return False
        page = self.device.obtain_or_evict(key, [])  # clean: near miss, end_load() moves it or relinquishes it
        if page is None:
            return False
        self.loading[key] = page
        return True

    def end_load(self, key, ok):
        page = self.loading.pop(key, None)
        if page is None:
            return
        if ok and key not in self.on_device:
            self.on_device[key] = page
        else:
            self.device.relinquish(page)

    def attend(self, keys):
        hits = 0
        for key in keys:
            page = self.on_device.get(key)
            if page is None:
                continue
            self.device.lock(page)  # leak: a page renamed meanwhile breaks the loop still locked
            if page.key != key:
                break
            hits += 1
            self.device.unlock(page)
        return hits

    def attend_pinned(self, keys):
        hits = 0
        for key in keys:
            page = self.on_device.get(key)
            if page is None:
                continue
            with self.device.pinned(page):  # clean: near miss, the break leaves through the with
                if page.key != key:
                    break
                hits += 1
        return hits

    def drop(self, key):
        page = self.on_device.pop(key, None)
        if page is not None:
            self.device.relinquish(page)
        twin = self.on_host.pop(key, None)
        if twin is not None:
            self.host.relinquish(twin)

    def shutdown(self):
        for key in set(self.on_device) | set(self.on_host):
            self.drop(key)
        for key in list(self.loading):
            self.end_load(key, ok=False)

    def scratch_sum(self, keys):
        tmp = self.device.obtain("scratch")  # leak: no key on the device gives the shortcut return
        if tmp is None:
            return 0
        present = [k for k in keys if k in self.on_device]
        if not present:
            return 0
        total = sum(self.on_device[k].no for k in present)
        self.device.relinquish(tmp)
        return total
