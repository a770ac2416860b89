"""Stays beside a lab and removes it when the process that made it is gone, however it went.

``python -m dualpath.lab.keeper``: standard input is a pipe whose other end only the lab's process
holds. At its end everything of the lab is removed. The lab's claim (``claim.py``) is inherited and
so lasts until then. Exit status 0 when nothing is left; 1, with one line, when something is.
"""

from __future__ import annotations

import signal
import sys

from dualpath.lab.removing import NotRemoved, remove_all


def main() -> int:
    """Wait, then remove."""
    # Ctrl-C reaches the whole terminal; the end of the pipe alone decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.buffer.read()
    try:
        remove_all()
    except (NotRemoved, OSError) as error:
        print(f"the lab is not removed: {error}; run 'dualpath lab down'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
