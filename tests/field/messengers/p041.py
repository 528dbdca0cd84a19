"""Live camera slots of a video wall, read through asynchronous generators."""
import asyncio


class TileGrid:
    def __init__(self, tiles):
        self._dark = asyncio.Queue()
        for tile in tiles:
            self._dark.put_nowait(tile)

    async def light(self):
        return await self._dark.get()

    async def darken(self, tile):
        await tile.clear()
        self._dark.put_nowait(tile)


async def tiles_for(grid, cameras):
    for camera in cameras:
        tile = await grid.light()  # clean: darkened before the next camera
        yield camera, tile
        await grid.darken(tile)


async def steady_tiles(grid, cameras):
    tile = await grid.light()  # clean: finally, the consumers close the generator
    try:
        for camera in cameras:
            yield camera, tile
    finally:
        await grid.darken(tile)


class Wall:
    def __init__(self, grid):
        self.grid = grid
        self.shown = 0
        self.bad = []

    async def tour(self, cameras, seconds):
        async for camera, tile in tiles_for(self.grid, cameras):  # clean: never left early
            await tile.show(camera)
            await asyncio.sleep(seconds)
            self.shown += 1

    async def find_motion(self, cameras):
        async for camera, tile in tiles_for(self.grid, cameras):  # leak: returns out of the loop
            await tile.show(camera)
            if await camera.motion():
                return camera.name
        return None

    async def inspect(self, cameras):
        stream = steady_tiles(self.grid, cameras)  # clean: aclose runs the finally
        async for camera, tile in stream:
            await tile.show(camera)
            if await camera.broken():
                self.bad.append(camera.name)
                break
        await stream.aclose()

    async def still(self, camera):
        tile = await self.grid.light()  # clean: darkened
        await tile.show(camera)
        image = await tile.grab()
        await self.grid.darken(tile)
        return image

    async def resolution(self):
        tile = await self.grid.light()  # leak: neither stored nor darkened
        width, height = await tile.size()
        return width * height
