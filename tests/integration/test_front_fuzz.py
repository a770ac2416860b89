"""Whatever a client sends is answered, never by a 5xx, and leaves nothing behind.

Bodies are drawn from the front's own OpenAPI document, then spoilt: other types, huge numbers,
deep nesting, missing and unknown fields, broken JSON.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from front_kit import FakeCluster, make_config, running_cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualpath.serve.openapi import document

T = TypeVar("T")
CASES = 150
MANY_CASES = 10_000
SCHEMAS = document("fake")["components"]["schemas"]
PATHS = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"}
# No deadline is under test, and a busy machine must not meet one: four million tokens, made by a
# stand-in in the front's own loop, are 0.4 s of computing, which at a load of 8 took 3 s.
UNHURRIED = {
    "timeouts": {"request": "60s", "admission": "30s"},
    "scheduler": {"report_timeout": "60s"},
}

# ---- the cluster, in a thread of its own ----


class Background:
    """Runs coroutines of a test without a loop in one that lives as long as the module."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 90.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def send(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, bytes], None]]:
    """Posts a body and checks the answer; at the end nothing may be held."""
    background = Background()
    config = make_config(tmp_path_factory.mktemp("fuzz"), **UNHURRIED)
    running = running_cluster(config)
    cluster = background.run(running.__aenter__())
    try:
        yield lambda path, raw: background.run(check(cluster, path, raw))
        background.run(cluster.idle())
        background.run(still_serves(cluster))
    finally:
        background.run(running.__aexit__(None, None, None))
        background.close()


async def check(cluster: FakeCluster, path: str, raw: bytes) -> None:
    async with cluster.http.post(cluster.url + path, data=raw) as response:
        body = await response.read()
        assert 200 <= response.status < 500, body
        if response.status >= 400:
            conforms(json.loads(body), SCHEMAS["Error"])
            return
        if response.content_type == "text/event-stream":
            *events, last = [block for block in body.decode().split("\n\n") if block]
            assert last == "data: [DONE]"
            for event in events:
                error = json.loads(event.removeprefix("data: ")).get("error")
                assert error is None or error["code"] < 500, error
        else:
            assert isinstance(json.loads(body), dict)


async def still_serves(cluster: FakeCluster) -> None:
    status, answer, _ = await cluster.chat("still there?", max_tokens=3)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    await cluster.idle()


def conforms(value: Any, schema: dict[str, Any]) -> None:
    """The little of JSON Schema that an error's form needs."""
    kinds = schema.get("type", "object")
    names = {"object": dict, "string": str, "integer": int, "null": type(None)}
    expected = tuple(names[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))
    assert isinstance(value, expected), (value, schema)
    if isinstance(value, dict):
        assert set(schema["required"]) == value.keys()
        for name, part in schema["properties"].items():
            conforms(value[name], part)


# ---- bodies ----

HUGE = st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**40, -1, 0, 1e308, -1e308, 5e-324])
WORDS = st.sampled_from(
    ["", "fake", "user", "\x00", "\ufffd", "\u202e", "a" * 2000, "true", "{}", "𝕏", "text", "auto"]
)
LEAVES = st.none() | st.booleans() | st.integers() | HUGE | st.floats(allow_nan=False) | WORDS
LEAVES |= st.text(max_size=20)
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | WORDS, inner, max_size=4)
    ),
    max_leaves=12,
)


def of_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that conform, kept short."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([of_schema(one) for one in schema["anyOf"]])
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "string":
            examples = schema.get("examples")
            free = st.text(min_size=schema.get("minLength", 0), max_size=30)
            return free if examples is None else st.sampled_from(examples) | free
        case "integer":
            least = schema.get("minimum", -1000)
            return st.integers(least, min(schema.get("maximum", 40), least + 40))
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum", -2)),
                schema.get("maximum", 2),
                exclude_min="exclusiveMinimum" in schema,
            )
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(of_schema(schema["items"]), min_size=least, max_size=least + 3)
        case "object" if "properties" in schema:
            needed = schema.get("required", [])
            parts = {name: of_schema(part) for name, part in schema["properties"].items()}
            return st.fixed_dictionaries(
                {name: parts[name] for name in needed},
                optional={name: parts[name] for name in parts if name not in needed},
            )
        case "object":
            return st.dictionaries(st.text(max_size=8), JUNK, max_size=3)
    raise AssertionError(schema)


@st.composite
def few_fields(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """A conforming body with some of the optional fields, so that some bodies are answered."""
    needed = schema["required"]
    others = sorted(schema["properties"].keys() - set(needed))
    names = [*needed, *draw(st.lists(st.sampled_from(others), max_size=4, unique=True))]
    return {name: draw(of_schema(schema["properties"][name])) for name in names}


@st.composite
def spoilt(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """A conforming body in which something is wrong."""
    body = draw(few_fields(schema))
    names = st.sampled_from(sorted(schema["properties"])) | st.text(max_size=10)
    for name in draw(st.lists(names, min_size=1, max_size=3)):
        if draw(st.booleans()) and name in body and isinstance(body[name], list) and body[name]:
            place = draw(st.integers(0, len(body[name]) - 1))
            body[name][place] = draw(JUNK)
        elif draw(st.integers(0, 5)) == 0:
            body.pop(name, None)
        else:
            body[name] = draw(JUNK)
    return body


def nested(depth: int, kind: str, name: str) -> bytes:
    opening, closing = ('{"a":', "}") if kind == "object" else ("[", "]")
    inner = opening * depth + "1" + closing * depth
    return f'{{"model":"fake","max_tokens":2,"prompt":"x","{name}":{inner}}}'.encode()


@st.composite
def broken(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """JSON text that has been cut, joined or written over."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(raw)))
        match draw(st.integers(0, 3)):
            case 0:
                del raw[place:]
            case 1:
                raw[place:place] = draw(st.binary(min_size=1, max_size=4))
            case 2:
                raw[place:place] = draw(
                    st.sampled_from([b"NaN", b"1e999", b'"\\ud800"', b"//", b",,", b"\xff", b"]]"])
                )
            case 3:
                del raw[place : place + draw(st.integers(1, 10))]
    return bytes(raw)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body."""
    path = draw(st.sampled_from(sorted(PATHS)))
    schema = SCHEMAS[PATHS[path]]
    match draw(st.integers(0, 9)):
        case 0 | 1:
            body = draw(few_fields(schema))
        case 2:
            return path, draw(broken(draw(few_fields(schema))))
        case 3:
            names = st.sampled_from(["prompt", "messages", "logit_bias", "tools", "x"])
            kind = draw(st.sampled_from(["object", "list"]))
            return path, nested(draw(st.integers(1, 3000)), kind, draw(names))
        case 4:
            return path, json.dumps(draw(JUNK)).encode()
        case 5:
            return path, draw(st.binary(max_size=60))
        case _:
            body = draw(spoilt(schema))
    return path, json.dumps(body).encode()


def fuzzing(cases: int) -> settings:
    return settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.integration
@fuzzing(CASES)
@given(requests())
def test_any_body(send: Callable[[str, bytes], None], request: tuple[str, bytes]) -> None:
    send(*request)


@pytest.mark.fault
@pytest.mark.timeout(3600)
@fuzzing(MANY_CASES)
@given(requests())
def test_ten_thousand_bodies(
    send: Callable[[str, bytes], None], request: tuple[str, bytes]
) -> None:
    send(*request)


@pytest.mark.integration
@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"fake","prompt":"' + b"y" * 4_000_000 + b'"}',
        b'{"model":"fake","prompt":[' + b"1," * 1_000_000 + b"1]}",
        b'{"model":"fake","prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b'{"model":"fake","prompt":"x","n":' + b"9" * 400 + b"}",
        b'{"prompt":' * 50_000,
        b"[" * 1_000_000,
        b'{"model":"' + b"m" * 100_000 + b'","prompt":"x"}',
        b'{"model":"fake","prompt":"x","stop":[' + b'"s",' * 10_000 + b'"s"]}',
        b'{"model":"fake","prompt":"\\ud83d"}',
        b'{"model":"fake","prompt":"x","prompt":[]}',
    ],
    ids=range(10),
)
def test_extremes(send: Callable[[str, bytes], None], raw: bytes) -> None:
    send("/v1/completions", raw)


@pytest.mark.integration
def test_the_document_is_served(tmp_path: Path) -> None:
    async def fetch() -> Any:
        async with running_cluster(make_config(tmp_path)) as cluster:
            served = await cluster.get("/openapi.json")
            for path, item in served["paths"].items():
                url = path.replace("{name}", "fake")
                for method in item:
                    async with cluster.http.request(method, cluster.url + url) as response:
                        assert str(response.status) in item[method]["responses"], (path, method)
            return served

    assert asyncio.run(fetch()) == json.loads(json.dumps(document("fake")))
