"""The API over TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front_kit import PATIENCE_S, make_config, running_front

from dualpath.config import ConfigError, Role
from dualpath.serve.local import answers

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A self-made certificate for localhost, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "front.crt", folder / "front.key"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return {"tls_cert_file": str(certificate), "tls_key_file": str(key)}


async def test_https_and_nothing_else(tmp_path: Path, files: dict[str, str]) -> None:
    config = make_config(tmp_path, security=files)
    trusting = ssl.create_default_context(cafile=files["tls_cert_file"])
    async with running_front(config) as cluster:
        assert cluster.url.startswith("https://127.0.0.1:")
        assert not await answers(f"{cluster.url}/ready")
        assert await answers(f"{cluster.url}/health")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await cluster.http.get(cluster.url + "/health")
        plain = cluster.url.replace("https://", "http://")
        with pytest.raises(aiohttp.ClientError):
            await cluster.http.get(plain + "/health")
        for role in Role:
            engine = cluster.engine(role, 0)
            cluster.engines[engine.name] = engine
            await engine.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as http:
            async with asyncio.timeout(PATIENCE_S):
                while (await http.get(cluster.url + "/ready")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            body = {"prompt": "hello", "max_tokens": 3, "stream": True}
            async with http.post(cluster.url + "/v1/completions", json=body) as response:
                events = [event for event in (await response.text()).split("\n\n") if event]
        assert events[-1] == "data: [DONE]"
        finish = json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert finish == "length"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("missing", "security.tls_key_file: .*No such file"),
        ("swapped", "security.tls_cert_file, tls_key_file: not a PEM certificate"),
        ("garbage", "security.tls_cert_file, tls_key_file: not a PEM certificate"),
    ],
)
async def test_files_that_do_not_fit(
    tmp_path: Path, files: dict[str, str], harm: str, says: str
) -> None:
    security = dict(files)
    match harm:
        case "missing":
            security["tls_key_file"] = str(tmp_path / "nowhere")
        case "swapped":
            security["tls_cert_file"], security["tls_key_file"] = (
                files["tls_key_file"], files["tls_cert_file"],
            )  # fmt: skip
        case "garbage":
            (tmp_path / "x").write_text("hello")
            security["tls_cert_file"] = str(tmp_path / "x")
    with pytest.raises(ConfigError, match=says):
        async with running_front(make_config(tmp_path, security=security)):
            pass


@pytest.mark.parametrize("field", ["tls_cert_file", "tls_key_file"])
def test_both_or_neither(tmp_path: Path, field: str) -> None:
    only: dict[str, Any] = {field: "x"}
    with pytest.raises(ConfigError, match="set both, or neither"):
        make_config(tmp_path, security=only)
