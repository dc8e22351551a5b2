"""The format of manifests, and how blobs are cut into shards."""
