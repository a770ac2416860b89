"""Models of the time an agent's tools and users take between an answer and the next request."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from dualpath.workload.trace import Round, Trajectory, read_trace

DEFAULT_SIGMA: Final = 1.2
"""Of a log-normal: public coding-agent sessions show a median of 11 s with it."""
SAMPLE: Final = 100_000
"""Latencies kept of a trace that is drawn from."""


class Latency(Protocol):
    """A distribution of seconds, not negative. Pure: all chance comes from ``rng``."""

    def draw(self, rng: random.Random) -> float:
        """One latency."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    seconds: float

    def draw(self, rng: random.Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Most are short, a few very long: what recorded agents show."""

    median_s: float
    sigma: float = DEFAULT_SIGMA

    def draw(self, rng: random.Random) -> float:
        return self.median_s * math.exp(self.sigma * rng.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Exponential:
    """Without memory."""

    mean_s: float

    def draw(self, rng: random.Random) -> float:
        return rng.expovariate(1 / self.mean_s)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equally likely between two limits."""

    least_s: float
    most_s: float

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.least_s, self.most_s)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn from recorded ones."""

    seconds: array[float]

    def draw(self, rng: random.Random) -> float:
        return self.seconds[rng.randrange(len(self.seconds))]


def recorded(trajectories: Iterable[Trajectory], seed: int = 0) -> Empirical:
    """The latencies of a trace; a random ``SAMPLE`` of them where there are more.

    Raises:
        ValueError: it states none.
    """
    rng = random.Random(f"recorded:{seed}")
    kept = array("d")
    count = 0
    for trajectory in trajectories:
        for item in trajectory.rounds:
            if item.tool_latency_s is None:
                continue
            count += 1
            if len(kept) < SAMPLE:
                kept.append(item.tool_latency_s)
            elif (place := rng.randrange(count)) < SAMPLE:
                kept[place] = item.tool_latency_s
    if not kept:
        raise ValueError("the trace states no latencies")
    return Empirical(kept)


_MODELS: Final[dict[str, tuple[str, int, int, Callable[..., Latency]]]] = {
    "constant": ("constant:SECONDS", 1, 1, Constant),
    "lognormal": ("lognormal:MEDIAN[:SIGMA]", 1, 2, LogNormal),
    "exponential": ("exponential:MEAN", 1, 1, Exponential),
    "uniform": ("uniform:LEAST:MOST", 2, 2, Uniform),
}
LATENCY_HELP: Final = ", ".join([usage for usage, *_ in _MODELS.values()] + ["trace:FILE"])


def parse_latency(text: str, seed: int = 0, sigma: float = DEFAULT_SIGMA) -> Latency | None:
    """A model by its name and figures in seconds, e.g. ``lognormal:11:1.2``.

    A bare number is the median of a log-normal with ``sigma``; 0 means none.

    Raises:
        ValueError: one line with what is possible.
        TraceError: the trace to draw from cannot be read.
    """
    name, mark, rest = text.partition(":")
    if not mark:
        (median,) = _figures(text, [text])
        return LogNormal(median, sigma) if median else None
    if name == "trace":
        return recorded(read_trace(rest), seed)
    if name not in _MODELS:
        raise ValueError(f"latency: {name!r} is not one of {LATENCY_HELP}")
    usage, least, most, make = _MODELS[name]
    parts = rest.split(":")
    if not least <= len(parts) <= most:
        raise ValueError(f"latency: {text!r} is not {usage}")
    figures = _figures(text, parts)
    if name == "uniform" and figures[0] > figures[1]:
        raise ValueError(f"latency: {text!r}: the least is above the most")
    if name == "exponential" and not figures[0]:
        return None
    return make(*figures)


def _figures(text: str, parts: list[str]) -> list[float]:
    try:
        figures = [float(part) for part in parts]
    except ValueError:
        raise ValueError(f"latency: {text!r} is not a number or one of {LATENCY_HELP}") from None
    if not all(0 <= figure < math.inf for figure in figures):
        raise ValueError(f"latency: {text!r}: figures must be finite and not negative")
    return figures


def with_latency(
    trajectories: Iterable[Trajectory], latency: Latency, seed: int
) -> Iterator[Trajectory]:
    """The same trajectories with other latencies between their rounds.

    Each trajectory has a random stream of its own, named by seed and place in the file.
    """
    for index, trajectory in enumerate(trajectories):
        rng = random.Random(f"latency:{seed}:{index}")
        rounds = [
            Round(item.append_tokens, item.gen_tokens, latency.draw(rng))
            for item in trajectory.rounds
        ]
        last = rounds[-1]
        rounds[-1] = Round(last.append_tokens, last.gen_tokens, None)  # nothing follows it
        yield replace(trajectory, rounds=tuple(rounds))
