"""Which file system a folder is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualpath.storage.filesystem import kind_of

pytestmark = pytest.mark.unit

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt rw - tmpfs tmpfs rw
31 30 0:41 / /mnt/kv rw shared:7 master:2 - nfs4 server:/kv rw
32 30 0:42 / /mnt/my\\040kv rw - xfs /dev/sdb rw
33 22 0:43 / /mnt/twice rw - ext4 /dev/sdc rw
34 33 0:44 / /mnt/twice rw - fuse.glusterfs host:/v rw
short
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/somewhere/else", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mnt/kv2", "tmpfs"),
        ("/mnt/kv", "nfs4"),
        ("/mnt/kv/a/b", "nfs4"),
        ("/mnt/my kv/a", "xfs"),
        ("/mnt/twice/a", "fuse.glusterfs"),
    ],
)
def test_the_mount_that_is_seen_counts(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert kind_of(Path(path), mounts) == kind


def test_nothing_is_known_without_the_kernels_list(tmp_path: Path) -> None:
    assert kind_of(tmp_path, tmp_path / "none") == ""
    assert kind_of(tmp_path) != ""
