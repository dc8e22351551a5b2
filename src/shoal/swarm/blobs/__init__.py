"""Where submissions lie: files named by their SHA-256, in a folder or in an S3 bucket."""

from pathlib import Path

from shoal.errors import ConfigError
from shoal.swarm.blobs.base import BlobStore
from shoal.swarm.blobs.disk import DiskLimits, DiskStore


def open_blobs(url: str, folder: Path, limits: DiskLimits | None = None) -> BlobStore:
    """The store that a URL names: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, or the folder if it is empty."""
    if not url:
        return DiskStore(folder, limits)
    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r}: no store of blobs; expected s3://BUCKET/PREFIX, or nothing for a folder")
    try:
        from shoal.swarm.blobs.s3 import S3Blobs
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(f"{url}: S3 needs the package obstore: pip install shoal[s3]") from None
    return S3Blobs(url, folder, limits)
