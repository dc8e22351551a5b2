"""Verifiable instructions: 1 if a text follows all of them, else 0; with `partial`, the share that it follows.

    {"instruction_id_list": ["punctuation:no_comma", ...], "kwargs": [{}, ...], "partial": false}

An empty text follows none.
"""

import unicodedata
from typing import Any

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.verify.base import Info, Verifier
from shoal.tasks.verify.extract import drop_thoughts
from shoal.tasks.verify.text.checks import CHECKS, is_fit

MAX_RULES = 32
_MAX_SETTING_CHARS = 16_384


class RulesVerifier(Verifier):
    """A subset of IFEval."""

    name = "text_rules"
    version = 2

    @property
    def stamp(self) -> str:
        return f"{self.name}/{self.version} unicode-{unicodedata.unidata_version}"

    def check_info(self, info: Info) -> None:
        names, settings = info.get("instruction_id_list"), info.get("kwargs")
        if not isinstance(names, list) or not isinstance(settings, list) or not 0 < len(names) <= MAX_RULES:
            raise ConfigError(f"info of a rules task: needs instruction_id_list and kwargs, 1 to {MAX_RULES} of each")
        if len(names) != len(settings) or not isinstance(info.get("partial", False), bool):
            raise ConfigError("info of a rules task: needs as many kwargs as instructions, and partial true or false")
        for name, values in zip(names, settings, strict=True):
            if not isinstance(name, str) or name not in CHECKS:
                raise ConfigError(f"instruction {str(name)[:80]!r}: unknown; allowed are {', '.join(CHECKS)}")
            if not isinstance(values, dict) or len(str(values)) > _MAX_SETTING_CHARS:
                raise ConfigError(f"{name}: needs its settings")
            given = _keep_settings(values)
            for key, kind in CHECKS[name][1].items():
                if not is_fit(given.get(key), kind):
                    raise ConfigError(f"{name}: {key} must be {kind}")

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        text = drop_thoughts(completion)
        if not text.strip():
            return Score(0.0, "no text")
        names = info["instruction_id_list"]
        broken = [
            name
            for name, values in zip(names, info["kwargs"], strict=True)
            if not CHECKS[name][0](text, _keep_settings(values))
        ]
        if not broken:
            return Score(1.0, "all instructions followed")
        value = (len(names) - len(broken)) / len(names) if info.get("partial", False) else 0.0
        return Score(value, f"not followed: {broken[0]}")


def _keep_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given: instruction tables have columns for all, and null where one does not apply."""
    return {key: value for key, value in values.items() if value is not None}
