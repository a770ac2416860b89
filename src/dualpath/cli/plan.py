"""``dualpath plan``: how many prefill nodes for how many decode nodes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console

from dualpath.cli.common import JsonFlag, bad_input
from dualpath.cli.plan_search import SIMULATED, SearchOptions, search_divisions, template_of
from dualpath.cli.plan_show import show
from dualpath.model import (
    PRESETS,
    KvRecord,
    ModelCost,
    UnsupportedModel,
    cost_from_config_json,
    preset_cost,
)
from dualpath.plan.answer import (
    cluster_answer,
    extra_answer,
    model_answer,
    range_answer,
    search_answer,
    storage_answer,
)
from dualpath.plan.price import Prices
from dualpath.plan.ratio import closed_form
from dualpath.plan.traffic import Node, loads
from dualpath.workload.stats import TraceStats, trace_stats
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Trajectory, read_trace

_BITS: Final = 8
_DEFAULT_MODEL: Final = "ds-v3.2"
_ALIASES: Final = {simulated: model for model, simulated in SIMULATED.items()}
"""The simulator's names of models are understood too."""


def plan_command(
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs (engines) of a node.")],
    snic_gbps: Annotated[float, typer.Option(help="A node's storage NIC, Gbit/s.")],
    cnic_gbps: Annotated[float, typer.Option(help="A GPU's compute NIC, Gbit/s.")],
    memory_gbs: Annotated[float, typer.Option(help="A node's memory bandwidth, GB/s.")],
    decode_gpus: Annotated[
        int | None, typer.Option(min=1, help="Of decode nodes, where they differ.")
    ] = None,
    decode_snic_gbps: Annotated[float | None, typer.Option(help="Likewise, Gbit/s.")] = None,
    decode_cnic_gbps: Annotated[float | None, typer.Option(help="Likewise, Gbit/s.")] = None,
    decode_memory_gbs: Annotated[float | None, typer.Option(help="Likewise, GB/s.")] = None,
    prefill_snics: Annotated[
        str, typer.Option(help="SNICs of the prefill nodes one by one, Gbit/s: 400,400,200.")
    ] = "",
    decode_snics: Annotated[str, typer.Option(help="The same of the decode nodes.")] = "",
    model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PRESETS)}, a config.json or a folder with one [{_DEFAULT_MODEL} "
            "where --nodes or prices need one]."
        ),
    ] = "",
    kv_record: Annotated[
        str, typer.Option(help="Layout of an MLA cache entry: plain, flashmla [the model's].")
    ] = "",
    workload: Annotated[
        str, typer.Option(help=f"Row of Table 2 ({', '.join(ROWS)}) or a trace file.")
    ] = "",
    price_prefill_node: Annotated[
        float | None, typer.Option(min=0, help="Of a prefill node for an hour, any currency.")
    ] = None,
    price_decode_node: Annotated[
        float | None, typer.Option(min=0, help="Of a decode node for an hour.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=2, help="Simulate every division of so many nodes.")
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="Limit of the mean TTFT, s.")] = 4.0,
    slo_tpot: Annotated[float, typer.Option(help="Limit of the mean TPOT, s.")] = 0.05,
    mode: Annotated[str, typer.Option(help="Mode that is simulated.")] = "dualpath",
    warmup: Annotated[float, typer.Option(min=0, help="Simulated s before measuring.")] = 900,
    measure: Annotated[float, typer.Option(min=1, help="Simulated s measured.")] = 600,
    seed: Annotated[int, typer.Option(help="Of simulated arrivals.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Bottleneck-free range of P/D (prefill to decode nodes): ratios at which every storage NIC
    can be saturated before a compute NIC or a memory is. With --nodes and --workload also the
    division of that many nodes that serves most agents within the SLO, by simulation."""
    prefill = _node(gpus_per_node, snic_gbps, cnic_gbps, memory_gbs, "")
    decode = _node(
        gpus_per_node if decode_gpus is None else decode_gpus,
        snic_gbps if decode_snic_gbps is None else decode_snic_gbps,
        cnic_gbps if decode_cnic_gbps is None else decode_cnic_gbps,
        memory_gbs if decode_memory_gbs is None else decode_memory_gbs,
        "decode-",
    )
    prices = _prices(price_prefill_node, price_decode_node)
    if nodes is not None and not workload:
        bad_input("--nodes: needs --workload")
    if prices is not None and not workload:
        bad_input("--price-prefill-node: needs --workload")
    model = _ALIASES.get(model, model)
    if not model and (nodes is not None or prices is not None):
        model = _DEFAULT_MODEL
    cost = _model(model, kv_record)
    options = None
    if nodes is not None:
        if prefill != decode:
            bad_input("--nodes: the simulated nodes are all alike; leave the --decode-... out")
        options = SearchOptions(
            model, mode, prefill, nodes, slo_ttft, slo_tpot, warmup, measure, seed, prices
        )
        template = template_of(options)
    trajectories = _workload(workload) if workload else None
    try:
        stats = None if trajectories is None else trace_stats(trajectories())
        answer: dict[str, Any] = range_answer(prefill, decode)
        if cost is not None:
            answer["model"] = model_answer(cost, stats)
        if stats is not None:
            answer["extra"] = extra_answer(prefill, decode, stats, cost)
            if cost is not None:
                answer["storage_bound"] = _storage(prefill, decode, stats, cost, prices)
        if prefill_snics or decode_snics:
            if not (prefill_snics and decode_snics):
                bad_input("--prefill-snics: needs --decode-snics, and the other way round")
            found = loads(
                _nodes(prefill, prefill_snics, "--prefill-snics"),
                _nodes(decode, decode_snics, "--decode-snics"),
            )
            answer["cluster"] = cluster_answer(found)
    except ValueError as error:
        bad_input(str(error))
    if options is not None and trajectories is not None and stats is not None:
        guess = answer["storage_bound"]["agents_per_s"]
        candidates = search_divisions(options, template, list(trajectories()), stats, guess)
        answer["search"] = search_answer(candidates, closed_form(prefill, decode), warmup)
    if json:
        typer.echo(msgspec.json.encode(answer).decode())
    else:
        show(answer, Console())


def _node(gpus: int, snic_gbps: float, cnic_gbps: float, memory_gbs: float, kind: str) -> Node:
    rates = {"snic-gbps": snic_gbps, "cnic-gbps": cnic_gbps, "memory-gbs": memory_gbs}
    for name, value in rates.items():
        if not 0 < value < float("inf"):
            bad_input(f"--{kind}{name}: must be above 0, got {value:g}")
    snic, cnic, memory = (Fraction(str(value)) for value in rates.values())
    return Node(gpus, snic / _BITS, cnic / _BITS, memory)


def _nodes(like: Node, snics: str, option: str) -> list[Node]:
    found = []
    for text in snics.split(","):
        try:
            gbps = Fraction(text.strip())
        except (ValueError, ZeroDivisionError):
            bad_input(f"{option}: {text!r} is not a number of Gbit/s")
        if gbps <= 0:
            bad_input(f"{option}: must be above 0, got {text!r}")
        found.append(Node(like.gpus, gbps / _BITS, like.cnic_gbs, like.memory_gbs))
    return found


def _model(name: str, record: str) -> ModelCost | None:
    if record and record not in {layout.value for layout in KvRecord}:
        bad_input(f"--kv-record: {record!r} is not one of plain, flashmla")
    if record and not name:
        bad_input("--kv-record: needs --model")
    if not name:
        return None
    layout = KvRecord(record) if record else None
    try:
        if name in PRESETS:
            return preset_cost(name, record=layout)
        if not Path(name).exists():
            bad_input(f"--model: {name!r} is neither a path nor one of {', '.join(PRESETS)}")
        return cost_from_config_json(name, record=layout or KvRecord.PLAIN)
    except UnsupportedModel as error:
        bad_input(f"--model: {error}")


def _prices(prefill: float | None, decode: float | None) -> Prices | None:
    if (prefill is None) != (decode is None):
        bad_input("--price-prefill-node: needs --price-decode-node, and the other way round")
    return None if prefill is None or decode is None else Prices(prefill, decode)


class _Workload:
    """Reads the workload again and again without keeping it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> Iterator[Trajectory]:
        row = ROWS.get(self._name)
        return read_trace(self._name) if row is None else synthesise(row)


def _workload(name: str) -> _Workload:
    if name not in ROWS and not Path(name).exists():
        bad_input(f"--workload: {name!r} is neither a file nor one of {', '.join(ROWS)}")
    return _Workload(name)


def _storage(
    prefill: Node, decode: Node, stats: TraceStats, cost: ModelCost, prices: Prices | None
) -> dict[str, Any]:
    """Of the smallest cluster: one node of each kind."""
    return storage_answer(stats, cost, prefill.snic_gbs + decode.snic_gbs, (1, 1), prices)
