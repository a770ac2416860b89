"""A lab whose prefill engines keep few layers in memory is restarted for the modes that need it,
and only for those; what is stored is found again."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from test_lab_bytes import agent
from test_tokens import BLOCK, random_prompt

from dualpath.config import ConfigError, Mode
from dualpath.lab import inside, names
from dualpath.lab.cluster import Lab, lab_cluster
from dualpath.lab.network import check_machine
from dualpath.lab.removing import leftovers
from dualpath.lab.spec import LabSpec

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(900)]

CONTEXT = 500
SWITCHES = (
    (Mode.BASIC, "", True),
    (Mode.PE_ONLY, "basic", True),
    (Mode.DUALPATH, "", False),
    (Mode.DUALPATH, "round_robin/round_robin/alternating_by_node", False),
)
"""Mode, policy, and whether that takes other engines than the mode before."""


def running(lab: Lab) -> set[int]:
    """Processes of the engines' hosts."""
    return {pid for node in lab.network.nodes for pid in inside.processes(names.namespace(node))}


async def test_engines_are_restarted_where_their_memory_must_be_laid_out_anew(
    model: Path, tmp_path: Path
) -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    prompt = random_prompt(CONTEXT)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http,
        lab_cluster(LabSpec(str(model), layer_aliasing=True), tmp_path) as lab,
    ):
        first = await agent(lab, http, [prompt])
        before = running(lab)
        for mode, policy, restarts in SWITCHES:
            await lab.set_mode(mode, policy)
            state = await lab.state()
            assert (state["mode"], lab.mode) == (mode.value, mode)
            assert not policy or state["policy"] == policy
            now = running(lab)
            # Mounts of the store stay; engines and their helpers are others, or the very same.
            assert (now != before) is restarts, mode
            before = now
            hits = state["tokens"]["hit"]
            assert await agent(lab, http, [prompt]) == first, mode
            found = (await lab.state())["tokens"]["hit"] - hits
            assert found == (CONTEXT - 1) // BLOCK * BLOCK, mode
            await lab.drained()
    assert leftovers() == []
