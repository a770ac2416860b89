"""Reads a load tool's result files and prints one line of JSON; exit 1 unless all succeeded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def aiperf(folder: Path, endpoint: str) -> tuple[int, int]:
    """Requests that succeeded and failed."""
    file = folder / endpoint / "profile_export_aiperf.json"
    data: dict[str, Any] = json.loads(file.read_text())
    failed = data.get("error_request_count") or {"avg": 0}
    return int((data.get("request_count") or {"avg": 0})["avg"]), int(failed["avg"])


def guidellm(folder: Path, endpoint: str) -> tuple[int, int]:
    """The same."""
    data: dict[str, Any] = json.loads((folder / f"{endpoint}.json").read_text())
    totals = [run["metrics"]["request_totals"] for run in data["benchmarks"]]
    good = sum(total["successful"] for total in totals)
    return good, sum(total["total"] for total in totals) - good


def vllm_bench(folder: Path, endpoint: str) -> tuple[int, int]:
    """The same."""
    data: dict[str, Any] = json.loads((folder / f"{endpoint}.json").read_text())
    return int(data["completed"]), int(data["failed"])


READERS = {"aiperf": aiperf, "guidellm": guidellm, "vllm-bench": vllm_bench}


def main() -> int:
    """``summary.py TOOL VERSION FOLDER REQUESTS``."""
    tool, version, folder, requests = sys.argv[1:]
    counts = {name: READERS[tool](Path(folder), name) for name in ("chat", "completions")}
    good = all(count == (int(requests), 0) for count in counts.values())
    line = {
        "tool": tool, "version": version, "all_succeeded": good,
        **{name: {"succeeded": ok, "failed": bad} for name, (ok, bad) in counts.items()},
        "results": folder,
    }  # fmt: skip
    print(json.dumps(line))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
