"""Memory does not grow with the size of a version: written by rows, published with a delta, pulled, read by slices."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

SMALL_MB, LARGE_MB = 16, 144

WORK = """
    import asyncio, json, shutil, sys
    from pathlib import Path
    import torch
    from safetensors.torch import load_file
    from shoal.identity.keys import Key
    from shoal.policy.weights import *
    from shoal.shardcast.client import ShardcastClient
    from shoal.shardcast.growing import open_growing
    from shoal.shardcast.origin_service import open_origin

    ROWS, WIDTH = 2048, 1024  # 4 MB in bf16

    def write(folder, megabytes, version):
        specs = [TensorSpec(f"w{i}", torch.bfloat16, (ROWS, WIDTH)) for i in range(megabytes // 4)]
        layout = plan_layout(specs, 8 << 20)
        rows = torch.randn(ROWS // 2, WIDTH, generator=torch.Generator().manual_seed(0))
        rows[version] = version
        with open_growing(folder) as announce:
            announce(layout.sizes)
            create_files(folder, layout)
            writers = [WeightsWriter(folder, layout) for _ in range(2)]
            for file in layout.files:
                for tensor in file.tensors:
                    for rank, writer in enumerate(writers):
                        writer.write_rows(tensor.spec.name, rank * ROWS // 2, rows)
                finish_file(folder, file, [each for writer in writers for each in writer.close_file(file.name)])

    async def publish(root, megabytes):
        key = Key.generate()
        async with open_origin(root / "origin", run="memory", key=key) as service:
            urls = [str(service.server.url)]
            async with await ShardcastClient.open(root / "out", urls, run="memory", publisher=key.public) as client:
                for version in (0, 1):
                    write(root / f"v{version}", megabytes, version)
                    entry = await service.publish(root / f"v{version}", version)
                    pulled = await client.pull(version)
                assert entry.delta is not None and client.store.find(1).delta is not None
        target = torch.empty(ROWS, WIDTH)
        with WeightsReader(pulled) as reader, WeightsReader(root / "v1") as wanted:
            for name in reader.tensors:
                reader.copy_into(name, target)
                assert wanted.is_equal(name, target)

    def peak(work, *args):
        Path("/proc/self/clear_refs").write_text("5")
        work(*args)
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    def run(root, megabytes):
        root.mkdir()
        asyncio.run(publish(root, megabytes))

    def load_all(root):
        kept = [load_file(path) for path in sorted((root / "v1").glob("*.safetensors"))]
        assert sum(float(tensor[0, 0]) for tensors in kept for tensor in tensors.values())
        [tensor.clone() for tensors in kept for tensor in tensors.values()]

    root, small, large = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run(root / "first", small)  # buffers that are allocated once
    found = {"small": peak(run, root / "small", small), "large": peak(run, root / "large", large)}
    print(json.dumps(found | {"whole": peak(load_all, root / "large")}))
"""


def test_memory_does_not_grow_with_the_version(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WORK), str(tmp_path), str(SMALL_MB), str(LARGE_MB)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    peaks = json.loads(done.stdout.splitlines()[-1])
    growth = (peaks["large"] - peaks["small"]) / (LARGE_MB - SMALL_MB)
    control = (peaks["whole"] - peaks["small"]) / (LARGE_MB - SMALL_MB)
    assert growth < 0.25, f"megabytes of memory per megabyte of the version; {peaks}"
    assert control > 0.75, f"the control that loads everything must show it; {peaks}"
