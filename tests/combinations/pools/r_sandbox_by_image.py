# take: await rent_sandbox(key)
# give: await end_rent(X)
# gets: optional
# Tool-use sandboxes, warm ones kept by image.
import asyncio
import secrets

MAX_LIVE = 24
_warm = {}
_rented = {}
_mu = asyncio.Lock()


def _live():
    return len(_rented) + sum(map(len, _warm.values()))


def _evict_other(image):
    for other, boxes in _warm.items():
        if other != image and boxes:
            boxes.pop()
            return True
    return False


async def rent_sandbox(image):
    async with _mu:
        boxes = _warm.setdefault(image, [])
        if boxes:
            box = boxes.pop()
        elif _live() < MAX_LIVE or _evict_other(image):
            box = secrets.token_hex(6)
        else:
            return None
        _rented[box] = image
        return box


async def end_rent(box):
    async with _mu:
        image = _rented.pop(box)
        _warm[image].append(box)
