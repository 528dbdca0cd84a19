import argparse
import logging
import pathlib

from objstore import S3Store, connect

from .mover import Mover


def main(argv=None):
    ap = argparse.ArgumentParser("ckptmover")
    ap.add_argument("what", choices=["push", "pull", "verify"])
    ap.add_argument("folder", type=pathlib.Path)
    ap.add_argument("prefix")
    args = ap.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    mover = Mover(S3Store(args.prefix), connect)
    bad = 0
    try:
        for path in sorted(args.folder.glob("*.safetensors")):
            key = f"{args.prefix}/{path.name}"
            if args.what == "push":
                bad += mover.move(path, key) is None
            elif args.what == "pull":
                mover.fetch(key, path)
            else:
                bad += mover.verify(key, path) is not None
    finally:
        mover.shutdown()
    return 1 if bad else 0
