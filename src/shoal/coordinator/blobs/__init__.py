"""Storage of submissions: files named by their SHA-256, in a folder or in an S3 bucket."""

from pathlib import Path

from shoal.coordinator.blobs.base import BlobStore
from shoal.coordinator.blobs.disk import DiskLimits, DiskStore
from shoal.errors import ConfigError


def open_blobs(url: str, folder: Path, limits: DiskLimits | None = None) -> BlobStore:
    """Open the store of a URL: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, or the folder if the URL is empty."""
    if not url:
        return DiskStore(folder, limits)
    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r}: not a blob store; expected s3://BUCKET/PREFIX, or nothing for a folder")
    try:
        from shoal.coordinator.blobs.s3 import S3Blobs
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(f'{url}: S3 needs the package obstore: in a checkout, pip install ".[s3]"') from None
    return S3Blobs(url, folder, limits)
