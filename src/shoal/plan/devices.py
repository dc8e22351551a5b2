"""Devices of a plan: memory, compute and bandwidth of common GPUs, of a CPU by measurement, and of your own by numbers.

Figures of the table are those of the vendors' data sheets: gigabytes (10^9 bytes), dense bfloat16 TFLOP/s with float32
accumulation (half of the figure "with sparsity"), GB/s of the device's own memory, and GB/s in one direction of its
fastest link to other devices (NVLink, Infinity Fabric, else the PCIe slot). What a program reaches of them is a
separate assumption (`Assumptions`). Apple publishes no TFLOP/s, so its chips need numbers of your own.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

GIGA, TERA = 1e9, 1e12
CPU = "cpu"
MAX_DEVICES = 1_000_000
_OWN = "NAME:MEMORY_GB:TFLOPS:GB_PER_S"
_PCIE4, _PCIE5 = 32.0, 64.0
_COUNTS = re.compile(r"(?:(?P<first>\d{1,9})x)?(?:(?P<second>\d{1,9})x)?(?P<name>[A-Za-z0-9][A-Za-z0-9.:_-]*)")


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    name: str
    memory_gb: float
    tflops: float
    """dense bfloat16; of a CPU float32 products, as measured"""
    gbps: float
    """GB/s of its memory"""
    link_gbps: float = _PCIE4
    """GB/s to another device of the same machine, in one direction"""
    has_bf16: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * GIGA


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of one kind, each with `devices` devices that hold one copy of the model between them."""

    device: Device
    number: int = 1
    devices: int = 1

    @property
    def name(self) -> str:
        return self.device.name if self.devices == 1 else f"{self.devices}x{self.device.name}"

    @property
    def num_devices(self) -> int:
        return self.number * self.devices


TABLE = {
    device.name: device
    for device in (
        Device("B200", 180, 2250, 8000, 900),
        Device("H200", 141, 989, 4800, 450),
        Device("H100", 80, 989, 3350, 450),
        Device("A100-80", 80, 312, 2039, 300),
        Device("A100-40", 40, 312, 1555, 300),
        Device("MI300X", 192, 1307, 5300, 448),
        Device("L40S", 48, 362, 864),
        Device("L4", 24, 121, 300),
        Device("A10", 24, 125, 600),
        Device("T4", 16, 65, 320, 16, has_bf16=False),
        Device("RTX6000Ada", 48, 364, 960),
        Device("5090", 32, 209, 1792, _PCIE5),
        Device("4090", 24, 165, 1008),
        Device("3090", 24, 71, 936),
    )
}


def parse_trainer(text: str) -> Machines:
    """Parse `8xH100`: one trainer of so many ranks."""
    machines = _parse_one("--gpus", text)
    if machines.number > 1 and machines.devices > 1:
        raise ConfigError(f"--gpus: {text[:80]!r} has two counts; a trainer is one group of devices, such as 8xH100")
    return Machines(machines.device, 1, machines.num_devices)


def parse_machines(flag: str, text: str) -> tuple[Machines, ...]:
    """Parse `20x4090,10x4x3090`: 20 machines with one device each, and 10 with four."""
    return tuple(_parse_one(flag, part.strip()) for part in text.split(","))


def _parse_one(flag: str, text: str) -> Machines:
    match = _COUNTS.fullmatch(text)
    if match is None:
        raise ConfigError(f"{flag}: cannot read {text[:80]!r}; write NUMBERxNAME, such as 8xH100 or 10x4x3090")
    number, devices = int(match["first"] or 1), int(match["second"] or 1)
    if not 1 <= number * devices <= MAX_DEVICES:
        raise ConfigError(f"{flag}: {text[:80]!r} must be 1 to {MAX_DEVICES} devices")
    return Machines(find_device(flag, match["name"]), number, devices)


def find_device(flag: str, name: str) -> Device:
    """The device of that name, one given by numbers, or this machine's processor."""
    if ":" in name:
        return _read_own(flag, name)
    if name.lower() == CPU:
        return measure_cpu()
    known = {_fold(known): device for known, device in TABLE.items()}
    if (found := known.get(_fold(name).removeprefix("rtx").removeprefix("nvidia")) or known.get(_fold(name))) is None:
        raise ConfigError(f"{flag}: unknown device {name[:40]!r}; use {', '.join(TABLE)}, cpu, or {_OWN} for your own")
    return found


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace("gb", "")


def _read_own(flag: str, text: str) -> Device:
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0.0 < value < 1e9 for value in values):
        raise ConfigError(f"{flag}: cannot read the device {text[:80]!r}; write {_OWN}, such as M4Max:128:34:546")
    memory_gb, tflops, gbps = values
    return Device(name, memory_gb, tflops, gbps)


@cache
def measure_cpu() -> Device:
    """This machine's processor: the float32 matrix product's rate and the copying rate of memory, in about a second."""
    logger.info("measuring the speed of this machine's CPU")
    import torch

    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    out = torch.empty(1024, 1024)
    product_s = _time_best(lambda: torch.mm(a, b, out=out))
    source, target = torch.rand(32 << 20), torch.empty(32 << 20)
    copy_s = _time_best(lambda: target.copy_(source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gbps = 2 * 4 * source.numel() / copy_s / GIGA
    return Device(CPU, memory / GIGA, 2 * 1024**3 / product_s / TERA, gbps, gbps)


def _time_best(run: Callable[[], Any], budget_s: float = 0.4) -> float:
    """The shortest duration within the budget, after one warm-up: others that use the machine only add to it."""
    run()
    durations: list[float] = []
    while sum(durations) < budget_s or len(durations) < 3:
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return min(durations)


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse `--price H100=2.5` flags: US dollars per device and hour."""
    prices = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not (equals and name and 0.0 <= price < 1e6):
            raise ConfigError(f"--price: cannot read {text[:80]!r}; write NAME=USD_PER_HOUR, such as H100=2.5")
        prices[name] = price
    return prices
