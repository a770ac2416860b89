"""What several modules share and is made once: a running S3 server, and 3FS's stand-in."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import CREDENTIALS, S3Server, running_server
from store_kinds import build_shim


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server process with a bucket; whoever asks for it has credentials."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: make setup")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with running_server(tmp_path_factory.mktemp("s3")) as server:
            yield server


@pytest.fixture(scope="session")
def usrbio_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the same C ABI as 3FS's client."""
    library = build_shim(tmp_path_factory.mktemp("usrbio"))
    if library is None:
        pytest.skip("no C compiler to build the stand-in for 3FS's library with")
    return library
