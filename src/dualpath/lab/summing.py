"""From runs to what they say about each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from dualpath.config import Mode
from dualpath.lab.agreement import MIN_BYTES, TOLERANCE
from dualpath.lab.experiments import BASIC, DUALPATH, ORACLE, PE_ONLY, SPLIT, Case
from dualpath.report.lab.bounds import Balance, pooled_bound
from dualpath.report.lab.results import CaseSummary, Check, Prediction, RunResult, VariantSummary

BOUND_SHARE = 0.9
MAX_OVER_MEAN = 1.10
TPOT_RATIO = 1.10
PREDICTION_ERROR = 0.15
ORACLE_RATIO = 1.10
STORAGE_BUSY = 0.25
_NONE_COMPARED: Final[Mapping[str, bool | None]] = MappingProxyType({})


def readers(case: Case, mode: Mode) -> list[str]:
    """Nodes that read in a mode."""
    prefill = [f"pe{number}" for number in range(case.prefill)]
    decode = [f"de{number}" for number in range(case.decode)]
    return prefill if mode in (Mode.BASIC, Mode.PE_ONLY) else [*prefill, *decode]


def summarise(
    case: Case,
    runs: Sequence[RunResult],
    hit_ratio: float,
    balance: Balance | None,
    predictions: Mapping[str, float],
    tokens_equal: Mapping[str, bool | None] = _NONE_COMPARED,
) -> CaseSummary:
    """A case from the runs that are there.

    Args:
        runs: at least one.
        hit_ratio: of its trace.
        balance: of its cluster, model and trace, if known.
        predictions: the simulator's JCT by variant, seconds.
        tokens_equal: see ``VariantSummary``, by variant.
    """
    by_variant: dict[str, list[RunResult]] = {}
    for variant in case.variants:
        mine = [run for run in runs if run.variant == variant.name]
        if mine:
            by_variant[variant.name] = sorted(mine, key=lambda one: one.repeat)
    variants = {
        name: variant_summary(found, predictions.get(name), tokens_equal.get(name))
        for name, found in by_variant.items()
    }
    return CaseSummary(
        name=case.name,
        prefill=case.prefill,
        decode=case.decode,
        aps=case.aps,
        agents=case.shape.agents,
        hit_ratio=hit_ratio,
        balance=balance,
        variants=variants,
        speedup={
            name: gain
            for name in by_variant
            if (gain := paired(by_variant, case.variants[0].name, name, jct_s)) is not None
        },
        checks=[
            *_speed(case, by_variant),
            *_near_oracle(case, by_variant),
            *_rest(by_variant, variants),
        ],
    )


def variant_summary(
    runs: Sequence[RunResult], predicted_s: float | None, tokens_equal: bool | None = None
) -> VariantSummary:
    """A variant's runs, at least one, taken together."""
    ended = sorted((seconds, at) for at, run in enumerate(runs) if (seconds := run.jct_s))
    median = runs[ended[(len(ended) - 1) // 2][1]] if ended else runs[0]
    prediction = None
    if predicted_s is not None and ended:
        measured_s = statistics.median(seconds for seconds, _ in ended)
        prediction = Prediction(jct_s=predicted_s, error=predicted_s / measured_s - 1)
    return VariantSummary(
        run=median,
        jct_runs_s=[run.jct_s for run in runs],
        prediction=prediction,
        tokens_equal=tokens_equal,
    )


def capacities(cases: Sequence[CaseSummary]) -> dict[str, float]:
    """Of an experiment whose cases are rates of arrivals: see ``Summary.capacity_aps``."""
    rates = sorted((case for case in cases if case.aps is not None), key=lambda one: one.aps or 0.0)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for case in rates for name in case.variants):
        found[name] = 0.0
        for case in rates:
            one = case.variants.get(name)
            if one is None or not one.run.slo_met:
                break
            found[name] = case.aps or 0.0
    return found


def _speed(case: Case, runs: Mapping[str, Sequence[RunResult]]) -> list[Check]:
    bound = pooled_bound(case.prefill, case.decode)
    return [
        Check(
            name=f"busy-speedup.{name}",
            value=paired(runs, name, PE_ONLY.name, _busy_rate),
            target=BOUND_SHARE * bound,
            text="bytes a second from storage over pe-only's, while every node that may read has "
            f"reads waiting; the bound is {bound:.2f}",
        )
        for name in (DUALPATH.name, SPLIT.name)
        if runs.get(name) and runs.get(PE_ONLY.name) and case.aps is None and case.storage_limits
    ]


def _near_oracle(case: Case, runs: Mapping[str, Sequence[RunResult]]) -> list[Check]:
    if case.storage_limits or not runs.get(DUALPATH.name) or not runs.get(ORACLE.name):
        return []
    return [
        Check(
            name="oracle-ratio.dualpath",
            value=paired(runs, DUALPATH.name, ORACLE.name, jct_s),
            target=ORACLE_RATIO,
            at_most=True,
            text="JCT over that of oracle, run by run, where storage is not the limit",
        ),
        Check(
            name="storage-busy.pe-only",
            value=max((run.busy.share for run in runs.get(PE_ONLY.name, ())), default=None),
            target=STORAGE_BUSY,
            at_most=True,
            text="part of the run in which every prefill node had reads waiting: above, storage is "
            "the limit and the ratio to oracle says something else",
        ),
    ]


def _rest(
    runs: Mapping[str, Sequence[RunResult]], variants: Mapping[str, VariantSummary]
) -> list[Check]:
    checks = []
    for name in (DUALPATH.name, SPLIT.name):
        values = [run.snic_max_over_mean for run in runs.get(name, ())]
        known = [value for value in values if value is not None]
        if known:
            checks.append(
                Check(name=f"snic-max-mean.{name}", value=statistics.median(known),
                      target=MAX_OVER_MEAN, at_most=True,
                      text="busiest storage NIC over the mean one; the paper has 1.18, and 1.53 "
                      "with engines in turn")
            )  # fmt: skip
    if runs.get(DUALPATH.name) and runs.get(BASIC.name):
        checks.append(
            Check(
                name="tpot-ratio.dualpath",
                value=paired(runs, DUALPATH.name, BASIC.name, _tpot_s),
                target=TPOT_RATIO,
                at_most=True,
                text="TPOT over that of basic, run by run",
            )
        )
    for name, found in runs.items():
        errors = [run.bytes_error for run in found if run.bytes_error is not None]
        if errors:
            checks.append(
                Check(name=f"bytes.{name}", value=max(errors), target=TOLERANCE, at_most=True,
                      text="the kernel's bytes beside our metrics', storage and compute network")
            )  # fmt: skip
        if (prediction := variants[name].prediction) is not None:
            checks.append(
                Check(name=f"simulator.{name}", value=abs(prediction.error),
                      target=PREDICTION_ERROR, at_most=True,
                      text="the simulator's JCT beside the measured one")
            )  # fmt: skip
    own = [
        run.loopback_bytes for found in runs.values() for run in found
        if run.loopback_bytes is not None
    ]  # fmt: skip
    if own:
        checks.append(
            Check(name="loopback", value=max(0, *own), target=MIN_BYTES, at_most=True,
                  text="most bytes that a node sent to itself, past its NICs, in a run")
        )  # fmt: skip
    return checks


def paired(
    runs: Mapping[str, Sequence[RunResult]],
    one: str,
    other: str,
    value: Callable[[RunResult], float | None],
) -> float | None:
    """Median over repeats of a value of one variant over the other's in the same repeat; None when
    no repeat has both."""
    others = {run.repeat: value(run) for run in runs.get(other, ())}
    ratios = [
        mine / theirs
        for run in runs.get(one, ())
        if (mine := value(run)) is not None and (theirs := others.get(run.repeat))
    ]
    return statistics.median(ratios) if ratios else None


def jct_s(run: RunResult) -> float | None:
    """Mean JCT of a run, seconds."""
    return run.jct_s


def _tpot_s(run: RunResult) -> float | None:
    value: float | None = run.figures["tpot_s"]
    return value


def _busy_rate(run: RunResult) -> float | None:
    return run.busy.rate_bytes_per_s
