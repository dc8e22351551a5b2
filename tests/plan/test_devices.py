import pytest

from shoal.errors import ConfigError
from shoal.plan.devices import TABLE, find_device, measure_cpu, parse_machines, parse_prices, parse_trainer


def test_a_trainer_is_one_group_of_devices() -> None:
    trainer = parse_trainer("8xH100")
    assert (trainer.number, trainer.devices, trainer.device) == (1, 8, TABLE["H100"])


def test_machines_have_one_device_or_several() -> None:
    single, several = parse_machines("--workers", "20x4090, 10x4x3090")
    assert (single.number, single.devices, single.name) == (20, 1, "4090")
    assert (several.number, several.devices, several.name, several.num_devices) == (10, 4, "4x3090", 40)


@pytest.mark.parametrize("name", ["a100-80gb", "A100_80", "RTX6000Ada", "RTX4090", "rtx-4090"])
def test_common_spellings_are_understood(name: str) -> None:
    assert find_device("--gpus", name) in TABLE.values()


def test_an_own_device_is_given_by_numbers() -> None:
    own = find_device("--gpus", "M4Max:128:34:546")
    assert (own.name, own.memory_gb, own.tflops, own.gbps) == ("M4Max", 128, 34, 546)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH1000", "unknown device 'H1000'; use B200, H200, H100"),
        ("x", "unknown device 'x'"),
        ("0xH100", "must be 1 to 1000000 devices"),
        ("99999999xH100", "must be 1 to 1000000 devices"),
        ("8 x H100", "cannot read '8 x H100'"),
        ("own:1:2", "write NAME:MEMORY_GB:TFLOPS:GB_PER_S"),
        ("own:1:2:fast", "write NAME:MEMORY_GB:TFLOPS:GB_PER_S"),
        ("own:1:0:5", "write NAME:MEMORY_GB:TFLOPS:GB_PER_S"),
        ("2x4xH100", "has two counts"),
        ("", "cannot read ''"),
    ],
)
def test_a_wrong_device_is_answered_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_trainer(text)
    assert str(caught.value).startswith("--gpus: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_processor_is_measured_once() -> None:
    cpu = find_device("--gpus", "CPU")
    assert cpu is measure_cpu() and cpu.is_cpu
    assert cpu.tflops > 1e-3 and cpu.gbps > 0.1 and cpu.memory_gb > 0.1


def test_prices_are_read_and_wrong_ones_refused() -> None:
    assert parse_prices(["H100=2.5", "4090=0.4"]) == {"H100": 2.5, "4090": 0.4}
    for text in ("H100", "H100=x", "=2", "H100=-1", "H100=nan"):
        with pytest.raises(ConfigError, match="NAME=USD_PER_HOUR"):
            parse_prices([text])
