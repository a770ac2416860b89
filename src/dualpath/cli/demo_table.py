"""What the demo prints and the line it gives to scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli.demo_runs import (
    SNIC_TOLERANCE,
    cpu_note,
    ratio,
    snic_agree,
    snic_bytes,
)
from dualpath.workload import Comparison, Conversation, ReplayResult

_SAMPLES: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The three runs and what they say about each other."""

    reference: ReplayResult
    basic: ReplayResult
    dualpath: ReplayResult
    tokens: dict[str, Comparison]

    @property
    def tokens_equal(self) -> bool:
        """Whether every token of both modes is the plain vLLM's."""
        return all(verdict.equal for verdict in self.tokens.values())

    @property
    def snic_agree(self) -> bool:
        """Whether both modes read the same from storage, and something at all."""
        return snic_agree(snic_bytes(self.basic), snic_bytes(self.dualpath))

    @property
    def complete(self) -> bool:
        """Whether every agent of every run finished."""
        return self.reference.ok and self.basic.ok and self.dualpath.ok

    @property
    def good(self) -> bool:
        """Whether the demo showed what it is to show."""
        return self.complete and self.tokens_equal and self.snic_agree

    def to_json(self) -> dict[str, Any]:
        """The line that scripts read."""
        basic, dual = self.basic.figures, self.dualpath.figures
        return {
            "tokens_equal": self.tokens_equal,
            "snic_agree": self.snic_agree,
            "jct_ratio": ratio(basic.jct_s, dual.jct_s),
            "first_difference": {
                mode: str(verdict.first) if verdict.first else None
                for mode, verdict in self.tokens.items()
            },
            "reference": self.reference.figures.to_json(),
            "basic": basic.to_json(),
            "dualpath": dual.to_json(),
        }


def show(outcome: Outcome, talks: list[Conversation], snic: str) -> None:
    """Print some answers and the comparison."""
    console = Console()
    _show_samples(outcome, talks, console)
    table = Table(title=f"1 prefill + 1 decode node, each reads {snic}; {cpu_note()}")
    table.add_column("", no_wrap=True)
    for name in ("plain vLLM", "basic", "dualpath", "ratio"):
        table.add_column(name, justify="right")
    plain, basic, dual = (
        run.figures for run in (outcome.reference, outcome.basic, outcome.dualpath)
    )

    def seconds(label: str, *values: float | None) -> None:
        gain = ratio(values[1], values[2])
        shown = [f"{value:.2f} s" if value is not None else "-" for value in values]
        table.add_row(label, *shown, f"{gain:.2f}" if gain else "-")

    seconds("JCT, mean", plain.jct_s, basic.jct_s, dual.jct_s)
    means = [run.ttft_s.mean if run.ttft_s else None for run in (plain, basic, dual)]
    seconds("TTFT, mean", *means)
    seconds("TPOT, mean", plain.tpot_s, basic.tpot_s, dual.tpot_s)
    for node in sorted({*(basic.snic or {}), *(dual.snic or {})}):
        read = [f"{(run.snic or {}).get(node, 0) / 1e6:,.1f} MB" for run in (basic, dual)]
        table.add_row(f"SNIC read, {node}", "", *read, "")
    totals = [snic_bytes(run) for run in (outcome.basic, outcome.dualpath)]
    shown = [f"{total / 1e6:,.1f} MB" if total is not None else "-" for total in totals]
    both = ratio(*totals)
    table.add_row("SNIC read, both", "", *shown, f"{both:.3f}" if both else "-")
    prompts = [f"{run.tokens_in:,}" for run in (plain, basic, dual)]
    table.add_row("prompt tokens", *prompts, "")
    hits = [f"{run.cached_tokens or 0:,}" for run in (basic, dual)]
    table.add_row("  of them read", "", *hits, "")
    same = [
        "equal" if outcome.tokens[mode].equal else "DIFFERENT" for mode in ("basic", "dualpath")
    ]
    table.add_row("answers", f"{plain.tokens_out:,} tokens", *same, "")
    console.print(table)


def _show_samples(outcome: Outcome, talks: list[Conversation], console: Console) -> None:
    """The first answers, as a client of the dualpath run got them."""
    answers = sorted(
        (record for record in outcome.dualpath.records if record.ok and record.round == 0),
        key=lambda record: record.agent,
    )
    questions = {talk.name: talk.users[0] for talk in talks}
    for record in answers[:_SAMPLES]:
        text = " ".join(record.text.split())
        more = "" if record.finish_reason == "stop" else " ..."
        console.print(f"{record.name}: {questions[record.name]}", style="bold", highlight=False)
        console.print(f"  {text}{more}", markup=False, highlight=False)
    console.print()


def say_problems(outcome: Outcome) -> None:
    """Print on stderr what was not as it should be, if anything."""
    for name, run in (
        ("plain vLLM", outcome.reference),
        ("basic", outcome.basic),
        ("dualpath", outcome.dualpath),
    ):
        for record in run.records:
            if not record.ok:
                text = f"{name}: {record.name}, turn {record.round + 1} failed: {record.error}"
                typer.echo(text, err=True)
    for mode, verdict in outcome.tokens.items():
        if verdict.first is not None:
            typer.echo(f"{mode}: tokens differ from plain vLLM's: {verdict.first}", err=True)
    if not outcome.snic_agree:
        basic, dual = snic_bytes(outcome.basic), snic_bytes(outcome.dualpath)
        typer.echo(
            f"the two modes read different amounts from storage: {basic} and {dual} bytes "
            f"(at most {SNIC_TOLERANCE:.0%} apart is right)",
            err=True,
        )
