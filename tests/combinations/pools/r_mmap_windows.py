# take: map_window(key)
# give: unmap_window(key)
# gets: value
import mmap
from collections import OrderedDict


def _window_cache(keep):
    busy = {}               # path -> [map, count]
    idle = OrderedDict()    # path -> map

    def enter(path):
        if path in busy:
            busy[path][1] += 1
            return busy[path][0]
        view = idle.pop(path, None)
        if view is None:
            with open(path, "rb") as f:
                view = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        busy[path] = [view, 1]
        return view

    def leave(path):
        entry = busy[path]
        entry[1] -= 1
        if entry[1] > 0:
            return
        del busy[path]
        idle[path] = entry[0]
        while len(idle) > keep:
            _, stale = idle.popitem(last=False)
            stale.close()

    return enter, leave


map_window, unmap_window = _window_cache(keep=32)
