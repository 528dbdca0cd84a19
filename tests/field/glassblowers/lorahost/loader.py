import logging

from .pages import PageBank, StagingShelf

log = logging.getLogger("lorahost.loader")


class BadShard(Exception):
    pass


class Loader:
    def __init__(self, bank: PageBank, shelf: StagingShelf, source):
        self.bank = bank
        self.shelf = shelf
        self.source = source

    def load(self, name):
        """Pages with the adapter's weights, or None when there is no room."""
        total = self.source.size(name)
        pages = self.bank.pull_list(-(-total // self.bank.page_elems))  # clean: pushed on a bad shard, else returned
        if pages is None:
            return None
        try:
            with self.shelf.staged(self.bank.page_elems) as stage:  # clean: with statement
                for i, page in enumerate(pages):
                    self.source.read(name, i, stage)
                    self.bank.mem[page].copy_(stage)
        except BadShard:
            log.error("adapter %s: bad shard", name)
            self.bank.push_list(pages)
            return None
        return pages

    def header(self, name):
        stage = self.shelf.get(64)  # leak: put is skipped for a file of another version
        self.source.read(name, -1, stage)
        version, rank, alpha = (int(x) for x in stage[:3])
        if version != 2:
            return None
        self.shelf.put(stage)
        return rank, alpha

    def first_row(self, name):
        stage = self.shelf.get(self.bank.page_elems)  # leak: the row is cloned and the staging tensor dropped
        self.source.read(name, 0, stage)
        return stage[:64].clone()
