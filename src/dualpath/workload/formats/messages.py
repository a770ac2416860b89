"""Conversations as text: ShareGPT's ``conversations`` and OpenAI's ``messages``.

One object a conversation. Text has no token counts, so they are estimated from its length; such
trajectories are marked ``estimated``. Everything up to an assistant's message is that round's
append; what follows the last one is left out, as nothing was generated from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dualpath.workload.trace import Round, TraceError, Trajectory

CHARS_PER_TOKEN: Final = 4.0
_ASSISTANT: Final = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


class _Message(msgspec.Struct):
    role: str = ""
    sender: str = msgspec.field(default="", name="from")
    value: str = ""
    content: Any = None
    tool_calls: Any = None

    @property
    def author(self) -> str:
        return self.role or self.sender

    @property
    def chars(self) -> int:
        """Length of all its text."""
        return len(self.value) + _chars(self.content) + _chars(self.tool_calls)


class _Conversation(msgspec.Struct):
    id: str | int | None = None
    messages: list[_Message] = []
    conversations: list[_Message] = []
    tools: Any = None


_DECODER: Final = msgspec.json.Decoder(_Conversation)


@dataclass(slots=True)
class Messages:
    """Reads conversations.

    Attributes:
        chars_per_token: for the estimate.
        min_rounds: shorter conversations are dropped.
        dropped: conversations without an answer to a question, or too short, so far.
        clamped: always 0.
    """

    chars_per_token: float = CHARS_PER_TOKEN
    min_rounds: int = 1
    dropped: int = 0
    clamped: int = 0
    _number: int = 0

    def read(self, document: bytes) -> Iterator[Trajectory]:
        """One conversation's trajectory.

        Raises:
            TraceError: ``field: what is wrong``.
        """
        try:
            item = _DECODER.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(str(error)) from None
        field, messages = "messages", item.messages
        if item.conversations:
            field, messages = "conversations", item.conversations
        name = f"chat{self._number:06d}" if item.id in (None, "") else str(item.id)
        self._number += 1
        rounds: list[Round] = []
        waiting = _chars(item.tools)
        for index, message in enumerate(messages):
            if not message.author:
                raise TraceError(f"{field}[{index}]: has neither role nor from")
            # An assistant that speaks first answers nothing: a greeting, so context.
            if message.author in _ASSISTANT and (rounds or waiting):
                append = self._tokens(waiting)
                rounds.append(Round(append, max(1, self._tokens(message.chars)), None))
                waiting = 0
            else:
                waiting += message.chars
        if len(rounds) >= max(1, self.min_rounds):
            yield Trajectory(name, tuple(rounds), {"estimated": True})
        else:
            self.dropped += 1

    def finish(self) -> Iterator[Trajectory]:
        """Nothing: conversations are whole documents."""
        return iter(())

    def _tokens(self, chars: int) -> int:
        return math.ceil(chars / self.chars_per_token)


def _chars(value: Any) -> int:
    """Characters of all strings inside ``value``: content may be parts, tool calls are objects."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_chars(item) for item in value.values())
    if isinstance(value, list):
        return sum(_chars(item) for item in value)
    return 0
