"""Compile-once kernel JIT: per-key build locks, compiler slots, loaded module handles."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Optional


class BuildError(RuntimeError):
    pass


@dataclass(eq=False)
class Module:
    key: str
    image: bytes
    uses: int = 0


class ModuleLoader:
    """Loaded device modules, counted; unloaded with the last `unload`."""

    def __init__(self) -> None:
        self._mods: Dict[str, Module] = {}
        self._mu = threading.Lock()

    def load(self, key: str, image: bytes) -> Module:
        with self._mu:
            mod = self._mods.setdefault(key, Module(key, image))
            mod.uses += 1
            return mod

    def unload(self, mod: Module) -> None:
        with self._mu:
            mod.uses -= 1
            if mod.uses == 0:
                self._mods.pop(mod.key)

    def uses(self) -> int:
        return sum(m.uses for m in self._mods.values())


class Jit:
    def __init__(self, loader: ModuleLoader, compiler: Callable[[str], bytes], jobs: int = 4) -> None:
        self.loader = loader
        self.compiler = compiler
        self._slots = threading.BoundedSemaphore(jobs)
        self._locks: Dict[str, threading.Lock] = {}
        self._images: Dict[str, bytes] = {}
        self._current: Optional[Module] = None

    def _lock_for(self, key: str) -> threading.Lock:
        return self._locks.setdefault(key, threading.Lock())

    def image(self, key: str) -> bytes:
        lock = self._lock_for(key)
        lock.acquire()  # clean: near miss, the cached return is inside the try
        try:
            if key in self._images:
                return self._images[key]
            with self._slots:
                self._images[key] = self.compiler(key)
            return self._images[key]
        finally:
            lock.release()

    def precompile(self, keys: Iterable[str]) -> List[str]:
        failed: List[str] = []
        for key in keys:
            lock = self._lock_for(key)
            lock.acquire()  # leak: a key already built continues with its lock held
            if key in self._images:
                continue
            try:
                self._images[key] = self.compiler(key)
            except BuildError:
                failed.append(key)
            lock.release()
        return failed

    def try_build(self, key: str) -> bool:
        if not self._slots.acquire(blocking=False):  # leak: BuildError returns False without giving the slot up
            return False
        try:
            self._images[key] = self.compiler(key)
        except BuildError:
            return False
        self._slots.release()
        return True

    def build_when_idle(self, key: str, timeout: float) -> bool:
        got = self._slots.acquire(timeout=timeout)  # clean: near miss, released exactly when got
        try:
            if got:
                self._images[key] = self.compiler(key)
        except BuildError:
            return False
        finally:
            if got:
                self._slots.release()
        return got

    def call(self, key: str, arg: int) -> int:
        mod = self.loader.load(key, self.image(key))  # clean: unloaded in the finally
        try:
            return len(mod.image) * arg
        finally:
            self.loader.unload(mod)

    def activate(self, key: str) -> None:
        prev = self._current
        self._current = self.loader.load(key, self.image(key))  # clean: near miss, the one before is saved and unloaded
        if prev is not None:
            self.loader.unload(prev)

    def activate_best(self, keys: List[str]) -> Optional[str]:
        best: Optional[Module] = None
        for key in keys:
            mod = self.loader.load(key, self.image(key))  # leak: larger candidates are not unloaded
            if best is None:
                best = mod
            elif len(mod.image) < len(best.image):
                self.loader.unload(best)
                best = mod
        if best is None:
            return None
        name = best.key
        self.loader.unload(best)
        return name

    def deactivate(self) -> None:
        if self._current is not None:
            self.loader.unload(self._current)
            self._current = None

    def swap_images(self, a: str, b: str) -> bool:
        la, lb = self._lock_for(a), self._lock_for(b)
        if la is lb:
            return False
        la.acquire()  # leak: the busy second lock returns with the first held
        if not lb.acquire(timeout=0.05):  # clean: released with the first
            return False
        try:
            self._images[a], self._images[b] = self._images[b], self._images[a]
        finally:
            lb.release()
            la.release()
        return True


def main() -> None:
    def compiler(key: str) -> bytes:
        if key.startswith("bad"):
            raise BuildError(key)
        return key.encode()

    jit = Jit(ModuleLoader(), compiler, jobs=2)
    print(jit.call("qk", 3), jit.build_when_idle("bad", 0.1), jit.precompile(["pv", "bad"]))
    jit.activate("qk")
    jit.activate("pv")
    jit.deactivate()
    print("uses", jit.loader.uses(), jit.swap_images("qk", "pv"))
    jit.try_build("bad")
    jit.activate_best(["qk", "long_kernel"])
    jit.precompile(["qk"])
    print("uses", jit.loader.uses(), jit._slots._value, jit._locks["qk"].locked())


if __name__ == "__main__":
    main()
