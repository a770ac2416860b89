"""The bottleneck-free range: formula against added-up traffic, and against the paper."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.model import preset_cost
from dualpath.plan.extra import extra_traffic
from dualpath.plan.price import Prices, storage_bound
from dualpath.plan.ratio import busiest, by_traffic, closed_form
from dualpath.plan.traffic import Extra, Link, Node, loads
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import ROWS, regular, synthesise

pytestmark = pytest.mark.unit

PAPER = Node(8, F(50), F(50), F(500))
RATES = st.integers(1, 1600).map(lambda quarters: F(quarters, 4))
NODES = st.builds(Node, st.integers(1, 16), RATES, RATES, RATES.map(lambda rate: rate * 8))


def test_the_papers_cluster() -> None:
    found = closed_form(PAPER, PAPER)
    assert (found.least, found.most) == (F(1, 7), F(7, 2))
    assert found.least_by == (Link.PE_CNIC_WRITE,)
    assert found.most_by == (Link.DE_CNIC_WRITE, Link.DE_DRAM)
    assert not found.empty
    assert {bound.link: bound.most for bound in found.bounds}[Link.DE_CNIC_READ] == 6


@pytest.mark.parametrize("snics", [1, 2, 3])
@pytest.mark.parametrize("gpus", [4, 8])
def test_the_papers_formulas(gpus: int, snics: int) -> None:
    node = Node(gpus, F(50 * snics), F(50), F(2000))
    at = {bound.link: bound for bound in closed_form(node, node).bounds}
    assert at[Link.PE_CNIC_WRITE].least == F(snics, gpus - snics)
    assert at[Link.DE_CNIC_READ].most == F(gpus - 2 * snics, snics)
    assert at[Link.DE_CNIC_WRITE].most == F(gpus - snics, 2 * snics)
    assert at[Link.DE_DRAM].most == (F(2000, 50 * snics) - 3) / 2


def test_the_papers_slip_about_the_read_bound() -> None:
    """``s <= g`` is not enough: with s = 3 of g = 4 the PE cannot read out 2 s bytes."""
    node = Node(4, F(150), F(50), F(10_000))
    assert Link.PE_CNIC_READ in closed_form(node, node).impossible
    assert Link.PE_CNIC_READ in by_traffic(node, node).impossible
    half = Node(4, F(100), F(50), F(10_000))
    assert Link.PE_CNIC_READ not in closed_form(half, half).impossible


@settings(deadline=None, max_examples=50)
@given(NODES, NODES)
def test_formula_and_added_up_traffic_agree(prefill: Node, decode: Node) -> None:
    formula, summed = closed_form(prefill, decode), by_traffic(prefill, decode)
    assert formula.empty == summed.empty
    assert (formula.least, formula.most) == (summed.least, summed.most)
    assert formula.impossible == summed.impossible
    assert (formula.least_by, formula.most_by) == (summed.least_by, summed.most_by)


@settings(deadline=None, max_examples=50)
@given(NODES, NODES, st.integers(1, 5), st.integers(1, 5))
def test_inside_the_range_no_link_is_overfull_and_outside_one_is(
    prefill: Node, decode: Node, p: int, d: int
) -> None:
    worst = busiest(loads([prefill] * p, [decode] * d))
    assert (F(p, d) in closed_form(prefill, decode)) == (worst.utilisation <= 1)


@settings(deadline=None, max_examples=50)
@given(NODES, NODES)
def test_at_its_ends_the_named_link_is_exactly_full(prefill: Node, decode: Node) -> None:
    found = closed_form(prefill, decode)
    for ratio, links in ((found.least, found.least_by), (found.most, found.most_by)):
        if found.empty or ratio == 0 or ratio.numerator > 60:
            continue
        if ratio.denominator > 60:
            continue
        p, d = ratio.numerator, ratio.denominator
        full = {load.link for load in loads([prefill] * p, [decode] * d) if load.utilisation == 1}
        assert set(links) <= full


@settings(deadline=None, max_examples=50)
@given(st.lists(NODES, min_size=1, max_size=4), st.lists(NODES, min_size=1, max_size=4))
def test_bytes_are_neither_made_nor_lost(prefill: list[Node], decode: list[Node]) -> None:
    try:
        found = loads(prefill, decode)
    except ValueError as error:
        assert "cannot be kept busy" in str(error)
        return
    total = {link: sum(load.gbs for load in found if load.link is link) for link in Link}
    pe, de = (sum(node.snic_gbs for node in nodes) for nodes in (prefill, decode))
    assert (total[Link.PE_SNIC], total[Link.DE_SNIC]) == (pe, de)
    assert total[Link.PE_CNIC_WRITE] == pe + de  # every hit byte enters a PE's GPU once
    assert total[Link.PE_CNIC_READ] == 2 * pe
    assert total[Link.DE_CNIC_WRITE] == pe + (pe + de)  # P4, and all of it into a DE's GPU
    assert total[Link.DE_CNIC_READ] == de + (pe + de)
    assert total[Link.DE_DRAM] == 3 * de + 2 * pe
    assert total[Link.DE_SNIC_WRITE] == 0


def test_an_empty_range() -> None:
    starved = Node(8, F(50), F(50), F(100))  # memory carries 100 of the 150 GB/s of D1, D2, D5
    found = closed_form(starved, starved)
    assert found.empty
    assert found.impossible == (Link.DE_DRAM,)
    assert F(1) not in found
    crossed = Node(2, F(50), F(60), F(5000))  # at least 5/7, at most 2/5 (read) and 7/10
    found = closed_form(crossed, crossed)
    assert found.empty
    assert not found.impossible
    assert (found.least, found.most) == (F(5, 7), F(2, 5))


def test_uneven_nodes() -> None:
    slow = Node(8, F(25), F(50), F(500))
    found = loads([PAPER, slow], [PAPER, PAPER])
    share = F(175, 2)
    writes = [load.gbs for load in found if load.link is Link.PE_CNIC_WRITE]
    assert writes == [share, share]
    reads = [load.gbs for load in found if load.link is Link.PE_CNIC_READ]
    assert reads == [100, 50]
    with pytest.raises(ValueError, match="prefill node 1: its SNIC reads 400 GB/s"):
        loads([slow, Node(8, F(400), F(50), F(500))], [slow])
    with pytest.raises(ValueError, match="at least one"):
        loads([], [PAPER])


@pytest.mark.parametrize("field", ["gpus", "snic_gbs", "cnic_gbs", "memory_gbs"])
def test_no_node_is_without_rates(field: str) -> None:
    rates = {"gpus": 8, "snic_gbs": F(50), "cnic_gbs": F(50), "memory_gbs": F(500)} | {field: 0}
    with pytest.raises(ValueError, match=field):
        Node(**rates)  # type: ignore[arg-type]


def test_further_traffic_narrows_the_range() -> None:
    stats = trace_stats(synthesise(ROWS["64k"], 40))
    extra = extra_traffic(stats, preset_cost("ds-v3.2"))
    hits = stats.hit_ratio * stats.tokens_in
    assert float(extra.miss) == pytest.approx((stats.tokens_in - hits) / hits)
    assert float(extra.gen) == pytest.approx(stats.tokens_out / hits)
    bare, full = closed_form(PAPER, PAPER), by_traffic(PAPER, PAPER, extra)
    assert full.least > bare.least
    assert full.most < bare.most
    assert by_traffic(PAPER, PAPER, Extra()).most == bare.most


def test_further_traffic_by_hand() -> None:
    stats = trace_stats(regular(1, 2, 100, 50))  # prompts 100, 250: 150 hits, 200 misses, 100 out
    extra = extra_traffic(stats, None)
    assert float(extra.miss) == pytest.approx(200 / 150)
    assert float(extra.gen) == pytest.approx(100 / 150)
    assert extra.prefill_collectives == 0
    found = {
        load.link: float(load.gbs) for load in loads([PAPER], [PAPER], extra)
    }  # each kind serves 100 GB/s of hits
    assert found[Link.PE_CNIC_READ] == pytest.approx(100 + 100 * 200 / 150)
    assert found[Link.DE_SNIC_WRITE] == pytest.approx(100 * 300 / 150)
    with pytest.raises(ValueError, match="never hits"):
        extra_traffic(trace_stats(regular(3, 1, 100, 50)), None)


def test_prices() -> None:
    stats = trace_stats(regular(1, 2, 100, 50))
    rates = storage_bound(stats, kv_bytes_per_token=1000, read_gbs=0.15)  # 150 kB a trajectory
    assert rates.agents_per_s == pytest.approx(1000)
    assert rates.tokens_in_per_s == pytest.approx(350_000)
    assert rates.tokens_out_per_s == pytest.approx(100_000)
    prices = Prices(prefill_node=10, decode_node=20)
    assert prices.cluster_per_hour(2, 1) == 40
    assert prices.per_million_tokens(2, 1, 1e6) == pytest.approx(40 / 3600)
    with pytest.raises(ValueError, match="above 0"):
        prices.per_million_tokens(1, 1, 0)
