"""The lab's result files: what a run leaves, and what the page and the JSON line are made of.

    DIR/summary.json                     everything but the series
    DIR/CASE/REPEAT-VARIANT/run.json     one run; there only when it is whole
                            samples.jsonl, requests.jsonl

A run that is there is not run again, so that an interrupted experiment goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dualpath.report.lab.bounds import Balance, Busy, Sample

SUMMARY: Final = "summary.json"
RUN: Final = "run.json"
SAMPLES: Final = "samples.jsonl"
T = TypeVar("T")


class ResultError(ValueError):
    """A result folder cannot be used; one line naming file and what to do."""


class NodeBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's NICs carried in a run, by the kernel's counters."""

    snic_rx_bytes: int
    snic_tx_bytes: int
    cnic_rx_bytes: int
    cnic_tx_bytes: int


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run.

    Attributes:
        case, variant, repeat: which; mode, policy: how it was run.
        figures: as ``replay`` prints them.
        nics: the kernel's bytes by node; snic_metric_bytes: file bytes read as our metrics have
            them, by node.
        busy: see ``bounds.busy``.
        snic_max_over_mean: see ``bounds.max_over_mean``.
        bytes_error: largest difference between the kernel's bytes, less headers, and those of our
            metrics, as part of them: storage read and written by node, KV between engines; None
            where nothing was moved.
        loopback_bytes: most that a node sent to itself; None where it was not looked at.
        ttft_split_s: mean seconds of a request's phases up to token 1.
        cpu_s: CPU seconds by process.
        ended: why agents did not all finish, where that is a result: they came faster than they
            could be served. Empty when all did.
    """

    case: str
    variant: str
    repeat: int
    mode: str
    policy: str
    figures: dict[str, Any]
    nics: dict[str, NodeBytes]
    snic_metric_bytes: dict[str, int]
    busy: Busy
    snic_max_over_mean: float | None
    bytes_error: float | None
    ttft_split_s: dict[str, float]
    cpu_s: dict[str, float]
    loopback_bytes: int | None = None
    ended: str = ""

    @property
    def jct_s(self) -> float | None:
        """Mean JCT, seconds; None when not all agents finished, because a mean over those that did
        says nothing."""
        return None if self.ended else self.figures["jct_s"]

    @property
    def slo_met(self) -> bool:
        """Whether all agents finished, within the limits on TTFT and TPOT."""
        return not self.ended and bool((self.figures.get("slo") or {}).get("met"))

    @property
    def folder(self) -> str:
        """Where it lies, below the experiment's folder."""
        return run_folder(self.case, self.variant, self.repeat)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that has a target.

    Attributes:
        name: ``what.variant``.
        value: measured; None when it could not be.
        target: ``value`` must be at least this, or at most where ``at_most``.
        text: what it is, for people.
    """

    name: str
    value: float | None
    target: float
    at_most: bool = False
    text: str = ""

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        if self.value is None:
            return False
        return self.value <= self.target if self.at_most else self.value >= self.target


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The simulator's JCT of a variant. ``error`` is signed, relative to the measurement."""

    jct_s: float
    error: float


class VariantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A variant's runs taken together: those figures are the run's with the median JCT.

    Attributes:
        run: that run; of runs that did not end, the first, when no other is there.
        jct_runs_s: mean JCT of every run, in order; None for one that did not end.
        prediction: of the simulator; None where it was not asked.
        tokens_equal: whether every run gave the plain vLLM's tokens; None where nothing could be
            compared, and for oracle, which has no KV and whose tokens therefore mean nothing.
    """

    run: RunResult
    jct_runs_s: list[float | None]
    prediction: Prediction | None = None
    tokens_equal: bool | None = None


class CaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A case.

    Attributes:
        name, prefill, decode, aps: see ``experiments.Case``.
        agents, hit_ratio: of its trace.
        balance: see ``bounds.Balance``; None while the engines' costs are not known.
        variants: those with a run, in the experiment's order.
        speedup: median over repeats of the first variant's JCT over this one's, by variant.
        checks: targets.
    """

    name: str
    prefill: int
    decode: int
    aps: float | None
    agents: int
    hit_ratio: float
    balance: Balance | None
    variants: dict[str, VariantSummary]
    speedup: dict[str, float]
    checks: list[Check]


class IsolationResult(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces between two nodes, alone or beside KV.

    Attributes:
        name: ``solo``, ``on`` (KV in its own class) or ``off`` (KV in the model's class).
        ops: all-reduces; nbytes: of each.
        bytes_per_s: ``nbytes`` over the mean time of one.
        p50_s, p99_s: of one all-reduce.
        kv_bytes_per_s: KV written by both nodes together.
    """

    name: str
    ops: int
    nbytes: int
    bytes_per_s: float
    p50_s: float
    p99_s: float
    kv_bytes_per_s: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong while an experiment ran.

    Attributes:
        where: which run, or what else was done.
        what: one line.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment as far as it has come.

    Attributes:
        experiment, title: see ``experiments.Experiment``.
        machine: what it ran on.
        snic_bytes_per_s, cnic_bytes_per_s: of a node, each way.
        tokens_equal: whether every run gave the tokens of the plain vLLM, oracle left out; None
            without engines, and while some are not compared.
        first_difference: where not; empty when equal.
        cases: those with a run, in order.
        isolation, isolation_checks: of the experiment of that name.
        failures: runs and other steps that failed the last time the command was given.
        skipped: runs that were left out on purpose, and why.
        capacity_aps: where agents arrive at several rates, the highest of a variant up to which
            every rate met the limits on TTFT and TPOT; 0.0 when the lowest did not.
    """

    experiment: str
    title: str
    machine: str
    snic_bytes_per_s: float
    cnic_bytes_per_s: float
    tokens_equal: bool | None
    first_difference: str
    cases: list[CaseSummary]
    isolation: list[IsolationResult] = []
    isolation_checks: list[Check] = []
    failures: list[Failure] = []
    skipped: list[str] = []
    capacity_aps: dict[str, float] = {}

    def to_json(self) -> dict[str, Any]:
        """The line that scripts read: the variants of the first case by name, each with
        ``replay``'s keys, and everything of all cases."""
        first = self.cases[0].variants if self.cases else {}
        modes = {
            name: {**one.run.figures, "tokens_equal": one.tokens_equal}
            for name, one in first.items()
        }
        whole = msgspec.to_builtins(self)
        for case, described in zip(self.cases, whole["cases"], strict=True):
            described["checks"] = _judged(case.checks)
        whole["isolation_checks"] = _judged(self.isolation_checks)
        return {**whole, **modes}


def readable(value: float) -> str:
    """A figure in three digits, or whole where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3g}"


def _judged(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [{**msgspec.to_builtins(check), "met": check.met} for check in checks]


def run_folder(case: str, variant: str, repeat: int) -> str:
    """Where a run lies, below the experiment's folder."""
    return f"{case}/{repeat}-{variant}"


def read(path: Path, kind: type[T]) -> T:
    """A JSON file of one of the types above.

    Raises:
        ResultError: it is not there, or not such a file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: not written by 'dualpath lab run': {error}") from None


def write(path: Path, value: object) -> None:
    """A JSON file, whole or not at all.

    Raises:
        ResultError: it cannot be written.
    """
    _write_whole(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ResultError(f"{path}: cannot be written: {os.strerror(error.errno or 0)}") from None


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """One line a sample; whole or not at all.

    Raises:
        ResultError: it cannot be written.
    """
    _write_whole(path, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))


def read_samples(path: Path) -> list[Sample]:
    """What ``write_samples`` wrote.

    Raises:
        ResultError: it is not there, or something else.
    """
    try:
        return [msgspec.json.decode(line, type=Sample) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: not samples of 'dualpath lab run': {error}") from None
