"""The cluster description: one typed TOML file that everything else takes parts of.

Every value is checked when it is read. A wrong field, type, unit or value raises ``ConfigError``
whose text is one line naming the field, what stood there and what would be right. Sizes, rates
and durations carry their unit in the file (``"64MiB"``, ``"400Mbit/s"``, ``"50ms"``), because a
bare number is how a cluster ends up with a NIC limit a thousand times off.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dualpath.fabric import FabricConfig, parse_ports
from dualpath.section import Section
from dualpath.units import (
    Rate,
    Seconds,
    Size,
    decode_unit,
    encode_unit,
    parse_rate,
    parse_seconds,
    parse_size,
)

PositiveInt = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class ConfigError(ValueError):
    """The description cannot be used; the message is one line that says what to change."""


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
        device: interface name given to the transfer library; empty is ``lo`` on a node whose host
            is loopback, and leaves the choice to it elsewhere.
        rate: link rate per direction, enforced by us when limited.
        ports: ``"low-high"`` TCP ports for transfers; empty for any.
    """

    device: str = ""
    rate: Rate = Rate(math.inf)
    ports: Annotated[str, Meta(pattern=r"^([0-9]+-[0-9]+)?$")] = ""

    def __post_init__(self) -> None:
        try:
            parse_ports(self.ports)
        except ValueError as error:
            raise ValueError(f"ports: {error}") from None


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


class S3Config(Section, frozen=True):
    """How an S3-compatible store is reached. Credentials come from the environment, a web identity
    or the instance's metadata, never from this file.

    Attributes:
        endpoint: URL of the server; empty for AWS.
        region: region to sign for; empty takes AWS_REGION, else us-east-1.
        allow_http: allows an endpoint without TLS.
        timeout: longest time of one request, answer included.
        retries: times a failed request is sent again.
        connections: requests under way at once, of one engine and direction.
    """

    endpoint: str = ""
    region: str = ""
    allow_http: bool = False
    timeout: Seconds = Seconds(10.0)
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    connections: PositiveInt = 16

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout: must be above zero, got {float(self.timeout)} s")
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError(
                f"endpoint: {self.endpoint} has no TLS; set allow_http = true if that is meant"
            )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint: {self.endpoint!r} is no http:// or https:// URL")


_S3_PATH: Final = re.compile(
    r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]*))?"
)


class StorageConfig(Section, frozen=True):
    """The persistent store: a directory every node reaches, or a bucket.

    Attributes:
        path: the directory, made when missing; or ``s3://bucket/prefix``.
        io: ``nixl`` (NIXL's POSIX plugin), ``threads`` (preadv/pwritev pool), ``usrbio`` (3FS's
            own interface, below a 3FS mount) or ``auto``: nixl where it loads. Directories only.
        direct: bypass the page cache with O_DIRECT: ``auto`` where the file system takes it.
            Directories only.
        capacity: most bytes kept; 0B for no limit other than the disk.
        batch_blocks: most blocks in one read or write submission.
        fsync: wait for stable storage before a block is published. Directories only.
        usrbio_library: 3FS's client library: a file name that the loader finds, or a path.
        s3: how a bucket is reached.
    """

    path: str = "dualpath-store"
    io: Literal["auto", "nixl", "threads", "usrbio"] = "auto"
    direct: Literal["auto", "on", "off"] = "auto"
    capacity: Size = Size(0)
    batch_blocks: PositiveInt = 32
    fsync: bool = True
    usrbio_library: str = "libhf3fs_api_shared.so"
    s3: S3Config = S3Config()

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("path: must name a directory or s3://bucket/prefix, got nothing")
        if "://" in self.path and _S3_PATH.fullmatch(self.path) is None:
            raise ValueError(
                f"path: {self.path!r} is neither a directory nor s3://bucket/prefix in lower case"
            )
        if self.in_bucket and self.io != "auto":
            raise ValueError(f"io: {self.io!r} is for directories; leave it out with {self.path}")

    @property
    def in_bucket(self) -> bool:
        """Whether the store is a bucket, not a directory."""
        return self.path.startswith("s3://")

    @property
    def bucket(self) -> tuple[str, str]:
        """Name of the bucket and prefix inside it, the latter without slashes at its ends.

        Raises:
            ValueError: the store is a directory.
        """
        match = _S3_PATH.fullmatch(self.path)
        if match is None:
            raise ValueError(f"{self.path} is a directory")
        return match[1], (match[2] or "").strip("/")


class SchedulerConfig(Section, frozen=True):
    """Thresholds of the request scheduler; measured ones are written by ``dualpath profile``.

    Attributes:
        policy: name in the policy registry: ``paper``, ``work``, ``round_robin``, ``pe_only``,
            ``split``;
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
        timeline: folder in which front and engines write what they did when, for Perfetto; empty
            for none.
    """

    format: LogFormat = LogFormat.TEXT
    level: Literal["debug", "info", "warning", "error"] = "info"
    timeline: str = ""


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

    api_keys: dict[str, str] = msgspec.field(default_factory=dict)
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
        layer_aliasing: a PE keeps the KV of only ``prefetch_layers + 1`` layers at a time, so that
            more tokens fit; not in mode ``basic``.
        copy: how KV gets from host memory into the cache and back: ``host`` (memcpy; the cache is
            CPU memory), ``cuda`` (the GPU's copy engines), ``cnic`` (RDMA writes of the GPU's own
            NIC), or ``auto``: ``host`` on CPU, on a GPU ``cnic`` where the NIC is an RDMA device
            (``mlx5_0:1``), else ``cuda``.
        threads: OpenMP threads of one engine on CPU.
        extra_args: further arguments of vLLM's API server, as they stand.
        env: further environment variables.
    """

    kv_cache: Size = Size(512 << 20)
    block_tokens: PositiveInt = 64
    engine_block_tokens: PositiveInt = 64
    max_num_seqs: PositiveInt = 16
    max_batched_tokens: PositiveInt = 2048
    prefetch_layers: PositiveInt = 1
    layer_aliasing: bool = True
    copy: Literal["auto", "cnic", "cuda", "host"] = "auto"
    threads: PositiveInt = 1
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)

    def window(self, layers: int) -> int:
        """How many of ``layers`` are in work at a time: one computed, the others loaded ahead."""
        return min(layers, self.prefetch_layers + 1)


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
    fabric: FabricConfig = FabricConfig()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"nodes: two nodes are named {double!r}; names must be unique")
        for role in Role:
            if not any(node.role is role for node in self.nodes):
                raise ValueError(f"nodes: no node has role {role.value!r}; at least one must")
        self._check_ports()
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

    def _check_ports(self) -> None:
        """Each engine listens on one port of the range; engines of one host share it."""
        engines: dict[tuple[str, str], int] = {}
        for node in self.nodes:
            ports = node.cnic.ports or self.fabric.kv.ports
            place = node.host, ports
            engines[place] = engines.get(place, 0) + node.engines
            span = parse_ports(ports)
            if span is not None and span[1] - span[0] + 1 < engines[place]:
                raise ValueError(
                    f"nodes: {ports} are too few TCP ports for {engines[place]} engines on "
                    f"{node.host}; widen {'cnic' if node.cnic.ports else 'fabric.kv'}.ports"
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

    def layer_regions(self, role: Role, layers: int) -> int:
        """How many of ``layers`` layers' KV an engine holds at a time; all of them, or fewer that
        take turns.

        They take turns only on PEs of the layerwise modes: a DE reads every layer at every step,
        and ``basic`` loads all layers at once.
        """
        if role is not Role.PREFILL or self.mode is Mode.BASIC or not self.engine.layer_aliasing:
            return layers
        return self.engine.window(layers)

    def engines(self, role: Role) -> list[tuple[NodeConfig, int]]:
        """``(node, local index)`` of every engine of ``role``; the list index is its rank."""
        return [
            (node, local)
            for node in self.nodes
            if node.role is role
            for local in range(node.engines)
        ]


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def engine_name(role: Role, rank: int) -> str:
    """Name of an engine in logs, metrics and control messages: ``pe0``, ``de3``."""
    return f"{'pe' if role is Role.PREFILL else 'de'}{rank}"


def parse(data: dict[str, Any], source: str = "config") -> ClusterConfig:
    """Check a decoded description.

    Raises:
        ConfigError: one line: ``source: field: what is wrong``.
    """
    try:
        return msgspec.convert(data, ClusterConfig, dec_hook=decode_unit)
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
    data = msgspec.to_builtins(config, enc_hook=encode_unit)
    return msgspec.toml.encode(data).decode()


def _field_first(message: str) -> str:
    """msgspec's ``text - at `$.a.b` `` as ``a.b: text``."""
    match = re.fullmatch(r"(?s)(.*) - at `\$\.?(.*)`", message)
    text, where = (match[1], match[2]) if match else (message, "")
    text = " ".join(text.split())
    return f"{where}: {text}" if where else text


__all__ = [
    "BufferConfig", "ClusterConfig", "ConfigError", "EngineConfig", "FrontConfig", "LogConfig",
    "LogFormat", "Mode", "ModelConfig", "NicConfig", "NodeConfig", "Rate", "Role", "S3Config",
    "SchedulerConfig", "Seconds",
    "Section", "SecurityConfig", "Size", "SnicConfig", "StorageConfig", "TimeoutConfig", "dump",
    "engine_name", "is_loopback", "load", "parse", "parse_rate", "parse_seconds", "parse_size",
]  # fmt: skip
