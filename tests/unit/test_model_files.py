"""Models that no engine could open are refused at once, in one line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dualpath.config import ConfigError
from dualpath.engine.model_files import check_model

pytestmark = pytest.mark.unit

REST = ("config.json", "tokenizer.json", "model.safetensors")


def refused(model: object, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(str(model), **more)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("model.path: ")
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in REST:
        (path / name).write_text("{}")
    return path


def test_a_whole_folder_passes(folder: Path) -> None:
    check_model(str(folder))


@pytest.mark.parametrize(
    ("missing", "text", "argument"),
    [
        ("config.json", "has no config.json", ""),
        ("tokenizer.json", "has no tokenizer", "--tokenizer=elsewhere"),
        ("model.safetensors", "has no weights", "--load-format"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, missing: str, text: str, argument: str) -> None:
    (folder / missing).unlink()
    assert text in refused(folder)
    if argument:
        check_model(str(folder), extra_args=[argument, "x"])
    (folder / missing).symlink_to("nowhere")  # a download that was cut short
    assert text in refused(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_config_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "config.json" in refused(folder)


@pytest.mark.parametrize(
    "name", ["/no/such", "./no", "../no", "~/no", "a/b/c", "", "a b", "a/../b"]
)
def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(name: str) -> None:
    assert "there is no folder" in refused(name, env={"HF_ENDPOINT": "http://127.0.0.1:9"})


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "is a file" in refused(folder / "config.json")


def test_the_cache_is_enough(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in refused("org/m", env=env)
    stored = tmp_path / "hub" / "models--org--m"
    for part in ("refs", "snapshots/abc"):
        (stored / part).mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    assert "HF_HUB_OFFLINE" in refused("org/m", env=env)  # begun, not whole
    (stored / "snapshots/abc/config.json").write_text("{}")
    check_model("org/m", env=env)
    check_model("org/m", env=env, revision="abc")
    assert "HF_HUB_OFFLINE" in refused("org/m", env=env, revision="other")


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        known = self.path == "/org/m/resolve/main/config.json"
        gated = self.path.startswith("/org/gated/")
        allowed = self.headers.get("Authorization") == "Bearer secret"
        status = 200 if known or (gated and allowed) else 401 if gated else 404
        self.send_response(500 if "broken" in self.path else status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


def test_the_hub_is_asked(env: dict[str, str]) -> None:
    check_model("org/m", env=env)
    assert "no such model" in refused("org/typo", env=env)
    assert "at revision v2" in refused("org/m", env=env, revision="v2")
    assert "set HF_TOKEN" in refused("org/gated", env=env)
    check_model("org/gated", env=env | {"HF_TOKEN": "secret"})
    assert "cannot be asked: HTTP 500" in refused("org/broken", env=env)


def test_a_hub_that_cannot_be_reached_is_said_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        port = silent.getsockname()[1]
        env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
        started_s = time.monotonic()
        assert "cannot be asked" in refused("org/m", env=env, ask_s=0.5)
        assert time.monotonic() - started_s < 10
    assert "Connection refused" in refused("org/m", env=env)
