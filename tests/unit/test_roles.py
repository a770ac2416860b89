"""Nodes that change roles: the rule by itself, and machines of the simulator that follow it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_kit import agent, small

from dualpath.cli import main
from dualpath.config import Role
from dualpath.scheduler.roles import RoleBalance, RoleLoad
from dualpath.sim import RolesSpec, simulate
from dualpath.sim.core import Simulation
from dualpath.sim.load import Scripts
from dualpath.sim.plan import Plan
from dualpath.sim.spec import SimSpec
from dualpath.workload.trace import Trajectory

pytestmark = pytest.mark.unit


def shifting(count: int) -> list[Trajectory]:
    """Agents that first read a lot and then write a lot."""
    return [agent(f"s{n}", *[(2000, 2)] * 6, *[(64, 300)] * 6) for n in range(count)]


def uneven(roles: RolesSpec | None, prefill: int, decode: int, mode: str = "dualpath") -> SimSpec:
    return small(
        mode, prefill_nodes=prefill, decode_nodes=decode, gpus_per_node=2, prefill_lockstep=2,
        decode_lockstep=2, engine={"decode_step_per_request_s": 0.01}, spec={"roles": roles},
    )  # fmt: skip


# ---- the rule ----------------------------------------------------------------------------------


def decisions(rule: RoleBalance, p: RoleLoad, d: RoleLoad, seconds: int) -> list[int]:
    return [rule.decide(float(at), p, d, 10.0) for at in range(seconds)]


def test_a_lasting_imbalance_moves_nodes_once_it_has_cost_as_much_as_a_move() -> None:
    """4 and 4 nodes, 8 s and 0.5 s of delay in rounds of 10 s: 6 and 2 are best (6.33 s against
    8.5), which loses 0.217 of every second. Two decode nodes less make 1 s of 0.5: 0.05 of a
    round; their share of the cluster is 0.25, so a change of 20 s is worth it after 5 / 0.217."""
    rule = RoleBalance(20.0)
    said = decisions(rule, RoleLoad(4, 8.0), RoleLoad(4, 0.5), 30)
    assert [at for at, move in enumerate(said) if move] == [24]
    assert said[24] == 2
    mirrored = decisions(RoleBalance(20.0), RoleLoad(4, 0.5), RoleLoad(4, 8.0), 30)
    assert mirrored == [-move for move in said]


def test_an_imbalance_that_turns_round_moves_nothing() -> None:
    rule = RoleBalance(20.0)
    for at in range(400):
        high, low = RoleLoad(4, 8.0), RoleLoad(4, 0.5)
        first, second = (high, low) if at // 10 % 2 else (low, high)
        assert rule.decide(float(at), first, second, 10.0) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.floats(0, 1e6), st.floats(0, 1e6),
    st.floats(0, 100), st.floats(0.001, 1e6),
)  # fmt: skip
def test_no_role_loses_its_last_node_and_a_move_saves_time(
    prefill: int, decode: int, wait_p: float, wait_d: float, switch_s: float, round_s: float
) -> None:
    rule = RoleBalance(switch_s)
    p, d = RoleLoad(prefill, wait_p), RoleLoad(decode, wait_d)
    for at in (0.0, 1.0, 1e3, 1e9):
        move = rule.decide(at, p, d, round_s)
        assert prefill + move >= 1 and decode - move >= 1
        if move:
            after = p.with_nodes(prefill + move) + d.with_nodes(decode - move)
            assert after < wait_p + wait_d


def test_figures_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="nodes 0 must be at least 1"):
        RoleLoad(0, 1.0)
    with pytest.raises(ValueError, match="switch_s must not be negative"):
        RoleBalance(-1.0)
    with pytest.raises(ValueError, match="reload_s must be finite and not negative"):
        RolesSpec(reload_s=-1.0)
    with pytest.raises(ValueError, match="roles: cannot be simulated together with failures"):
        small(failures=(("pe0", 1.0),), spec={"roles": RolesSpec()})


# ---- machines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dualpath", "split", "oracle"])
@pytest.mark.parametrize("lockstep", [1, 2, 8])
def test_roles_change_and_nothing_is_lost(mode: str, lockstep: int) -> None:
    trajectories = shifting(24)
    spec = small(
        mode, prefill_nodes=2, decode_nodes=3, gpus_per_node=2, prefill_lockstep=lockstep,
        decode_lockstep=lockstep, engine={"decode_step_per_request_s": 0.01},
        spec={"roles": RolesSpec(reload_s=2.0, check_s=1.0)},
    )  # fmt: skip
    sim = Simulation(
        spec, Scripts(trajectories), Plan(None, None, 0, 0.0, 1.0), 1.0, None, None, None
    )
    result = sim.run()
    assert result.requests == 24 * 12 and result.failed == 0 and result.agents_done == 24
    assert result.role_switches
    sim.scheduler.check_integrity()
    assert sim.scheduler.idle
    alive = [node for node in sim.cluster.nodes if node.alive]
    assert len(alive) <= 5 and {node.role for node in alive} == set(Role)
    for node in sim.cluster.nodes:
        node.buffer.settle(float("inf"))
        assert node.buffer.free == pytest.approx(node.buffer.capacity)
    assert all(engine.hbm_bytes == engine.seqs == 0 for engine in sim.cluster.decode.values())
    if mode != "oracle":
        read = result.hit_tokens * sim.token_bytes
        assert sum(result.snic.values()) == pytest.approx(read)


def test_changing_roles_beats_every_fixed_division_of_a_load_that_shifts() -> None:
    trajectories = shifting(60)
    fixed = {}
    for prefill in (1, 2, 3, 4, 5):
        result = simulate(uneven(None, prefill, 6 - prefill), trajectories)
        assert result.role_switches == ()
        fixed[prefill] = result.duration_s
    changing = simulate(uneven(RolesSpec(reload_s=5.0, check_s=1.0), 4, 2), trajectories)
    assert changing.duration_s < min(fixed.values())
    roles = [role for _, _, role in changing.role_switches]
    assert roles.count("decode") > roles.count("prefill")


def test_the_same_changes_every_time() -> None:
    roles = RolesSpec(reload_s=5.0, check_s=1.0)
    first, second = (simulate(uneven(roles, 4, 2), shifting(20)) for _ in range(2))
    assert first.role_switches == second.role_switches
    assert first.duration_s == second.duration_s


# ---- the command -------------------------------------------------------------------------------


def test_trouble_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["simulate", "--preset", "ds-27b-2p2d", "--trace", "32k", "--agents", "6", "--json"]
    assert main.run(base) == 0
    calm = json.loads(capsys.readouterr().out)
    assert main.run([*base, "--straggler", "pe0=0.5", "--straggler", "pe1=0.5"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["ttft_s"]["mean"] > calm["ttft_s"]["mean"]
    assert main.run([*base, "--slow-snic", "de0=0.1", "--fail", "de1@20"]) == 0
    hurt = json.loads(capsys.readouterr().out)
    assert (hurt["requests"], hurt["failed"]) == (calm["requests"], 0)
    assert hurt["jct_s"] > calm["jct_s"]
    assert main.run([*base, "--roles", "30"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == calm["requests"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--straggler", "pe0"), "--straggler: 'pe0' is not NODE=FACTOR, such as pe0=0.5"),
        (("--fail", "de0@soon"), "--fail: 'de0@soon' is not NODE@SECOND, such as pe0@0.5"),
        (("--fail", "de9@3"), "failures: 'de9' at 3.0 s is no moment of a node"),
        (("--slow-snic", "pe0=0"), "snic_scale: 'pe0': 0.0 is no factor of a node"),
        (("--roles", "-3"), "reload_s must be finite and not negative"),
        (("--roles", "30", "--fail", "de0@3"), "roles: cannot be simulated together with"),
    ],
)
def test_trouble_that_cannot_be(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["simulate", "--preset", "ds-27b-1p1d", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
