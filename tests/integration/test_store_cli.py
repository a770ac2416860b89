"""``dualpath store`` on real stores."""

import json
from pathlib import Path

import pytest
from storage_kit import LAYOUT, ROOT, chain, filled, path_of, soon

from dualpath.cli import main
from dualpath.storage import BlockStore, scan_blocks
from dualpath.storage.header import HEADER_BYTES

pytestmark = pytest.mark.integration

FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes


@pytest.fixture(params=[0, 10 * FILE_BYTES], ids=["unlimited", "capacity"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "store"
    with BlockStore.open(
        path, LAYOUT, io="threads", direct="off", fsync=False, capacity_bytes=request.param
    ) as opened:
        opened.write(ROOT, chain(4), filled(chain(4)), soon())
        other = chain(2, "x", bytes(32))
        opened.write(bytes(32), other, filled(other), soon())
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    status = main.run(["store", *arguments, "--json"])
    out, err = capsys.readouterr()
    line = json.loads(out.splitlines()[-1]) if out else {}
    assert isinstance(line, dict)
    return status, line, err


def test_stats(
    store: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    status, line, _ = call(capsys, "stats", str(store))
    assert status == 0
    assert (line["blocks"], line["stored_bytes"]) == (6, 6 * FILE_BYTES)
    roots = line["roots"]
    assert isinstance(roots, dict)
    assert {name: root["blocks"] for name, root in roots.items()} == {
        ROOT.hex(): 4,
        bytes(32).hex(): 2,
    }
    limited = "unlimited" not in request.node.name
    account = {"published_bytes": 6 * FILE_BYTES, "reserved_bytes": 0}
    assert line["account"] == (account if limited else None)
    assert main.run(["store", "stats", str(store)]) == 0
    assert f"6 blocks, {6 * FILE_BYTES:,} bytes" in capsys.readouterr().out


def test_fsck_says_what_is_damaged_and_removes_it(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "fsck", str(store))[:2] == (
        0, {"path": str(store), "checked": 6, "corrupt": [], "removed": 0},
    )  # fmt: skip
    damaged = path_of(store, chain(4)[2])
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    status, line, _ = call(capsys, "fsck", str(store))
    assert (status, line["removed"]) == (1, 0)
    corrupt = line["corrupt"]
    assert isinstance(corrupt, list)
    assert [entry["key"] for entry in corrupt] == [chain(4)[2].key.hex()]
    assert main.run(["store", "fsck", str(store)]) == 1
    assert "payload checksum is wrong" in capsys.readouterr().out
    status, line, _ = call(capsys, "fsck", str(store), "--repair")
    assert (status, line["removed"]) == (0, 1)
    assert not damaged.exists()
    status, line, _ = call(capsys, "fsck", str(store))
    assert (status, line["checked"]) == (0, 5)


def test_gc(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, line, _ = call(capsys, "gc", str(store), "--target", f"{2 * FILE_BYTES}B")
    assert status == 0
    assert line["removed_blocks"] == 4
    assert (line["freed_bytes"], line["kept_bytes"]) == (4 * FILE_BYTES, 2 * FILE_BYTES)
    assert len(list(scan_blocks(store))) == 2
    status, line, _ = call(capsys, "gc", str(store), "--target", "0B", "--min-age", "1h")
    assert (status, line["reached"], line["kept_bytes"]) == (1, False, 2 * FILE_BYTES)


def test_the_store_and_target_of_a_cluster_file(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f"""[model]
path = "/m"
[storage]
path = "{store}"
capacity = "{3 * FILE_BYTES}B"
[[nodes]]
name = "p"
role = "prefill"
[[nodes]]
name = "d"
role = "decode"
"""
    )
    status, line, _ = call(capsys, "gc", "--config", str(path))
    assert (status, line["kept_bytes"]) == (0, 3 * FILE_BYTES)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["stats"], "give either"),
        (["fsck", "/nowhere"], "is no store"),
        (["gc", "STORE"], "--target: say"),
        (["gc", "STORE", "--target", "many"], "--target: expected a size"),
        (["gc", "STORE", "--target", "1GB", "--min-age", "5"], "--min-age: expected a duration"),
        (["stats", "STORE", "--config", "x"], "give either"),
        (["stats", "--config", "/nowhere.toml"], "/nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    given = [str(store) if argument == "STORE" else argument for argument in arguments]
    status, line, err = call(capsys, *given)
    assert (status, line) == (2, {})
    assert err.startswith("error: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["stats", "fsck", "gc"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["store", command, "--help"]) == 0
    assert f"Usage: dualpath store {command}" in capsys.readouterr().out
