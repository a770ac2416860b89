"""How ``dualpath plan`` prints its answer for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_SIDE = {"pe_cnic_write": "at least"}


def show(answer: dict[str, Any], console: Console) -> None:
    """Print all parts of the answer that are there."""
    _show_range(answer, console)
    if "model" in answer:
        _show_model(answer["model"], console)
    if "extra" in answer:
        _show_extra(answer["extra"], console)
    if "storage_bound" in answer:
        _show_storage(answer["storage_bound"], console)
    if "cluster" in answer:
        _show_cluster(answer["cluster"], console)
    if "search" in answer:
        _show_search(answer["search"], console)


def _show_range(answer: dict[str, Any], console: Console) -> None:
    if answer["impossible"]:
        names = ", ".join(answer["impossible"])
        console.print(f"no P/D ratio is free of bottlenecks: too slow at every ratio: {names}")
    elif answer["empty"]:
        console.print(
            f"no P/D ratio is free of bottlenecks: at least {answer['pd_min_ratio']} by "
            f"{_by(answer, 'pd_min')}, at most {answer['pd_max_ratio']} by {_by(answer, 'pd_max')}"
        )
    else:
        console.print(
            f"bottleneck-free P/D: {answer['pd_min_ratio']} .. {answer['pd_max_ratio']} "
            f"({answer['pd_min']:.4g} .. {answer['pd_max']:.4g}); bound below by "
            f"{_by(answer, 'pd_min')}, above by {_by(answer, 'pd_max')}"
        )
    table = Table("link", "P/D", title="Bounds: hit bytes at average rates")
    for name, limit in answer["bounds"].items():
        table.add_row(name, f"{_SIDE.get(name, 'at most')} {limit:.4g}")
    for name, met in answer["conditions"].items():
        table.add_row(name, "any" if met else "none: too slow")
    console.print(table)


def _by(answer: dict[str, Any], side: str) -> str:
    return ", ".join(answer["binding"][side]) or "nothing"


def _show_model(model: dict[str, Any], console: Console) -> None:
    line = (
        f"{model['name']}: {model['kv_bytes_per_token']:,} B of KV a token, "
        f"{model['active_parameters'] / 1e9:.2f} B active parameters"
    )
    if "gb_per_pflop" in model:
        line += f"; this workload's turns read {model['gb_per_pflop']:.1f} GB a PFLOP"
    console.print(line, highlight=False)


def _show_extra(extra: dict[str, Any], console: Console) -> None:
    with_all, without = extra["range"], extra["range_without_collectives"]
    console.print(
        f"left out of the bounds, a hit byte: computed KV {extra['miss_per_hit_byte']:.2%}, "
        f"write-back {extra['write_back_per_hit_byte']:.2%}, model communication "
        f"{extra['prefill_collectives_per_hit_byte']:.2%} (PE) and "
        f"{extra['decode_collectives_per_hit_byte']:.2%} (DE). With computed KV and write-back "
        f"counted: {_span(without)}; with communication too: {_span(with_all)}",
        highlight=False,
    )


def _span(found: dict[str, Any]) -> str:
    return "none" if found["empty"] else f"{found['pd_min']:.4g} .. {found['pd_max']:.4g}"


def _show_storage(bound: dict[str, Any], console: Console) -> None:
    line = (
        f"{bound['prefill_nodes']} + {bound['decode_nodes']} nodes with saturated SNICs carry at "
        f"most {bound['agents_per_s']:.3g} agents/s: {bound['tokens_in_per_s']:,.0f} prompt and "
        f"{bound['tokens_out_per_s']:,.0f} answer tokens/s"
    )
    if "cost_per_million_tokens" in bound:
        line += f"; {bound['cost_per_million_tokens']:.4g} a million tokens at best"
    console.print(line, highlight=False)


def _show_cluster(cluster: dict[str, Any], console: Console) -> None:
    table = Table("link", "busiest node", "GB/s", "of", "used", title="The nodes as given")
    for name, load in cluster["links"].items():
        table.add_row(
            name, str(load["node"]), f"{load['gbs']:.4g}", f"{load['capacity_gbs']:.4g}",
            f"{load['utilisation']:.0%}",
        )  # fmt: skip
    console.print(table)
    verdict = "free of bottlenecks" if cluster["bottleneck_free"] else "NOT free of bottlenecks"
    console.print(f"{verdict}; nearest its limit: {cluster['binding']}")


def _show_search(search: dict[str, Any], console: Console) -> None:
    names = ("division", "agents/s", "TTFT s", "TPOT s", "JCT s", "Mtok/s", "per 1M", "in range")
    table = Table(*names, title="Capacity within the SLO, simulated")
    for one in search["candidates"]:
        cost = one["cost_per_million_tokens"]
        figures = (
            ("-",) * 4
            if one["ttft_s"] is None
            else (
                f"{one['ttft_s']:.3f}",
                "-" if one["tpot_s"] is None else f"{one['tpot_s']:.4f}",
                "-" if one["jct_s"] is None else f"{one['jct_s']:,.0f}",
                f"{(one['tokens_in_per_s'] + one['tokens_out_per_s']) / 1e6:.3f}",
            )
        )
        table.add_row(
            f"{one['prefill_nodes']}P{one['decode_nodes']}D", f"{one['aps']:.3g}", *figures,
            "-" if cost is None else f"{cost:.4g}", "yes" if one["bottleneck_free"] else "no",
        )  # fmt: skip
    console.print(table)
    best = search["best"]
    if best is None:
        console.print("no division keeps the SLO at any load tried")
    else:
        console.print(f"best: {best['prefill_nodes']}P{best['decode_nodes']}D")
    if search["warmup_too_short"]:
        console.print("agents live longer than --warmup: these capacities are too high")
