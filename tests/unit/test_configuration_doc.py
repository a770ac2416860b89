"""docs/configuration.md names every field with its default, and its examples are accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpath import config as cluster
from dualpath.config import (
    BufferConfig,
    ClusterConfig,
    EngineConfig,
    FrontConfig,
    LogConfig,
    ModelConfig,
    NicConfig,
    NodeConfig,
    S3Config,
    SchedulerConfig,
    Section,
    SecurityConfig,
    SnicConfig,
    StorageConfig,
    TimeoutConfig,
)
from dualpath.fabric import (
    FabricConfig,
    IbConfig,
    KvClassConfig,
    ModelClassConfig,
    RoceConfig,
    TcpConfig,
)

pytestmark = pytest.mark.unit

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
SECTIONS: dict[str, type[Section]] = {
    "Top level": ClusterConfig,
    "`[model]`": ModelConfig,
    "`[[nodes]]`": NodeConfig,
    "`[nodes.snic]`": SnicConfig,
    "`[nodes.cnic]`": NicConfig,
    "`[front]`": FrontConfig,
    "`[buffers]`": BufferConfig,
    "`[storage]`": StorageConfig,
    "`[storage.s3]`": S3Config,
    "`[scheduler]`": SchedulerConfig,
    "`[timeouts]`": TimeoutConfig,
    "`[security]`": SecurityConfig,
    "`[log]`": LogConfig,
    "`[engine]`": EngineConfig,
    "`[fabric]`": FabricConfig,
    "`[fabric.model]`": ModelClassConfig,
    "`[fabric.kv]`": KvClassConfig,
    "`[fabric.ib]`": IbConfig,
    "`[fabric.roce]`": RoceConfig,
    "`[fabric.tcp]`": TcpConfig,
}


def documented(heading: str) -> dict[str, str]:
    """Field to default, from the table under a heading."""
    _, found, rest = TEXT.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading}"
    table = rest.partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))


def default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field_is_there_with_its_default(heading: str) -> None:
    kind = SECTIONS[heading]
    table = documented(heading)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert list(table) and set(table) == set(fields)
    for name, field in fields.items():
        value, written = default(field), table[name]
        if value is msgspec.NODEFAULT:
            assert written == "required", name
        elif isinstance(value, Section):
            assert written == "see below", name
        else:
            text = written.strip("`")
            data = msgspec.toml.decode("[x]" if text == "{}" else f"x = {text}")
            decoded = msgspec.convert(data["x"], field.type, dec_hook=cluster.decode_unit)
            assert decoded == value, name


def test_no_table_is_unchecked() -> None:
    assert set(re.findall(r"^## (.+)$", TEXT, re.MULTILINE)) == set(SECTIONS)


def test_the_examples_are_accepted() -> None:
    examples = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    parsed = [cluster.parse(msgspec.toml.decode(example)) for example in examples]
    assert len(parsed) == 2
    node, local = parsed[1].engines(cluster.Role.PREFILL)[3]
    assert (node.name, local) == ("p1", 1)
