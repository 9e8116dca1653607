"""A job for the launch recipes: all ranks meet over gloo, add up their ranks, and write a file each."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run.dir", dest="run_dir", required=True)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    seen = {name: int(os.environ[name]) for name in names} | {"sum": int(total), "words": options.words}
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
