"""Scratch volumes for the build steps of a release machine."""
import contextlib


class VolumePool:
    def __init__(self, names):
        self._unmounted = list(names)

    def mount(self):
        return f"/mnt/{self._unmounted.pop()}"

    def unmount(self, path):
        self._unmounted.append(path.rsplit("/", 1)[1])


class ReleaseMachine:
    def __init__(self, volumes, shell):
        self.volumes = volumes
        self.shell = shell
        self.artifacts = []

    def volume(self, stack):
        path = self.volumes.mount()  # clean: the caller's stack unmounts it
        stack.callback(self.volumes.unmount, path)
        self.shell.run(f"mkfs -q {path}")
        return path

    def build(self, targets):
        with contextlib.ExitStack() as stack:
            out = self.volume(stack)  # clean: the stack is closed by the with
            for target in targets:
                if not self.shell.run(f"make -C {target} O={out}"):
                    return False
            self.artifacts.append(self.shell.digest(out))
        return True

    def open_many(self, count):
        with contextlib.ExitStack() as stack:
            paths = [self.volume(stack) for _ in range(count)]  # clean: the popped stack goes to the caller
            return paths, stack.pop_all()

    def merge(self, count):
        paths, stack = self.open_many(count)  # clean: closed after the copy
        for path in paths[1:]:
            self.shell.run(f"cp -r {path}/. {paths[0]}")
        digest = self.shell.digest(paths[0])
        stack.close()
        return digest

    def count_free(self, count):
        paths, _ = self.open_many(count)  # leak: the popped stack is never closed
        return sum(self.shell.free_bytes(path) for path in paths)

    def stage(self, archive):
        with contextlib.ExitStack() as stack:
            path = self.volumes.mount()  # leak: the callback is set only for a signed archive
            self.shell.run(f"tar xf {archive} -C {path}")
            if self.shell.exists(f"{path}/SIGNATURE"):
                stack.callback(self.volumes.unmount, path)
                self.artifacts.append(archive)
        return archive in self.artifacts
