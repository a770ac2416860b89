"""The demo's conversations, from ``demo_talks.toml``."""

from __future__ import annotations

import importlib.resources
from typing import Final

import msgspec

from dualpath.workload import ChatAgent, Conversation

_FILE: Final = "demo_talks.toml"


class _Talk(msgspec.Struct, forbid_unknown_fields=True):
    subject: str
    text: str
    questions: list[str]


class _Talks(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    talks: list[_Talk]


def conversations(agents: int, turns: int, answer_tokens: int) -> list[Conversation]:
    """Agents that have read a text and ask ``turns`` questions about it.

    Texts are used again when there are more agents than texts. The user's name stands first, so
    that no two agents share stored blocks and every agent's hits are its own.
    """
    raw = importlib.resources.files("dualpath.cli").joinpath(_FILE).read_bytes()
    source = msgspec.toml.decode(raw, type=_Talks)
    made = []
    for number in range(agents):
        talk = source.talks[number % len(source.talks)]
        name = source.names[number % len(source.names)]
        title = name if number < len(source.names) else f"{name} {number // len(source.names) + 1}"
        questions = talk.questions
        made.append(
            Conversation(
                name=f"{title}, {talk.subject}",
                system=(
                    f"You are talking with {title} about {talk.subject}. Answer in one or two "
                    f"short sentences, from this text:\n\n{talk.text}"
                ),
                users=tuple(questions[turn % len(questions)] for turn in range(turns)),
                max_tokens=(answer_tokens,) * turns,
            )
        )
    return made


def agents_of(talks: list[Conversation]) -> list[ChatAgent]:
    """Fresh agents for one run."""
    return [ChatAgent(talk) for talk in talks]
