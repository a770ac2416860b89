"""A store in an S3-compatible bucket. Needs the extra ``s3`` (obstore)."""

from dualpath.storage.objects.bucket import Bucket
from dualpath.storage.objects.epoch import EpochObject
from dualpath.storage.objects.store import ObjectStore
from dualpath.storage.objects.upkeep import BucketUpkeep

__all__ = ["Bucket", "BucketUpkeep", "EpochObject", "ObjectStore"]
