"""Puts an engine's parts together: buffers sized from the cluster file, store, peer agent,
traffic manager. No policy, no vLLM objects: only what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dualpath.blocks import BlockLayout
from dualpath.config import (
    ClusterConfig,
    FrontConfig,
    NodeConfig,
    Role,
    StorageConfig,
    engine_name,
)
from dualpath.control.messages import (
    BufferInfo,
    EngineStats,
    Fingerprint,
    Hello,
    Message,
    PeerInfo,
)
from dualpath.spans import Spans
from dualpath.storage import Limiter, buffer_memory, open_store
from dualpath.transfer.class_agent import class_agent, class_settings
from dualpath.transfer.copy_choice import CopyPlace, open_copy_engine
from dualpath.transfer.hbm import DeviceCache
from dualpath.transfer.manager import AttentionSource, TrafficManager
from dualpath.transfer.memory import Region
from dualpath.transfer.qos.classes import TrafficClass
from dualpath.transfer.regions import Regions
from dualpath.transfer.services import Arena, Services
from dualpath.transfer.slots import SlotPool


class BufferTooSmall(RuntimeError):
    """A configured buffer does not hold a single block."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What only the running engine knows about itself; see ``Hello`` and ``Fingerprint``."""

    role: Role
    rank: int
    incarnation: str
    pid: int
    host_id: str
    http_url: str
    model: str
    layout_id: str
    dtype: str
    max_batched_tokens: int


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Position of each layer by vLLM's name for it, in model order."""

    def order(name: str) -> tuple[int, str]:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        return (numbers[0] if numbers else -1, name)

    return {name: position for position, name in enumerate(sorted(names, key=order))}


def traffic_manager(
    cluster: ClusterConfig,
    identity: EngineIdentity,
    cache: DeviceCache,
    *,
    keepalive: object,
    control: str,
    run_dir: Path,
    live_stats: Callable[[], dict[str, int]],
    attention: AttentionSource | None = None,
    regions: Regions | None = None,
    spans: Spans | None = None,
) -> TrafficManager:
    """The traffic manager of one engine, not started yet.

    Args:
        keepalive: owner of the cache's memory.
        control: ``host:port`` of the front's control server.
        run_dir: folder on this machine shared by the node's engines (NIC limit state).
        attention: what the engine's attention costs, for its reports; only PEs measure it.
        regions: of a PE whose layers take turns in its memory.
        spans: the engine's timeline.

    Raises:
        BufferTooSmall: a buffer holds no block.

    ``start`` of the result raises ``CopyEngineMissing`` when ``engine.copy`` cannot work here.
    """
    node, _ = cluster.engines(identity.role)[identity.rank]
    layout = cache.layout
    buffer, staging = _arenas(cluster, identity.role, layout)
    name = engine_name(identity.role, identity.rank)
    hello = _hello(cluster, identity, node, name, layout, buffer, regions)
    host, _, port = control.rpartition(":")

    def build(
        send: Callable[[Message], None], on_crash: Callable[[str], None]
    ) -> tuple[Services, bytes]:
        agent = class_agent(f"{name}/{identity.incarnation}", cluster, node, TrafficClass.KV)
        buffers = [buffer.region, staging.region]
        nbytes = cache.num_blocks * cache.block_stride_bytes
        layers = [
            Region.borrowed(address, nbytes, keepalive, cache.device)
            for address in cache.layer_addresses
        ]
        # Peers never reach into a cache, and only a PE without regions pushes straight out of it.
        pushes = identity.role is Role.PREFILL and regions is None
        for region in (*buffers, *layers) if pushes else buffers:
            agent.register(region)
        nic = class_settings(cluster, node, TrafficClass.KV)
        place = CopyPlace(agent.name, nic, cache.device, layers, buffers)
        store = open_store(
            cluster.storage,
            layout,
            read_limiter=Limiter.shared(run_dir, f"{node.name}-read", node.snic.read),
            write_limiter=Limiter.shared(run_dir, f"{node.name}-write", node.snic.write),
        )
        services = Services(
            layout=layout,
            cache=cache,
            copy_engine=open_copy_engine(cluster.engine.copy, place),
            buffer=buffer,
            staging=staging,
            agent=agent,
            store=store,
            timeouts=cluster.timeouts,
            engine=cluster.engine,
            batch_blocks=cluster.storage.batch_blocks,
            send=send,
            on_crash=on_crash,
            regions=regions,
            spans=spans,
        )
        return services, agent.metadata()

    return TrafficManager(
        hello,
        build,
        FrontConfig(control_host=host, control_port=int(port)),
        live_stats,
        cluster.timeouts.connect,
        attention,
    )


def _hello(
    cluster: ClusterConfig,
    identity: EngineIdentity,
    node: NodeConfig,
    name: str,
    layout: BlockLayout,
    buffer: Arena,
    regions: Regions | None,
) -> Hello:
    secret_file = cluster.security.control_secret_file
    return Hello(
        peer=PeerInfo(
            engine=name,
            incarnation=identity.incarnation,
            agent_metadata=b"",
            buffer=BufferInfo(
                base_address=buffer.region.address,
                slot_bytes=buffer.pool.slot_bytes,
                slots=buffer.pool.slots,
            ),
        ),
        role=identity.role.value,
        rank=identity.rank,
        node=node.name,
        pid=identity.pid,
        host_id=identity.host_id,
        http_url=identity.http_url,
        fingerprint=Fingerprint(
            model=identity.model,
            revision=cluster.model.revision,
            dtype=identity.dtype,
            num_layers=layout.num_layers,
            token_layer_bytes=layout.token_layer_bytes,
            block_tokens=layout.block_tokens,
            layout_id=identity.layout_id,
        ),
        max_batched_tokens=identity.max_batched_tokens,
        layer_regions=0 if regions is None else regions.count,
        stats=EngineStats(),
        secret=Path(secret_file).read_text().strip() if secret_file else "",
    )


def _arenas(cluster: ClusterConfig, role: Role, layout: BlockLayout) -> tuple[Arena, Arena]:
    """The engine's buffer and its staging memory."""
    sizes = cluster.buffers
    if role is Role.PREFILL:
        landing_slot = layout.layer_block_bytes
        return (
            _arena(sizes.prefill, layout.slot_bytes, "buffers.prefill", cluster.storage),
            _arena(sizes.landing, landing_slot, "buffers.landing"),
        )
    return (
        _arena(sizes.decode, layout.slot_bytes, "buffers.decode", cluster.storage),
        _arena(sizes.persist, layout.slot_bytes, "buffers.persist", cluster.storage),
    )


def _arena(nbytes: int, slot_bytes: int, field: str, storage: StorageConfig | None = None) -> Arena:
    """Memory in equal slots; where blocks are read from and written to ``storage``, of the kind
    that it likes best."""
    slots = nbytes // slot_bytes
    if not slots:
        raise BufferTooSmall(f"{field}: {nbytes} bytes hold no block of {slot_bytes} bytes")
    size = slots * slot_bytes
    memory = buffer_memory(storage, size, slot_bytes) if storage is not None else None
    region = Region(size) if memory is None else Region.borrowed(memory.address, size, memory)
    return Arena(region, SlotPool(slots, slot_bytes, field))
