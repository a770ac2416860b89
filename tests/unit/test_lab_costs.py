"""What probes say about engines, and what the simulator makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_kit import model_folder, ran
from sim_kit import small

from dualpath.config import Mode, Role
from dualpath.lab.costs import Costs, Probes, costs_from, simulated
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import DUALPATH, PE_ONLY, Case, Shape
from dualpath.lab.predicting import predictions, snic_rates
from dualpath.lab.spec import LabSpec
from dualpath.sim import simulate
from dualpath.workload import RequestRecord, Round, Trajectory

pytestmark = pytest.mark.unit

SHAPE = Shape(agents=6, context_tokens=1536, turns=4, append_tokens=64, gen_tokens=8)
FIXED_S, PER_TOKEN_S, STEP_S, ADDED_S, START_S, END_S = 0.05, 0.001, 0.02, 0.002, 0.1, 0.03


def answered(miss: int, batch: int = 1, gen: int = 8) -> RequestRecord:
    """A request as engines of the constants above would answer it."""
    ttft_s = FIXED_S + PER_TOKEN_S * miss
    step_s = STEP_S + ADDED_S * (batch - 1)
    return RequestRecord(
        agent=0, round=0, name="", prompt_digest="", asked_tokens=gen, start_s=0.0,
        prompt_tokens=1536 + miss, cached_tokens=1536, completion_tokens=gen, ttft_s=ttft_s,
        ttst_s=START_S + step_s, tpot_s=step_s,
        total_s=ttft_s + START_S + step_s * (gen - 1) + END_S,
    )  # fmt: skip


def test_costs_are_those_of_the_engines_that_answered() -> None:
    probes = Probes.of(SHAPE)
    found = costs_from(
        probes,
        [answered(64), answered(136)],
        [answered(probes.longer.append_tokens)],
        [answered(64, batch=3)] * 6,
        decode_nodes=2,
    )
    assert found.prefill_tokens_per_s == pytest.approx(1 / PER_TOKEN_S)
    assert found.request_overhead_s == pytest.approx(FIXED_S + END_S)
    assert found.decode_step_s == pytest.approx(STEP_S - ADDED_S)
    assert found.decode_step_per_request_s == pytest.approx(ADDED_S)
    assert found.decode_start_s == pytest.approx(START_S)


def test_probes_that_say_nothing_are_refused() -> None:
    probes = Probes.of(SHAPE)
    with pytest.raises(ValueError, match="different numbers of miss tokens"):
        costs_from(probes, [answered(64)], [answered(64)], [answered(64)], 1)
    short = [answered(64, gen=8)]
    untimed = [RequestRecord(agent=0, round=0, name="", prompt_digest="", asked_tokens=1,
                             start_s=0.0)]  # fmt: skip
    with pytest.raises(ValueError, match="three tokens or more"):
        costs_from(probes, [*short, answered(128)], short, untimed, 1)


def test_what_is_stored_beforehand_is_hit_and_not_computed() -> None:
    told = simulate(small(), simulated(SHAPE))
    assert told.requests == SHAPE.agents * SHAPE.turns
    assert told.tokens_in == SHAPE.prompt_tokens
    # The last token of an answer has no KV: a turn that ends at a block's edge loses that block.
    least = SHAPE.hit_tokens(64) - SHAPE.agents * SHAPE.turns * 64
    assert least <= told.hit_tokens <= SHAPE.hit_tokens(64)


def test_a_stored_context_must_be_a_number_of_tokens() -> None:
    wrong = Trajectory("a", (Round(10, 1, None),), {"stored_tokens": "many"})
    with pytest.raises(ValueError, match="a: stored_tokens must be 0 or more, got 'many'"):
        simulate(small(), [wrong])


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_folder(tmp_path)


def test_rates_are_of_stored_bytes_while_a_nic_is_busy(model: str) -> None:
    config = cluster_of(LabSpec(model))
    pe, de = (config.engines(role)[0][0].name for role in Role)
    alone = ran(Mode.PE_ONLY, {pe: 60_000_000})
    assert snic_rates(config, [alone]) == pytest.approx({pe: 5.76e6, de: 5.76e6})
    both = ran(Mode.DUALPATH, {pe: 60_000_000, de: 50_000_000})
    assert snic_rates(config, [alone, both]) == pytest.approx({pe: 5.76e6, de: 4.8e6})
    assert snic_rates(config, []) == {}


def test_two_nics_are_predicted_to_take_half_the_time_where_storage_decides(model: str) -> None:
    config = cluster_of(LabSpec(model))
    pe, de = (config.engines(role)[0][0].name for role in Role)
    case = Case("1p1d", 1, 1, SHAPE, (PE_ONLY, DUALPATH))
    quick = Costs(prefill_tokens_per_s=1e6, decode_step_s=1e-4, decode_step_per_request_s=0.0,
                  decode_start_s=0.0, request_overhead_s=0.0, context_tokens=1536)  # fmt: skip
    runs = [ran(Mode.DUALPATH, {pe: 60_000_000, de: 60_000_000})]
    found = predictions(case, config, quick, runs, 50e6)
    alone_s = SHAPE.hit_tokens(64) * 4096 / 5.76e6
    # In the last round agents end one after the other, the mean one half a round before the last.
    mean_s = alone_s * (1 - (SHAPE.agents - 1) / (2 * SHAPE.agents * SHAPE.turns))
    assert found["pe-only"] == pytest.approx(mean_s, rel=0.02)
    assert found["pe-only"] / found["dualpath"] == pytest.approx(2.0, rel=0.1)
