"""What all settings have in common, and those of tasks and rewards, which recipes carry as well. Imports no torch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Option = bool | int | float | str


class Settings(BaseModel):
    """Base of all settings: immutable, an unknown key is an error, and nothing is converted (`true` is not 1)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class FilterConfig(Settings):
    """Which tasks of a task set are used."""

    model: str = ""
    """model whose pass rates count, as `shoal filter` wrote them; empty: pass rates do not matter"""
    min: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """lowest pass rate"""
    max: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """highest pass rate"""
    max_chars: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """longest prompt in characters; 0: any"""

    @model_validator(mode="after")
    def _is_range(self) -> "FilterConfig":
        if self.min > self.max:
            raise ValueError(f"min {self.min} must be at most max {self.max}")
        return self


Places = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=64, json_schema_extra={"allowed": 'a place or a list of places, such as ["gsm8k:train.jsonl"]'}),
]
MAX_WEIGHT = 1_000_000


MAX_STAGES = 16
"""of a schedule: each costs a pass over the set when it is opened, and a recipe is a stranger's"""
MAX_STEP = 2**31


class ScheduleStage(Settings):
    """Part of a schedule: from a step on, until the next one begins, tasks within these pass rates are drawn."""

    step: Annotated[int, Field(ge=1, lt=MAX_STEP)]
    """first step"""
    min: Annotated[float, Field(ge=0.0, le=1.0)]
    """lowest pass rate"""
    max: Annotated[float, Field(ge=0.0, le=1.0)]
    """highest pass rate"""


def check_stages(stages: Sequence[ScheduleStage], wanted: FilterConfig) -> None:
    """ValueError unless they cover all steps, once each, and there are pass rates to go by."""
    if not stages:
        return
    if not wanted.model:
        raise ValueError("schedule goes by pass rates; name their model in filter.model")
    if len(stages) > MAX_STAGES:
        raise ValueError(f"schedule has {len(stages)} stages, allowed are {MAX_STAGES}")
    if stages[0].step != 1:
        raise ValueError(f"schedule must begin with step 1, not {stages[0].step}")
    for stage, following in pairwise(stages):
        if stage.step >= following.step:
            raise ValueError(f"schedule: step {following.step} must come after step {stage.step}")
    for stage in stages:
        if stage.min > stage.max:
            raise ValueError(f"schedule from step {stage.step} on: min {stage.min} must be at most max {stage.max}")


Rates = Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=2, max_length=2)]
Schedule = Annotated[
    dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Rates],
    Field(json_schema_extra={"allowed": "lowest and highest pass rate by first step, such as { 1 = [0.5, 1.0] }"}),
]


Hash = Annotated[
    str, Field(pattern=r"^([0-9a-f]{64})?$", json_schema_extra={"allowed": "nothing, or a hash of 64 characters"})
]


class TasksConfig(Settings):
    """Which tasks are trained and evaluated: a family, or a task set."""

    name: str = "sort"
    """task family, see `shoal tasks`"""
    options: dict[str, Option] = {}
    """options of the family, see `shoal tasks NAME`"""
    set: Places = Field(default=[])
    """task set instead of a family: files, folders, or FORMAT:PLACE, see docs/tasks.md"""
    hash: Hash = ""
    """hash that the task set must have; empty: any"""
    filter: FilterConfig = FilterConfig()
    weights: dict[str, int] = {}
    """how often each source is drawn from, against the others; empty: every task is as likely as any other"""
    schedule: Schedule = Field(default={})
    """curriculum by step: range of pass rates of the tasks drawn, by first step"""
    reward: str = ""
    """your reward function as package.module:function; unsandboxed, in `shoal train` and `shoal eval` only"""
    environment: str = ""
    """your environment in the style of verifiers as package.module:object; as unsandboxed and local as `reward`"""
    code_hash: Hash = ""
    """SHA-256 of the source file of `reward` or `environment`; filled in when a run starts"""

    @model_validator(mode="after")
    def _fits_together(self) -> "TasksConfig":
        terms = (self.hash, self.weights, self.schedule, self.reward)
        if (any(terms) or self.filter != FilterConfig()) and not self.set:
            raise ValueError("hash, filter, weights, schedule and reward are for a task set; set is empty")
        if self.environment and self.set:
            raise ValueError("environment brings its own tasks; leave set empty")
        for source, weight in self.weights.items():
            if not 0 <= weight <= MAX_WEIGHT:
                raise ValueError(f"weights.{source[:64]} = {weight} must be a whole number from 0 to {MAX_WEIGHT}")
        check_stages(self.stages, self.filter)
        return self

    @property
    def stages(self) -> list[ScheduleStage]:
        """The schedule in order of its steps."""
        pairs = sorted((int(step), rates) for step, rates in self.schedule.items())
        return [ScheduleStage(step=step, min=low, max=high) for step, (low, high) in pairs]


Targets = Annotated[
    list[Annotated[int, Field(ge=1, lt=2**31)]],
    Field(max_length=64, json_schema_extra={"allowed": "a list of up to 64 lengths in tokens"}),
]


class LengthConfig(Settings):
    """The length reward: how long a completion should be, as stated in the prompt (docs/tasks.md)."""

    mode: Literal["none", "exact", "max", "clip"] = "none"
    """exact: every token away from the target costs; max: shorter is better; clip: beyond the target costs at once"""
    targets: Targets = Field(default=[])
    """target lengths in tokens; each group has one of them, drawn from its seed"""
    alpha: Annotated[float, Field(gt=0.0, le=1.0)] = 0.0003
    """reward per token (exact, max)"""
    bound: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """most that length can cost; below 1, so that right answers stay above wrong ones"""
    template: Annotated[str, Field(max_length=2000)] = "{prompt}\n\nThink for {target} tokens before giving a response."
    """prompt, or last message of the user, with its target"""

    @model_validator(mode="after")
    def _is_complete(self) -> "LengthConfig":
        if self.mode != "none" and not self.targets:
            raise ValueError(f"mode {self.mode} needs targets, such as [32, 64]")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("targets must differ from each other")
        if self.template.count("{prompt}") != 1 or self.template.count("{target}") != 1:
            raise ValueError("template must hold {prompt} and {target} once each")
        return self
