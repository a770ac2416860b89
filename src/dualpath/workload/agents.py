"""Agents: what each round asks, given the answers before it.

Two kinds. A ``TokenAgent`` sends token ids, so that every length is exactly the trace's. A
``ChatAgent`` sends text through the chat endpoint, as a real client does; its prompt lengths are
whatever the tokenizer makes of it.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from dualpath.workload.block_tokens import BlockTokens
from dualpath.workload.blocks import has_blocks
from dualpath.workload.stream import Answer, Failure, RequestFailed
from dualpath.workload.trace import Trajectory

FIRST_PLAIN_ID: Final = 100
"""Ids below this are special tokens or raw bytes in most vocabularies; prompts avoid them."""
DEFAULT_VOCAB: Final = 8192
"""Ids are drawn below this unless told otherwise. It lies inside nearly every vocabulary and does
not depend on the endpoint, so that two endpoints get the same prompts."""
WORDS_PER_TOKEN: Final = 0.75


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        path: endpoint.
        body: the request, without ``model`` and streaming options.
        gen_tokens: most tokens of the answer.
        exact: whether the answer must have exactly that many.
        prompt_tokens: length of the prompt; None when only the server knows.
        digest: hash of the prompt, to tell different prompts from different answers.
    """

    path: str
    body: dict[str, Any]
    gen_tokens: int
    exact: bool
    prompt_tokens: int | None
    digest: str


class Agent(Protocol):
    """One conversation. The replay calls ``ask(0), take(0), pause_s(0), ask(1), ...`` in order from
    one task, and stops at the first failure."""

    @property
    def name(self) -> str:
        """Identity in records."""

    @property
    def rounds(self) -> int:
        """How many there are."""

    @property
    def requests(self) -> int:
        """In how many of them ``ask`` gives a request."""

    def ask(self, index: int) -> Ask | None:
        """The request of a round; None when the round only adds context."""

    def take(self, index: int, answer: Answer) -> None:
        """Add an answer to the conversation.

        Raises:
            RequestFailed: the conversation cannot go on from it.
        """

    def pause_s(self, index: int) -> float:
        """Client's time after a round, before scaling."""


class TokenAgent:
    """Replays a trajectory with random tokens; see ``Agent``.

    Appends are drawn from ``random.Random(f"{seed}/{number}/{round}")``: they depend on nothing
    else, and no two agents share a prefix, unless the trace says with block ids which prompts do:
    then agents of the same copy of the trace share those blocks (``block_tokens``).
    """

    def __init__(
        self,
        trajectory: Trajectory,
        number: int,
        seed: int,
        vocab_size: int = DEFAULT_VOCAB,
        stand_in: bool = False,
        copy: int = 0,
    ) -> None:
        """
        Args:
            trajectory: token counts and latencies.
            number: the agent's number in this run.
            seed: of the whole run.
            vocab_size: ids are drawn from ``FIRST_PLAIN_ID`` up to this, exclusive.
            stand_in: continue with random ids in place of the answer's own, for servers that do
                not give them. Blocks of the answers are then never hit.
            copy: how often the trace was used before; other copies share no blocks.

        Raises:
            ValueError: the vocabulary is too small, or the trajectory's block ids make no sense.
        """
        if vocab_size <= FIRST_PLAIN_ID:
            raise ValueError(f"vocab must be above {FIRST_PLAIN_ID}, got {vocab_size}")
        self.name = trajectory.id
        self.rounds = len(trajectory.rounds)
        self.requests = sum(1 for item in trajectory.rounds if item.gen_tokens)
        self._rounds = trajectory.rounds
        self._key = f"{seed}/{number}"
        self._ids = range(FIRST_PLAIN_ID, vocab_size)
        self._stand_in = stand_in
        self._context = array("I")
        self._blocks: BlockTokens | None = None
        if has_blocks(trajectory):
            self._blocks = BlockTokens(trajectory, f"{seed}/{copy}", self._ids)

    def ask(self, index: int) -> Ask | None:
        item = self._rounds[index]
        missing = item.append_tokens
        if self._blocks is not None:
            shared = self._blocks.draw(index, len(self._context), missing)
            self._context.extend(shared)
            missing -= len(shared)
        self._context.extend(self._draw(f"{index}", missing))
        if item.gen_tokens == 0:
            return None
        body: dict[str, Any] = {"prompt": self._context.tolist(), "ignore_eos": True}
        if not self._stand_in:
            body["return_token_ids"] = True
        digest = hashlib.blake2b(self._context.tobytes(), digest_size=16).hexdigest()
        tokens = len(self._context)
        return Ask("/v1/completions", body, item.gen_tokens, True, tokens, digest)

    def take(self, index: int, answer: Answer) -> None:
        if self._stand_in:
            self._context.extend(self._draw(f"{index}/answer", answer.completion_tokens))
        elif answer.token_ids is None:
            raise RequestFailed(
                Failure.NO_IDS,
                "the server gives no token ids for return_token_ids; use stand-in answers",
            )
        else:
            self._context.extend(answer.token_ids)

    def pause_s(self, index: int) -> float:
        return self._rounds[index].tool_latency_s or 0.0

    def _draw(self, part: str, count: int) -> list[int]:
        return random.Random(f"{self._key}/{part}").choices(self._ids, k=count)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Text of one chat agent.

    Attributes:
        name: identity in records.
        users: the user's message of every round.
        max_tokens: of every answer, one number a round.
        system: system prompt; none when empty.
        pauses_s: client's time after each round; none when empty.
    """

    name: str
    users: tuple[str, ...]
    max_tokens: tuple[int, ...]
    system: str = ""
    pauses_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.users or len(self.users) != len(self.max_tokens):
            raise ValueError(
                f"{self.name}: needs one max_tokens for each of at least one user message, got "
                f"{len(self.max_tokens)} for {len(self.users)}"
            )


class ChatAgent:
    """Holds a conversation through the chat endpoint; see ``Agent``."""

    def __init__(
        self, conversation: Conversation, *, exact: bool = False, token_ids: bool = True
    ) -> None:
        """
        Args:
            conversation: what the user says.
            exact: generate exactly ``max_tokens`` (``ignore_eos``); else answers may end earlier.
            token_ids: ask for the answer's token ids, for comparing runs.
        """
        self.name = conversation.name
        self.rounds = len(conversation.users)
        self.requests = sum(1 for tokens in conversation.max_tokens if tokens)
        self._text = conversation
        self._exact = exact
        self._token_ids = token_ids
        self._messages: list[dict[str, str]] = []
        if conversation.system:
            self._messages.append({"role": "system", "content": conversation.system})

    def ask(self, index: int) -> Ask | None:
        self._messages.append({"role": "user", "content": self._text.users[index]})
        gen_tokens = self._text.max_tokens[index]
        if gen_tokens == 0:
            return None
        body: dict[str, Any] = {"messages": list(self._messages)}
        if self._exact:
            body["ignore_eos"] = True
        if self._token_ids:
            body["return_token_ids"] = True
        encoded = msgspec.json.encode(self._messages)
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        return Ask("/v1/chat/completions", body, gen_tokens, self._exact, None, digest)

    def take(self, index: int, answer: Answer) -> None:
        self._messages.append({"role": "assistant", "content": answer.text})

    def pause_s(self, index: int) -> float:
        pauses = self._text.pauses_s
        return pauses[index] if pauses else 0.0


def token_agents(
    trajectories: Sequence[Trajectory],
    count: int,
    seed: int,
    vocab_size: int = DEFAULT_VOCAB,
    stand_in: bool = False,
) -> list[TokenAgent]:
    """``count`` agents; trajectories are used again from the start when there are fewer, with
    other tokens each time."""
    return [
        TokenAgent(
            trajectories[n % len(trajectories)],
            n,
            seed,
            vocab_size,
            stand_in,
            copy=n // len(trajectories),
        )
        for n in range(count)
    ]


def corpus_conversations(
    corpus: str, trajectories: Iterable[Trajectory], seed: int
) -> Iterator[Conversation]:
    """Conversations whose messages are passages of ``corpus``, about as long as the appends.

    Each agent starts at its own place and reads on, from the end to the start again. Lengths are
    approximate: ``WORDS_PER_TOKEN`` words a token.

    Raises:
        ValueError: the corpus has no words.
    """
    words = corpus.split()
    if not words:
        raise ValueError("the text holds no words")
    for number, trajectory in enumerate(trajectories):
        place = random.Random(f"corpus:{seed}/{number}").randrange(len(words))
        users = []
        for item in trajectory.rounds:
            length = max(1, round(item.append_tokens * WORDS_PER_TOKEN))
            users.append(" ".join(words[(place + n) % len(words)] for n in range(length)))
            place += length
        yield Conversation(
            name=trajectory.id,
            users=tuple(users),
            max_tokens=tuple(item.gen_tokens for item in trajectory.rounds),
            pauses_s=tuple(item.tool_latency_s or 0.0 for item in trajectory.rounds),
        )
