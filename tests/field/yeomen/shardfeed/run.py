import argparse
import json
import logging
import os
from typing import Dict, List

from .leases import Coordinator, LeaseLost
from .mixer import Mixer, Source, StateMismatch
from .readers import CorruptShard, ScratchBuffers, ShardReader

log = logging.getLogger("shardfeed")


def survey(shards: List[str], coordinator: Coordinator, buffers: ScratchBuffers) -> Dict[str, int]:
    """Frames of each shard that nobody reads at the moment."""
    frames: Dict[str, int] = {}
    for lease in coordinator.claim_any(shards, most=16):  # clean: near miss, each moves into a reader that is closed in the finally
        reader = ShardReader(lease.shard, lease, coordinator, buffers)  # clean: closed in the finally
        try:
            reader.check()
            frames[lease.shard] = sum(1 for _ in reader.frames())
        except CorruptShard as exc:
            log.warning("%s", exc)
        finally:
            reader.close()
    return frames


def take_over(dead: str, shards: List[str], coordinator: Coordinator, source: Source) -> int:
    moved = {}
    for shard in shards:
        lease = coordinator.steal(shard, dead)  # leak: a shard that is not on this host's disk takes the continue
        if lease is None:
            continue
        if not os.path.exists(shard):
            log.warning("%s is not on this host", shard)
            continue
        moved[shard] = lease
    for shard, lease in moved.items():
        coordinator.release(lease, finished=False)
        source.shards.append(shard)
    return len(moved)


def feed(mixer: Mixer, coordinator: Coordinator, out, steps: int) -> int:
    done = 0
    try:
        for done, sample in enumerate(mixer, 1):
            out.push(sample)
            if done % 100 == 0:
                coordinator.renew()
            if done == steps:
                break
    except LeaseLost as exc:
        log.error("lost %s after %d samples", exc, done)
    finally:
        mixer.close()
    return done


def main(table, out, argv=None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(argv)
    with open(args.config) as f:  # clean: with
        config = json.load(f)
    coordinator = Coordinator(table, config["owner"])
    buffers = ScratchBuffers(8, 1 << 22)
    mixer = Mixer(config["weights"])
    for name, shards in config["sources"].items():
        source = Source(name, shards, coordinator, buffers)
        mixer.add(source)
        if name in config.get("resume", {}):
            try:
                source.resume(*config["resume"][name])
            except StateMismatch as exc:
                log.warning("from the start: %s", exc)
    return 0 if feed(mixer, coordinator, out, args.steps) == args.steps else 1
