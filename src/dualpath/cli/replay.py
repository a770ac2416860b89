"""``dualpath replay``: agents against an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from dualpath.cli.trace import JsonFlag, bad_input
from dualpath.model import ModelFacts, UnsupportedModel
from dualpath.workload.agents import (
    DEFAULT_VOCAB,
    FIRST_PLAIN_ID,
    Agent,
    ChatAgent,
    corpus_conversations,
    token_agents,
)
from dualpath.workload.compare import Comparison, compare
from dualpath.workload.measure import Figures, Spread
from dualpath.workload.options import Progress, ReplayOptions, ReplayResult
from dualpath.workload.records import FILE_NAME, RecordError, read_records
from dualpath.workload.replay import replay
from dualpath.workload.stream import RequestFailed
from dualpath.workload.trace import TraceError, Trajectory, read_trace

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_LINE_EVERY_S = 30.0
_MOST_AGENTS = 1_000_000


def replay_command(
    trace: Annotated[Path, typer.Argument(help="Trace file, .gz or not.")],
    url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint, e.g. http://host:8000.")],
    agents: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_AGENTS,
            help="Agents; more than the trace holds reuse it [all of the trace].",
        ),
    ] = None,
    aps: Annotated[
        float | None, typer.Option(help="Agents arriving a second (Poisson) [all at once].")
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="Limit on mean TTFT, s.")] = 4.0,
    slo_tpot: Annotated[float, typer.Option(help="Limit on mean TPOT, s.")] = 0.05,
    out: Annotated[
        Path | None, typer.Option(help="New folder for requests.jsonl and result.json.")
    ] = None,
    compare_with: Annotated[
        Path | None,
        typer.Option("--compare", help="Earlier --out folder: check that all answers are equal."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Chat with passages of this text instead of sending token ids."),
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(help=f"Draw token ids below this [{DEFAULT_VOCAB}].")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json (or its folder) to take the vocabulary from.")
    ] = None,
    answers: Annotated[
        str,
        typer.Option(
            help="Next prompt's copy of the answer: 'server' (its return_token_ids) or 'stand-in' "
            "(random ids of the same number, for servers without)."
        ),
    ] = "server",
    model: Annotated[str, typer.Option(help="Model name [the endpoint's first].")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token.")] = "",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    latency_scale: Annotated[float, typer.Option(help="Factor on tool latencies.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Deadline of each request, s.")] = 600.0,
    retries: Annotated[
        int, typer.Option(help="Tries after a 5xx or a broken connection, before token 1.")
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Replay the agents of TRACE against an endpoint and measure JCT, TTFT, TTST and TPOT."""
    try:
        with _named("--"):
            options = ReplayOptions(
                url=url, model=model, api_key=api_key, seed=seed, aps=aps,
                latency_scale=latency_scale, timeout_s=timeout, retries=retries,
                slo_ttft_s=slo_ttft, slo_tpot_s=slo_tpot, out=out,
                keep_records=compare_with is not None,
            )  # fmt: skip
        if out is not None and (out / FILE_NAME).exists():
            raise ValueError(f"--out: {out / FILE_NAME}: exists already; name another folder")
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out: {out}: is no folder")
        trajectories = list(islice(read_trace(trace), agents))
        count = len(trajectories) if agents is None else agents
        with _named("--compare: "):
            earlier = list(read_records(compare_with)) if compare_with else None
        if answers not in ("server", "stand-in"):
            raise ValueError(f"--answers: must be 'server' or 'stand-in', got {answers!r}")
        stand_in = answers == "stand-in"
        made: Sequence[Agent]
        if text is not None:
            with _named("--text: "):
                made = _chat_agents(text, trajectories, count, seed, token_ids=not stand_in)
        else:
            size = _vocab(vocab, model_config)
            if size <= FIRST_PLAIN_ID:
                raise ValueError(f"--vocab: must be above {FIRST_PLAIN_ID}, got {size}")
            made = token_agents(trajectories, count, seed, size, stand_in)
    except (TraceError, RecordError, UnsupportedModel, ValueError) as error:
        bad_input(str(error))
    result = _run(made, options)
    verdict = compare(earlier, result.records) if earlier is not None else None
    line = {**result.figures.to_json()}
    if verdict is not None:
        line["tokens_equal"] = verdict.equal
    if out is not None:
        (out / "result.json").write_bytes(msgspec.json.encode(line) + b"\n")
    if json:
        typer.echo(msgspec.json.encode(line).decode())
    else:
        _show(result.figures, verdict)
    if result.figures.first_error is not None:
        typer.echo(f"first failure: {result.figures.first_error}", err=True)
    if verdict is not None and verdict.first is not None:
        typer.echo(f"first difference: {verdict.first}", err=True)
    if result.figures.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.ok or (verdict is not None and not verdict.equal):
        raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    """Name the option in what is wrong with it; ``--`` takes its name from the error, which opens
    with the field's."""
    try:
        yield
    except (ValueError, RecordError) as error:
        text = str(error)
        if option == "--":
            field, _, rest = text.partition(" ")
            text = f"{field.removesuffix('_s').replace('_', '-')}: {rest}"
        raise ValueError(f"{option}{text}") from None


def _run(agents: Sequence[Agent], options: ReplayOptions) -> ReplayResult:
    try:
        with replay_progress("replay") as progress:
            return asyncio.run(_until_interrupted(agents, options, progress))
    except RequestFailed as error:
        typer.echo(f"error: --url: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except RecordError as error:
        bad_input(f"--out: {error}")


async def _until_interrupted(
    agents: Sequence[Agent], options: ReplayOptions, progress: Callable[[Progress], None]
) -> ReplayResult:
    """Replay; the first SIGINT or SIGTERM stops it in order, the second one kills."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, stop_once)
    return await replay(agents, options, progress=progress, stop=stop)


@contextlib.contextmanager
def replay_progress(title: str) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, or a line each half minute where that is no terminal; yields what
    ``replay`` reports to."""
    console = Console(stderr=True)
    said_s = time.monotonic()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, note="")

        def report(now: Progress) -> None:
            nonlocal said_s
            note = f"agents {now.agents_done}/{now.agents_total}, {now.tokens_out} tokens out"
            if now.failed:
                note += f", [red]{now.failed} failed[/red]"
            bar.update(task, completed=now.requests_done, total=now.requests_total, note=note)
            if not console.is_terminal and time.monotonic() - said_s >= _LINE_EVERY_S:
                said_s = time.monotonic()
                done = f"{title}: {now.requests_done}/{now.requests_total} requests, {note}"
                console.print(done, highlight=False, soft_wrap=True)

        yield report


def _vocab(vocab: int | None, model_config: Path | None) -> int:
    if vocab is not None and model_config is not None:
        raise ValueError("--vocab and --model-config: give one of them")
    if model_config is not None:
        with _named("--model-config: "):
            return ModelFacts.from_config_json(model_config).vocab_size
    return DEFAULT_VOCAB if vocab is None else vocab


def _chat_agents(
    path: Path, trajectories: Sequence[Trajectory], count: int, seed: int, *, token_ids: bool
) -> list[ChatAgent]:
    try:
        corpus = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    chosen = (trajectories[number % len(trajectories)] for number in range(count))
    talks = corpus_conversations(corpus, chosen, seed)
    return [ChatAgent(talk, exact=True, token_ids=token_ids) for talk in talks]


def _show(figures: Figures, verdict: Comparison | None) -> None:
    table = Table(title="replay" if figures.mode is None else f"replay, mode {figures.mode}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in (
        ("agents finished", f"{figures.agents_done} of {figures.agents}"),
        ("requests", f"{figures.requests:,}"),
        ("failed", f"{figures.failed:,} {figures.failures or ''}".rstrip()),
        ("not sent", f"{figures.not_sent:,}"),
        ("tokens in", f"{figures.tokens_in:,}"),
        ("  of them cached", _number(figures.cached_tokens)),
        ("tokens out", f"{figures.tokens_out:,}"),
        ("JCT mean / p50 / p99", _spread(figures.jct)),
        ("TTFT mean / p50 / p99", _spread(figures.ttft_s)),
        ("TTST mean", _seconds(figures.ttst_s)),
        ("TPOT mean", _seconds(figures.tpot_s)),
        (
            f"mean TTFT <= {figures.slo.ttft_limit_s:g} s, TPOT <= {figures.slo.tpot_limit_s:g} s",
            f"{'met' if figures.slo.met else 'not met'}, {figures.slo.attained:.1%} within",
        ),
    ):
        table.add_row(name, value)
    for node, read in (figures.snic or {}).items():
        table.add_row(f"SNIC read, {node}", f"{read:,} B")
    for path, hit in (figures.path or {}).items():
        table.add_row(f"hit bytes, {path} path", f"{hit:,} B")
    if verdict is not None:
        equal = "equal" if verdict.equal else f"{verdict.different} of {verdict.requests} differ"
        table.add_row("answers", equal)
    Console().print(table)


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


def _spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.4g} / {value.p50:.4g} / {value.p99:.4g} s"
