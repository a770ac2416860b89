"""Synthetic model traffic: a program, one process in each node, all-reducing with each other.

Engines of one GPU each have no collectives, so this stands in for those of larger ones: gloo's
all-reduce of torch.distributed over the compute NIC, outside KV's ports and thus in the model's
class. Rank 0 does as its standard input says: a line with a number of seconds is answered, after
them, by a JSON line with the time of every all-reduce. All end with its input.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import os
import sys
import time

import torch
import torch.distributed as dist

_LONGEST_WAIT = datetime.timedelta(minutes=10)
"""For each other, and for rank 0 to be told something."""
_WARM_UP_OPS = 3


class _Word(enum.IntEnum):
    """What rank 0 tells the others, as the last element of the tensor that is reduced anyway."""

    GO_ON = 0
    END = 1


class _Group:
    """The processes, joined."""

    def __init__(self, rank: int, world: int, master: str, elements: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{master}", rank=rank, world_size=world,
            timeout=_LONGEST_WAIT,
        )  # fmt: skip
        self._tensor = torch.zeros(elements)

    def reduce(self, word: _Word = _Word.GO_ON) -> _Word:
        """One all-reduce; rank 0's word. The others have none."""
        self._tensor.zero_()
        self._tensor[-1] = word.value
        dist.all_reduce(self._tensor)
        return _Word(int(self._tensor[-1].item()))


def _lead(group: _Group, nbytes: int) -> None:
    for _ in range(_WARM_UP_OPS):
        group.reduce()
    print(json.dumps({"joined": True}), flush=True)
    for line in sys.stdin:
        end_s = time.perf_counter() + float(line)
        times_s = []
        while (begun_s := time.perf_counter()) < end_s:
            group.reduce()
            times_s.append(time.perf_counter() - begun_s)
        print(json.dumps({"op_s": times_s, "nbytes": nbytes}), flush=True)
    group.reduce(_Word.END)


def main() -> None:
    """Parse, join, repeat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--device", required=True, help="interface to use")
    parser.add_argument("--nbytes", type=int, required=True, help="of the tensor that is reduced")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = options.device
    torch.set_num_threads(1)
    group = _Group(options.rank, options.world, options.master, options.nbytes // 4)
    if options.rank == 0:
        _lead(group, options.nbytes)
    else:
        while group.reduce() is not _Word.END:
            pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
