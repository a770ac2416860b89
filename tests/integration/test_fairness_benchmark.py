"""benchmarks/fairness.py runs against a front (with stand-in engines: nothing is judged here)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from front_kit import make_config, running_cluster

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "fairness.py"


async def test_it_compares_the_same_number_of_requests(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.engines["pe0"].prefill_token_s = 0.004  # the huge one stays for a while
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), "--url", cluster.url, "--json", "--rounds", "2",
            "--requests", "5", "--huge", "400", "--hit", "64",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(program.communicate(), 60)
        assert program.returncode == 0
        await cluster.idle()
    found = json.loads(out.splitlines()[-1])
    assert {"cpus", "kernel", "load_1m"} <= found["machine"].keys()
    assert found["requests"] == 10
    assert found["p99_ratio"] > 0
    assert len(found["p99_ratios"]) == 2
    assert found["huge_requests"] >= 2
    assert found["met"] == (found["p99_ratio"] < found["target"])
