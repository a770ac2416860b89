"""A store in a bucket when network or server misbehave: bounded, counted, and never wrong bytes."""

import secrets
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from s3_server import BUCKET, Proxy, S3Server, proxy_to, running_server
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, soon
from store_kinds import OBJECT_BYTES, InBucket
from typer.testing import CliRunner

from dualpath.blocks import BlockLayout
from dualpath.cli.main import build
from dualpath.config import (
    ClusterConfig,
    ConfigError,
    ModelConfig,
    NodeConfig,
    Role,
    S3Config,
    Seconds,
    Size,
    StorageConfig,
    dump,
)
from dualpath.doctor.finding import Level
from dualpath.doctor.store import check_storage
from dualpath.storage import (
    ReadStatus,
    Store,
    StoreError,
    WriteStatus,
    open_epochs,
    open_store,
    open_upkeep,
    scratch_in_bucket,
)
from dualpath.storage.objects import Bucket, ledger

pytestmark = pytest.mark.integration

PUBLISHED, PRESENT = WriteStatus.PUBLISHED, WriteStatus.PRESENT
OK, FAILED, EXPIRED = ReadStatus.OK, ReadStatus.FAILED, ReadStatus.EXPIRED
PATIENCE = {"timeout": Seconds(0.5), "retries": 1}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with proxy_to(s3_server) as running:
        yield running


@pytest.fixture
def behind(s3_server: S3Server, proxy: Proxy) -> InBucket:
    """A prefix of its own, reached through the proxy, with little patience."""
    kind = InBucket(s3_server, f"faults/{secrets.token_hex(8)}")
    kind.storage = s3_server.storage(kind.prefix, proxy.endpoint, **PATIENCE)
    return kind


@pytest.fixture
def store(behind: InBucket, proxy: Proxy) -> Iterator[Store]:
    with behind.open() as opened:
        assert opened.write(ROOT, chain(3), filled(chain(3)), soon()) == [PUBLISHED] * 3
        yield opened
        proxy.spoil()


def cluster_on(storage: StorageConfig) -> ClusterConfig:
    nodes = (NodeConfig(name="p0", role=Role.PREFILL), NodeConfig(name="d0", role=Role.DECODE))
    return ClusterConfig(model=ModelConfig(path="none"), nodes=nodes, storage=storage)


def put(store: Store, count: int, salt: str) -> list[WriteStatus]:
    blocks = chain(count, salt)
    return store.write(ROOT, blocks, filled(blocks), soon())


def read(store: Store, count: int = 3, salt: str = "") -> list[ReadStatus]:
    return store.read(ROOT, chain(count, salt), empty(count), soon())


def test_errors_of_the_server_are_outcomes_and_bounded(store: Store, proxy: Proxy) -> None:
    proxy.spoil(status="503 SlowDown")
    assert read(store) == [FAILED] * 3
    assert proxy.spoiled == 3 * 2  # each once more
    assert put(store, 2, "more") == [WriteStatus.FAILED] * 2
    proxy.spoil()
    assert read(store) == [OK] * 3
    assert put(store, 2, "more") == [PUBLISHED] * 2
    assert store.counters()["storage_corrupt_removed"] == 0


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("507 InsufficientStorage", WriteStatus.FULL),
        ("403 QuotaExceeded", WriteStatus.FULL),
        ("403 AccessDenied", WriteStatus.READ_ONLY),
        ("500 InternalError", WriteStatus.FAILED),
    ],
)
def test_serving_goes_on_without_storing(
    store: Store, proxy: Proxy, answer: str, status: WriteStatus
) -> None:
    proxy.spoil(status=answer, only=b"PUT")
    assert put(store, 3, "new") == [status] * 3
    assert read(store) == [OK] * 3
    proxy.spoil()
    assert put(store, 3, "new") == [PUBLISHED] * 3


def test_a_read_that_hangs_ends_at_its_deadline(store: Store, proxy: Proxy) -> None:
    proxy.spoil(hang=True)
    slots = empty(3)
    start_s = time.monotonic()
    assert store.read(ROOT, chain(3), slots, start_s + 0.15) == [EXPIRED] * 3
    proxy.spoil()
    time.sleep(0.3)  # whatever comes in now comes in elsewhere
    assert all(not any(slot) for slot in slots)
    assert read(store) == [OK] * 3


@pytest.mark.full
def test_a_server_that_hangs_holds_nobody_for_ever(store: Store, proxy: Proxy) -> None:
    proxy.spoil(hang=True)
    assert read(store) == [FAILED] * 3
    assert put(store, 1, "new") == [WriteStatus.FAILED]
    assert proxy.spoiled >= 8


@pytest.mark.parametrize("after", [0, 300, 5000])
def test_a_connection_cut_in_the_middle_is_no_corrupt_block(
    store: Store, proxy: Proxy, after: int
) -> None:
    proxy.spoil(cut_after=after, only=b"GET")
    assert set(read(store)) <= {FAILED, OK}
    proxy.spoil()
    assert read(store) == [OK] * 3
    assert store.counters()["storage_read_blocks_corrupt"] == 0


def test_a_write_whose_answer_is_lost_is_published_once(behind: InBucket, proxy: Proxy) -> None:
    with behind.open(blocks=8) as store:
        name = b"PUT /dualpath-test/" + behind.prefix.encode() + b"/blocks"
        proxy.spoil(cut_after=0, only=name, times=3)
        statuses = put(store, 3, "lost")
        assert proxy.spoiled == 3
        # Sent again, it was found there; whose it is, nobody can say, so it is taken for ours.
        assert statuses == [PUBLISHED] * 3
        assert read(store, 3, "lost") == [OK] * 3
        # No answer at all: not published, though it may be there.
        proxy.spoil(cut_after=0, only=name)
        assert put(store, 1, "gone") == [WriteStatus.FAILED]
        proxy.spoil()
        # In doubt the account says too much, and is set right when it matters.
        assert put(store, 8, "more") == [PUBLISHED] * 8
        assert behind.stored_bytes() <= 8 * OBJECT_BYTES
    with behind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None and books.published_bytes >= behind.stored_bytes()


def test_changes_of_the_account_whose_answers_are_lost(behind: InBucket, proxy: Proxy) -> None:
    """Each change is entered once, whatever becomes of its answer."""
    with behind.open(blocks=8) as store:
        assert put(store, 4, "a") == [PUBLISHED] * 4
        name = b"PUT /dualpath-test/" + behind.prefix.encode() + b"/capacity"
        proxy.spoil(cut_after=0, only=name, times=2)
        assert put(store, 2, "b") == [PUBLISHED] * 2
        assert proxy.spoiled == 2
        assert put(store, 2, "c") == [PUBLISHED] * 2
    with behind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None
    assert (books.published_bytes, books.reserved_bytes) == (8 * OBJECT_BYTES, 0)


def test_a_dead_writers_room_comes_back(behind: InBucket) -> None:
    with (
        behind.open(blocks=8) as dead,
        dead._account.admit(ROOT, chain(5, "dead"), [None] * 5, OBJECT_BYTES, soon()),  # type: ignore[attr-defined]
        behind.open(blocks=8) as store,
    ):
        assert put(store, 8, "a") == [PUBLISHED] * 3 + [WriteStatus.FULL] * 5
        bucket = Bucket(*behind.storage.bucket, behind.storage.s3)
        found = ledger.load(bucket)
        assert found is not None
        found[0].writers[dead._account._writer.name].until_s = 0.0  # type: ignore[attr-defined]
        ledger.save(bucket, *found)
        # Its lease is over: what it may have sent is counted, and it has sent nothing.
        assert put(store, 8, "b")[:5] == [PUBLISHED] * 5
        assert behind.stored_bytes() == 8 * OBJECT_BYTES


@pytest.mark.fault
def test_a_server_killed_in_the_middle(tmp_path: Path, s3_server: S3Server) -> None:
    """Not the proxy's doing: the process stops answering, and then is gone."""
    del s3_server  # it brings the credentials
    with running_server(tmp_path) as own:
        storage = own.storage("killed", **PATIENCE)
        with open_store(storage, LAYOUT) as store, ThreadPoolExecutor(1) as pool:
            assert put(store, 3, "") == [PUBLISHED] * 3
            own.process.send_signal(signal.SIGSTOP)
            slots = empty(3)
            reading = pool.submit(store.read, ROOT, chain(3), slots, soon())
            time.sleep(0.1)
            own.process.kill()
            assert reading.result(20) == [FAILED] * 3
            assert put(store, 2, "new") == [WriteStatus.FAILED] * 2
            with pytest.raises(StoreError):
                open_epochs(storage).read()
            with pytest.raises(StoreError, match=r"storage.path: s3://.* cannot be used"):
                open_store(storage, LAYOUT)


def test_a_bucket_that_cannot_be_written_is_read(behind: InBucket, proxy: Proxy) -> None:
    with behind.open() as store:
        put(store, 3, "")
    proxy.spoil(status="403 AccessDenied", only=b"PUT")
    with behind.open(blocks=8) as store:
        assert not store.writable
        assert read(store) == [OK] * 3
        assert put(store, 1, "new") == [WriteStatus.READ_ONLY]
        proxy.spoil()
        raw = bytearray(behind.raw(chain(1)[0]))
        raw[-1] ^= 1
        behind.put_raw(chain(1)[0], bytes(raw))
        assert read(store, 1) == [ReadStatus.CORRUPT] * 1
        assert behind.raw(chain(1)[0]) == bytes(raw)  # not ours to remove


def test_a_server_without_conditional_writes(behind: InBucket, proxy: Proxy) -> None:
    proxy.spoil(status="501 NotImplemented", only=b"if-none-match")
    with behind.open() as store:
        assert put(store, 2, "a") == [PUBLISHED] * 2
        assert put(store, 2, "a") == [PRESENT] * 2
        assert read(store, 2, "a") == [OK] * 2
    with pytest.raises(StoreError, match="conditional writes"):
        behind.open(blocks=8)


def test_what_is_wrong_with_the_address_is_said(s3_server: S3Server) -> None:
    missing = StorageConfig(
        path="s3://no-such-bucket/x", s3=S3Config(endpoint=s3_server.endpoint, allow_http=True)
    )
    with pytest.raises(StoreError, match=r"NoSuchBucket|not found"):
        open_store(missing, LAYOUT)
    nobody = StorageConfig(
        path=f"s3://{BUCKET}/x",
        s3=S3Config(endpoint="http://127.0.0.1:9", allow_http=True, **PATIENCE),  # type: ignore[arg-type]
    )
    with pytest.raises(StoreError, match=r"s3://dualpath-test/x cannot be used"):
        open_store(nobody, LAYOUT)


@pytest.mark.full
def test_the_time_of_use_is_what_this_process_saw(s3_server: S3Server) -> None:
    """After a restart it is the time of writing again: docs/storage.md says so."""
    kind = InBucket(s3_server, f"use/{secrets.token_hex(8)}")
    first, second = chain(2, "first"), chain(2, "second")
    with kind.open(blocks=4) as store:
        put(store, 2, "first")
        time.sleep(1.1)  # the server's clock has whole seconds
        put(store, 2, "second")
        assert read(store, 2, "first") == [OK] * 2
        put(store, 1, "third")
        assert store.take_evicted() == {ROOT: [second[1].key]}
    with kind.open(blocks=4) as store:
        put(store, 1, "fourth")
        assert store.take_evicted() == {ROOT: [first[1].key]}


@pytest.mark.full
def test_pins_tell_all_what_is_in_use(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"pins/{secrets.token_hex(8)}")
    first, second = chain(4, "first"), chain(4, "second")
    with kind.open(blocks=8) as one, kind.open(blocks=8) as other:
        put(one, 4, "first")
        put(one, 4, "second")
        one.pin(ROOT, first[3].key, soon())
        one.unpin(ROOT, first[3].key)
        put(other, 3, "third")
        assert other.take_evicted() == {ROOT: [b.key for b in (second[3], second[2], second[1])]}


@pytest.mark.full
def test_an_index_that_missed_events_is_made_anew(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "KEPT_EVENTS", 3)
    kind = InBucket(s3_server, f"events/{secrets.token_hex(8)}")
    with kind.open(blocks=6) as one, kind.open(blocks=6) as other:
        assert put(one, 2, "a") == [PUBLISHED] * 2
        assert put(one, 6, "b") == [PUBLISHED] * 6  # evicts: the index is there
        for turn in range(3):
            assert put(other, 4, f"other/{turn}") == [PUBLISHED] * 4
        assert put(one, 5, "c") == [PUBLISHED] * 5
        assert kind.stored_bytes() == 6 * OBJECT_BYTES
        stored = {block for _root, block in one.scan()}
        assert set(chain(5, "c")) < stored


def test_a_damaged_account_is_an_error(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"damage/{secrets.token_hex(8)}")
    s3_server.put(f"{kind.prefix}/capacity", b"garbage")
    with pytest.raises(StoreError, match=r"damaged .*remove it to count anew"):
        kind.open(blocks=8)
    s3_server.delete(f"{kind.prefix}/capacity")
    kind.open(blocks=8).close()


@pytest.mark.full
def test_a_large_block_goes_in_one_request(s3_server: S3Server) -> None:
    """Beyond the size from which the client library would by itself send parts."""
    layout = BlockLayout(8, 64, 64, 12_000)
    assert layout.slot_bytes > 6_000_000
    kind = InBucket(s3_server, f"large/{secrets.token_hex(8)}")
    blocks = chain(2)
    with kind.open(layout=layout) as store:
        slots = filled(blocks, layout)
        assert store.write(ROOT, blocks, slots, soon()) == [PUBLISHED] * 2
        back = empty(2, layout)
        assert store.read(ROOT, blocks, back, soon()) == [OK] * 2
        assert [bytes(slot) for slot in back] == [
            content(block, layout.slot_bytes) for block in blocks
        ]


@pytest.mark.full
def test_many_pages_are_listed(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"pages/{secrets.token_hex(8)}")
    blocks = chain(45)  # the server gives 20 at a time
    for block in blocks:
        kind.put_raw(block, b"")
    with kind.upkeep() as upkeep:
        assert {block for _root, block in upkeep.scan()} == set(blocks)
        assert upkeep.stats()[ROOT].blocks == 45


def test_scratch_is_removed(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"scratch/{secrets.token_hex(8)}")
    with kind.open() as store:
        put(store, 2, "stays")
    with scratch_in_bucket(kind.storage, "own") as own, open_store(own, LAYOUT) as store:
        put(store, 3, "goes")
        assert kind.leftovers() != []
    assert kind.leftovers() == []
    assert kind.stored_bytes() == 2 * OBJECT_BYTES
    with pytest.raises(OSError, match="whole bucket"):
        Bucket(BUCKET, "", kind.storage.s3).wipe()


def test_the_store_command(s3_server: S3Server, tmp_path: Path) -> None:
    kind = InBucket(s3_server, f"cli/{secrets.token_hex(8)}")
    with kind.open(blocks=8) as store:
        put(store, 4, "")
    raw = bytearray(kind.raw(chain(4)[3]))
    raw[-1] ^= 1
    kind.put_raw(chain(4)[3], bytes(raw))
    file = tmp_path / "cluster.toml"
    file.write_text(dump(cluster_on(kind.storage)))
    run = CliRunner().invoke

    def json(*words: str, code: int = 0) -> dict[str, object]:
        result = run(build(), ["store", *words, "--config", str(file), "--json"])
        assert result.exit_code == code, result.output
        found: dict[str, object] = msgspec.json.decode(result.stdout.splitlines()[-1])
        return found

    assert json("stats")["blocks"] == 4
    assert json("fsck", code=1)["removed"] == 0
    assert json("fsck", "--repair")["removed"] == 1
    report = json("gc", "--target", f"{2 * OBJECT_BYTES}B")
    assert (report["removed_blocks"], report["kept_bytes"]) == (1, 2 * OBJECT_BYTES)
    result = run(build(), ["store", "stats", "s3://NO/x"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.full
def test_the_doctor_measures_a_bucket(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"doctor/{secrets.token_hex(8)}")
    small = cluster_on(kind.storage)
    layout = BlockLayout(4, 64, 64, 16_000)
    found = {f.check: f for f in check_storage(small, layout, small.nodes)}
    assert "0 bytes stored" in found["storage space"].text
    assert "s3)" in found["storage rate"].text
    assert s3_server.sizes(kind.prefix) == {}
    gone = s3_server.storage("x", "http://127.0.0.1:9", **PATIENCE)
    (finding,) = check_storage(cluster_on(gone), layout, small.nodes)
    assert finding.level is Level.FAIL and "storage.s3" in finding.todo


@pytest.mark.full
def test_the_same_bytes_from_many_threads(s3_server: S3Server) -> None:
    kind = InBucket(s3_server, f"threads/{secrets.token_hex(8)}")
    start = threading.Barrier(4)
    with kind.open(blocks=30) as store:

        def work(number: int) -> None:
            start.wait(20)
            blocks = chain(4, str(number % 2))
            store.pin(ROOT, blocks[-1].key, soon())
            assert set(put(store, 4, str(number % 2))) <= {PUBLISHED, PRESENT}
            assert read(store, 4, str(number % 2)) == [OK] * 4
            store.unpin(ROOT, blocks[-1].key)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    with kind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None
    assert (books.published_bytes, books.reserved_bytes) == (8 * OBJECT_BYTES, 0)


@pytest.mark.full
def test_gc_without_an_engine_needs_no_open_store(s3_server: S3Server) -> None:
    storage = msgspec.structs.replace(
        InBucket(s3_server, f"gc/{secrets.token_hex(8)}").storage, capacity=Size(9 * OBJECT_BYTES)
    )
    with open_store(storage, LAYOUT) as store:
        put(store, 6, "")
    upkeep = open_upkeep(storage)
    assert len(upkeep.gc(2 * OBJECT_BYTES).removed) == 4
    upkeep.close()


def test_a_claim_that_somebody_else_was_faster_with(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes choose the same blocks to go: they go, and are subtracted, once."""
    kind = InBucket(s3_server, f"race/{secrets.token_hex(8)}")
    with kind.open(blocks=6) as one, kind.open(blocks=6) as other:
        assert put(one, 6, "old") == [PUBLISHED] * 6
        save, rivals = ledger.save, [lambda: put(other, 3, "faster")]

        def late(bucket: Bucket, account: ledger.Account, etag: str) -> None:
            if any(hold.claimed for hold in account.writers.values()) and rivals:
                assert rivals.pop()() == [PUBLISHED] * 3  # now ours is out of date
            save(bucket, account, etag)

        monkeypatch.setattr(ledger, "save", late)
        assert put(one, 3, "slower") == [PUBLISHED] * 3
        assert kind.stored_bytes() == 6 * OBJECT_BYTES
        assert {b for _root, b in one.scan()} == {*chain(3, "faster"), *chain(3, "slower")}
    with kind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None
    assert (books.published_bytes, books.reserved_bytes) == (6 * OBJECT_BYTES, 0)


def test_blocks_that_are_being_removed_are_listed_by_nobody(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimed and still there when another process lists: it must not claim them once more."""
    kind = InBucket(s3_server, f"claimed/{secrets.token_hex(8)}")
    with kind.open(blocks=6) as one, kind.open(blocks=6) as other:
        assert put(one, 6, "old") == [PUBLISHED] * 6
        delete, rivals = Bucket.delete, [lambda: put(other, 3, "meanwhile")]

        def late(bucket: Bucket, name: str) -> None:
            if rivals:
                other._account._index._forest = None  # type: ignore[attr-defined]
                assert rivals.pop()() == [PUBLISHED] * 3
            delete(bucket, name)

        monkeypatch.setattr(Bucket, "delete", late)
        assert put(one, 2, "new") == [PUBLISHED] * 2
        assert kind.stored_bytes() <= 6 * OBJECT_BYTES
    with kind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None
    assert (books.published_bytes, books.reserved_bytes) == (kind.stored_bytes(), 0)
