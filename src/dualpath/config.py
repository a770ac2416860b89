"""The cluster description: one typed TOML file that everything else takes parts of.

Every value is checked when it is read. A wrong field, type, unit or value raises ``ConfigError``
whose text is one line naming the field, what stood there and what would be right. Sizes, rates
and durations carry their unit in the file (``"64MiB"``, ``"400Mbit/s"``, ``"50ms"``), because a
bare number is how a cluster ends up with a NIC limit a thousand times off.
"""

from __future__ import annotations

import enum
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class ConfigError(ValueError):
    """The description cannot be used; the message is one line that says what to change."""


class Size(int):
    """A number of bytes, written ``"64MiB"``, ``"80GB"`` or ``"4096B"``."""


class Rate(float):
    """Bytes a second, written ``"400Mbit/s"``, ``"50Gbit/s"``, ``"1.5GB/s"`` or ``"unlimited"``."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return not math.isinf(self)


class Seconds(float):
    """A duration, written ``"4s"``, ``"300ms"`` or ``"2min"``."""


_NUMBER: Final = r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*"
_SIZE_UNITS: Final[dict[str, float]] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_RATE_UNITS: Final[dict[str, float]] = {
    "bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8,
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9,
    "KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30,
}  # fmt: skip
_TIME_UNITS: Final[dict[str, float]] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _parse(kind: str, text: object, units: dict[str, float], example: str) -> float:
    if not isinstance(text, str):
        raise ValueError(f"expected a {kind} with a unit such as {example!r}, got {text!r}")
    match = re.fullmatch(_NUMBER + r"([A-Za-z/]+)\s*", text)
    if match is None or match[2] not in units:
        raise ValueError(
            f"expected a {kind} such as {example!r} (units: {', '.join(units)}), got {text!r}"
        )
    return float(match[1]) * units[match[2]]


def parse_size(text: object) -> Size:
    """Bytes from ``"64MiB"``.

    Raises:
        ValueError: not a number with a known unit, or not a whole number of bytes.
    """
    value = _parse("size", text, _SIZE_UNITS, "64MiB")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return Size(int(value))


def parse_rate(text: object) -> Rate:
    """Bytes a second from ``"400Mbit/s"``; ``"unlimited"`` gives infinity.

    Raises:
        ValueError: not a positive number with a known unit.
    """
    if text == "unlimited":
        return Rate(math.inf)
    value = _parse("rate", text, _RATE_UNITS, "400Mbit/s")
    if value <= 0:
        raise ValueError(f"a rate must be above zero or 'unlimited', got {text!r}")
    return Rate(value)


def parse_seconds(text: object) -> Seconds:
    """Seconds from ``"300ms"``.

    Raises:
        ValueError: not a number with a known unit.
    """
    return Seconds(_parse("duration", text, _TIME_UNITS, "300ms"))


_PARSERS: Final = {Size: parse_size, Rate: parse_rate, Seconds: parse_seconds}


def _decode_hook(kind: type, value: object) -> object:
    parser = _PARSERS.get(kind)
    if parser is None:
        raise NotImplementedError(kind)
    return value if isinstance(value, kind) else parser(value)


class Mode(enum.Enum):
    """How a cluster loads KV; see docs/dataflow.md."""

    BASIC = "basic"
    PE_ONLY = "pe-only"
    DUALPATH = "dualpath"
    SPLIT = "split"
    ORACLE = "oracle"


class Role(enum.Enum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


class LogFormat(enum.Enum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Base of every table: immutable, no unknown fields."""


class ModelConfig(Section, frozen=True):
    """What is served.

    Attributes:
        path: folder with config.json, weights and tokenizer, or a Hugging Face name.
        served_name: name in the API; the last part of ``path`` when empty.
        revision: weights revision, part of every block's key.
        dtype: element type of weights and KV.
        max_model_len: longest prompt plus answer, in tokens.
    """

    path: str
    served_name: str = ""
    revision: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: PositiveInt = 4096

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_name or Path(self.path).name


class NicConfig(Section, frozen=True):
    """One NIC as an engine sees it.

    Attributes:
        device: interface name given to the transfer library; empty leaves the choice to it.
        rate: link rate per direction, enforced by us when limited.
        ports: ``"low-high"`` TCP ports for transfers; empty for any.
    """

    device: str = ""
    rate: Rate = Rate(math.inf)
    ports: Annotated[str, Meta(pattern=r"^([0-9]+-[0-9]+)?$")] = ""


class SnicConfig(Section, frozen=True):
    """A node's storage NIC: limits shared by all its engines.

    Attributes:
        read: most bytes a second read from storage, all engines of the node together.
        write: the same for writes (NICs are full duplex).
    """

    read: Rate = Rate(math.inf)
    write: Rate = Rate(math.inf)


class NodeConfig(Section, frozen=True):
    """One machine: engines of one role.

    Attributes:
        name: unique; appears in metrics and results.
        role: prefill or decode.
        engines: number of engines (one per GPU).
        host: address its engines listen on; loopback unless set.
        base_port: first engine's HTTP port, the next ones follow; 0 picks free ports (``up`` only).
        snic, cnic: the node's NICs.
    """

    name: Name
    role: Role
    engines: PositiveInt = 1
    host: str = "127.0.0.1"
    base_port: Port = 0
    snic: SnicConfig = SnicConfig()
    cnic: NicConfig = NicConfig()


class BufferConfig(Section, frozen=True):
    """Host memory of one engine used for staging KV.

    Attributes:
        prefill: PE buffer: hit blocks read by the PE, kept until the prefill ends.
        decode: DE buffer: whole prompts waiting for HBM.
        landing: part of a PE's memory where Layer Blocks from a DE land before they go to HBM.
        persist: part of a DE's memory from which finished blocks are written.
    """

    prefill: Size = Size(1 << 30)
    decode: Size = Size(1 << 30)
    landing: Size = Size(64 << 20)
    persist: Size = Size(64 << 20)


class StorageConfig(Section, frozen=True):
    """The persistent store, a directory every node reaches.

    Attributes:
        path: the directory; made when missing.
        io: ``nixl`` (NIXL's POSIX plugin), ``threads`` (preadv/pwritev pool) or ``auto``: nixl
            where it loads.
        direct: bypass the page cache with O_DIRECT: ``auto`` where the file system takes it.
        capacity: most bytes kept; 0B for no limit.
        batch_blocks: most blocks in one read or write submission.
        fsync: wait for stable storage before a block is published.
    """

    path: str = "dualpath-store"
    io: Literal["auto", "nixl", "threads"] = "auto"
    direct: Literal["auto", "on", "off"] = "auto"
    capacity: Size = Size(0)
    batch_blocks: PositiveInt = 32
    fsync: bool = True


class SchedulerConfig(Section, frozen=True):
    """Thresholds of the request scheduler; measured ones are written by ``dualpath profile``.

    Attributes:
        policy: name in the policy registry: ``paper``, ``round_robin``, ``pe_only``, ``split``;
            empty takes the mode's own.
        alpha_tokens: a disk read queue above this many tokens is long (what a SNIC reads in 3 s).
        beta_tokens: an engine with more assigned tokens than this is overloaded.
        z_factor: slack on the average load in the DE's second phase.
        fetch_interval: how often a group's leader reports and fetches.
        report_timeout: an engine silent for longer gets no new work.
        compute_quota: most seconds of attention in a prefill step (needs a profile).
        profile: file written by ``dualpath profile``; its alpha and beta replace those above.
        decision_log: file to which every decision is appended as a JSON line; empty for none.
    """

    policy: str = ""
    alpha_tokens: PositiveInt = 300_000
    beta_tokens: PositiveInt = 1_000_000
    z_factor: Annotated[float, Meta(ge=1.0)] = 1.05
    fetch_interval: Seconds = Seconds(0.05)
    report_timeout: Seconds = Seconds(3.0)
    compute_quota: Seconds = Seconds(0.3)
    profile: str = ""
    decision_log: str = ""


class TimeoutConfig(Section, frozen=True):
    """Deadlines. Every wait in the system has one.

    Attributes:
        request: whole request, arrival to last token.
        admission: waiting for an engine and buffer room.
        storage: one batch of block reads or writes.
        transfer: one submission between PE and DE.
        layer: a layer waiting for its KV before the prefill gives the load up and recomputes.
        durable: the end of a turn waiting for its blocks to be published.
        connect: handshake and HTTP connection to an engine.
        drain: orderly shutdown.
    """

    request: Seconds = Seconds(600.0)
    admission: Seconds = Seconds(120.0)
    storage: Seconds = Seconds(30.0)
    transfer: Seconds = Seconds(10.0)
    layer: Seconds = Seconds(15.0)
    durable: Seconds = Seconds(30.0)
    connect: Seconds = Seconds(10.0)
    drain: Seconds = Seconds(10.0)


class FrontConfig(Section, frozen=True):
    """Where clients and engines reach the front.

    Attributes:
        host, port: the OpenAI API; port 0 picks a free one (``up`` only).
        control_host, control_port: where engines connect; port 0 picks a free one (``up`` only).
        max_retries: times a request is tried on other engines after an engine fails under it.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    control_host: str = "127.0.0.1"
    control_port: Port = 8001
    max_retries: Annotated[int, Meta(ge=0, le=8)] = 2


class LogConfig(Section, frozen=True):
    """What the front and the engines log, on standard error or where ``up`` puts it.

    Attributes:
        format: ``text``, or ``json`` for one object a line.
        level: least severe lines that are written: ``info`` has one line per request.
    """

    format: LogFormat = LogFormat.TEXT
    level: Literal["debug", "info", "warning", "error"] = "info"


class SecurityConfig(Section, frozen=True):
    """Who may call.

    Attributes:
        api_keys: bearer token to tenant; empty lets everyone in as one tenant.
        admin_key: bearer token for the weight-epoch and debug endpoints; empty leaves them open on
            loopback and closed elsewhere.
        control_secret_file: file whose content engines must present to the front.
        tls_cert_file: certificate chain of the API (PEM); with it the API speaks HTTPS only.
        tls_key_file: its private key (PEM).
    """

    api_keys: dict[str, str] = {}
    admin_key: str = ""
    control_secret_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file: set both, or neither")


class EngineConfig(Section, frozen=True):
    """How vLLM is started.

    Attributes:
        kv_cache: HBM (or CPU memory) for KV, per engine.
        block_tokens: tokens in a stored block.
        engine_block_tokens: vLLM's own block size; divides ``block_tokens``.
        max_num_seqs: most requests in a batch.
        max_batched_tokens: most tokens of a step; longer prompts are chunked.
        prefetch_layers: layers loaded ahead of the one being computed.
        threads: OpenMP threads of one engine on CPU.
        extra_args: further arguments of vLLM's API server, as they stand.
        env: further environment variables.
    """

    kv_cache: Size = Size(512 << 20)
    block_tokens: PositiveInt = 64
    engine_block_tokens: PositiveInt = 64
    max_num_seqs: PositiveInt = 16
    max_batched_tokens: PositiveInt = 2048
    prefetch_layers: PositiveInt = 2
    threads: PositiveInt = 1
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = {}


class ClusterConfig(Section, frozen=True):
    """The whole description.

    Raises:
        ConfigError: from ``load``/``parse``, for anything wrong.
    """

    model: ModelConfig
    nodes: Annotated[tuple[NodeConfig, ...], Meta(min_length=2)]
    name: Name = "local"
    mode: Mode = Mode.DUALPATH
    benchmark: bool = False
    """Allows ``mode = "oracle"``, whose answers are meaningless and whose times are a ceiling."""
    front: FrontConfig = FrontConfig()
    buffers: BufferConfig = BufferConfig()
    storage: StorageConfig = StorageConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"nodes: two nodes are named {double!r}; names must be unique")
        for role in Role:
            if not any(node.role is role for node in self.nodes):
                raise ValueError(f"nodes: no node has role {role.value!r}; at least one must")
        if self.mode is Mode.ORACLE and not self.benchmark:
            raise ValueError(
                "mode: 'oracle' skips all KV I/O and answers are meaningless; "
                "set benchmark = true if that is what you want"
            )
        if self.engine.block_tokens % self.engine.engine_block_tokens:
            raise ValueError(
                f"engine.block_tokens: {self.engine.block_tokens} must be a multiple of "
                f"engine_block_tokens {self.engine.engine_block_tokens}"
            )

    def node(self, name: str) -> NodeConfig:
        """The node called ``name``.

        Raises:
            ConfigError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise ConfigError(f"nodes: no node is named {name!r}")

    def engines(self, role: Role) -> list[tuple[NodeConfig, int]]:
        """``(node, local index)`` of every engine of ``role``; the list index is its rank."""
        return [
            (node, local)
            for node in self.nodes
            if node.role is role
            for local in range(node.engines)
        ]


def engine_name(role: Role, rank: int) -> str:
    """Name of an engine in logs, metrics and control messages: ``pe0``, ``de3``."""
    return f"{'pe' if role is Role.PREFILL else 'de'}{rank}"


def parse(data: dict[str, Any], source: str = "config") -> ClusterConfig:
    """Check a decoded description.

    Raises:
        ConfigError: one line: ``source: field: what is wrong``.
    """
    try:
        return msgspec.convert(data, ClusterConfig, dec_hook=_decode_hook)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_field_first(str(error))}") from None


def load(path: str | Path) -> ClusterConfig:
    """Read and check a TOML file.

    Raises:
        ConfigError: unreadable, not TOML, or wrong; the message names file and field.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        data = msgspec.toml.decode(raw)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse(data, str(path))


def dump(config: ClusterConfig) -> str:
    """TOML text that ``load`` reads back to an equal description."""
    data = msgspec.to_builtins(config, enc_hook=_encode_hook)
    return msgspec.toml.encode(data).decode()


def _encode_hook(value: object) -> object:
    """Sizes, rates and durations as text with units; floats with every digit they have."""
    if isinstance(value, Size):
        return f"{int(value)}B"
    if isinstance(value, Rate):
        return f"{float(value)!r}B/s" if value.limited else "unlimited"
    if isinstance(value, Seconds):
        return f"{float(value)!r}s"
    raise NotImplementedError(type(value))


def _field_first(message: str) -> str:
    """msgspec's ``text - at `$.a.b` `` as ``a.b: text``."""
    match = re.fullmatch(r"(?s)(.*) - at `\$\.?(.*)`", message)
    text, where = (match[1], match[2]) if match else (message, "")
    text = " ".join(text.split())
    return f"{where}: {text}" if where else text


__all__ = [
    "BufferConfig", "ClusterConfig", "ConfigError", "EngineConfig", "FrontConfig", "LogConfig",
    "LogFormat", "Mode", "ModelConfig", "NicConfig", "NodeConfig", "Rate", "Role",
    "SchedulerConfig", "Seconds",
    "SecurityConfig", "Size", "SnicConfig", "StorageConfig", "TimeoutConfig", "dump",
    "engine_name", "load", "parse", "parse_rate", "parse_seconds", "parse_size",
]  # fmt: skip
