"""What the settings models say about themselves: their keys, what each allows, and why a value was refused.

The same words serve `--help` and the error sentences, so both always agree with the models.
"""

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_LONGEST_SHOWN = 60
GENERAL, ALL_GROUPS = "general", "all"
"""names for the settings without a group, and for all settings"""
_TYPE_ERRORS = ("_type", "_parsing", "literal_error", "finite_number", "_pattern_mismatch", "_unicode")
"""Endings of pydantic's error types for which the type belongs in the sentence, not only the range."""


FOREIGN_NAMES = {
    # TRL
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "learning_rate": "learner.lr",
    "beta": "learner.loss.kl",
    "epsilon": "learner.loss.eps_low",
    "epsilon_high": "learner.loss.eps_high",
    "delta": "learner.loss.delta",
    "loss_type": "learner.loss.name",
    "scale_rewards": "learner.advantage",
    "num_generations": "batch.group_size",
    "per_device_train_batch_size": "batch.groups",
    "num_iterations": "learner.updates",
    "max_completion_length": "engine.max_tokens",
    "model_name_or_path": "policy.path",
    "model": "policy.path",
    "torch_dtype": "policy.dtype",
    "bf16": "learner.precision",
    "gradient_accumulation_steps": "learner.micro_tokens",
    "output_dir": "out",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "report_to": "track.name",
    "reward_funcs": "tasks.reward",
    "train_dataset": "tasks.set",
    "dataset_name": "tasks.set",
    "entropy_coef": "learner.loss.entropy",
    "adam_beta1": "learner.beta1",
    "adam_beta2": "learner.beta2",
    "warmup_ratio": "learner.warmup_steps",
    "attn_implementation": "learner.attention",
    "importance_sampling_level": "learner.loss.name",
    "vllm_importance_sampling_cap": "learner.loss.correction_cap",
    "max_prompt_length": "tasks.filter.max_chars",
    "generation_batch_size": "batch.groups",
    "log_completions": "rollouts",
    # TRL and peft
    "lora_r": "policy.lora.rank",
    "r": "policy.lora.rank",
    "lora_alpha": "policy.lora.alpha",
    "lora_target_modules": "policy.lora.targets",
    "target_modules": "policy.lora.targets",
    # verl
    "clip_ratio": "learner.loss.eps_low",
    "clip_ratio_low": "learner.loss.eps_low",
    "clip_ratio_high": "learner.loss.eps_high",
    "clip_ratio_c": "learner.loss.delta",
    "kl_loss_coef": "learner.loss.kl",
    "kl_coef": "learner.loss.kl",
    "entropy_coeff": "learner.loss.entropy",
    "rollout.n": "batch.group_size",
    "max_response_length": "engine.max_tokens",
    "train_batch_size": "batch.groups",
    "ppo_epochs": "learner.updates",
    "total_training_steps": "steps",
    "grad_clip": "learner.max_grad_norm",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "project_name": "track.project",
    "experiment_name": "name",
    "lora_rank": "policy.lora.rank",
    # prime-rl
    "max_async_level": "async_level",
    "max_off_policy_steps": "async_level",
    "rollouts_per_example": "batch.group_size",
    "rollouts_per_prompt": "batch.group_size",
    "batch_size": "batch.groups",
    "oversampling_factor": "batch.max_oversample",
    "max_norm": "learner.max_grad_norm",
    "kl_tau": "learner.loss.kl",
}
"""what TRL, verl and prime-rl call a setting, and its key here; only for the hint in an error"""
_COUNTS_GROUPS = "prompts per step; completions = groups x batch.group_size"
FOREIGN_NOTES = {
    "num_train_epochs": "training is counted in steps of batch.groups tasks, not in epochs",
    "per_device_train_batch_size": _COUNTS_GROUPS,
    "train_batch_size": _COUNTS_GROUPS,
    "batch_size": _COUNTS_GROUPS,
    "gradient_accumulation_steps": "not one-to-one: most tokens in one micro-batch; gradients are the same for any",
    "scale_rewards": "zscore divides by the standard deviation of the group, centred does not",
    "generation_batch_size": _COUNTS_GROUPS,
    "warmup_ratio": "a number of optimizer steps, not a share",
    "importance_sampling_level": "gspo has one ratio per sequence, the others one per token",
    "max_prompt_length": "tasks with longer prompts are left out; counted in characters",
    "reward_weights": "let one function, tasks.reward, return the weighted mean",
    "lr_scheduler_type": "the learning rate is constant after learner.warmup_steps",
    "eval_dataset": "not needed; one task in eight is held out",
    "resume_from_checkpoint": "not needed; the same command resumes",
    "sync_ref_model": "the reference of the KL term is always the starting policy",
    "use_vllm": "not needed; rollouts come from shoal's own engine",
    "logging_steps": "not needed; every step is logged",
}
"""what to know about such a name, in addition to its key here or in the place of one"""


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One dotted key for the reader."""

    key: str
    allowed: str
    default: str
    text: str


def list_settings(model: type[BaseModel]) -> list[SettingInfo]:
    """Every setting of a model and the models within it, in order of definition."""
    settings = []
    for key, field in _walk_fields(model, ""):
        default = "required" if field.is_required() else _show_value(field.default)
        settings.append(SettingInfo(key, _phrase_allowed(field), default, field.description or ""))
    return settings


def select_settings(model: type[BaseModel], name: str) -> list[SettingInfo]:
    """The settings of a group (`learner`, `learner.loss`, `general`, `all`) or the one with this key."""
    settings = list_settings(model)
    if name == ALL_GROUPS:
        return settings
    if name == GENERAL:
        return [setting for setting in settings if "." not in setting.key]
    return [setting for setting in settings if setting.key == name or setting.key.startswith(f"{name}.")]


def list_groups(model: type[BaseModel]) -> dict[str, str]:
    """The groups of settings, with what they are about."""
    groups = {GENERAL: "Settings without a group."} if select_settings(model, GENERAL) else {}
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            groups[name] = " ".join((field.annotation.__doc__ or "").split("\n\n")[0].split())
    return groups


def describe_groups(model: type[BaseModel], width: int) -> str:
    """The groups of settings as a table of text, at most `width` columns wide."""
    rows = [(name, str(len(select_settings(model, name))), text) for name, text in list_groups(model).items()]
    return _format_table(("group", "settings", "meaning"), rows, width)


def describe_settings(settings: Sequence[SettingInfo], width: int) -> str:
    """Settings as a table of text, at most `width` columns wide."""
    rows = [(setting.key, setting.allowed, setting.default, setting.text) for setting in settings]
    return _format_table(("key", "allowed", "default", "meaning"), rows, width)


def _format_table(head: Sequence[str], rows: Iterable[tuple[str, ...]], width: int) -> str:
    # Imported here for `shoal --version` and the error paths, which need no tables.
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False, header_style="none")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def accepts_text(model: type[BaseModel], parts: Sequence[str]) -> bool:
    """Whether the key holds a string and nothing else, so that whatever is written for it is one."""
    known, field = _locate(model, parts)
    if field is None or known < len(parts):
        return False
    return field.annotation is str or get_origin(field.annotation) is Literal


def find_keys(model: type[BaseModel], name: str) -> list[str]:
    """The key of this name, or those that may be meant by it; none if there is nothing like it."""
    *tables, last = name.split(".")
    keys = [key for key, _ in _walk_fields(model, "")]
    if name in keys:
        return [name]
    known = {key.rpartition(".")[0] for key in keys}
    return _guess_keys(model, tables if ".".join(tables) in known else [], last)


def find_note(name: str) -> str:
    """What to know about a setting of another framework; mostly nothing."""
    return FOREIGN_NOTES.get(name.rpartition(".")[2], "")


def explain_errors(model: type[BaseModel], error: ValidationError) -> str:
    """The errors as sentences that begin with their dotted keys, one per line."""
    sentences: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        parts = [str(part) for part in detail["loc"]]
        known, field = _locate(model, parts)
        del parts[known:]
        # A union reports one error per alternative; the first stands for all.
        sentences.setdefault(".".join(parts), _explain_detail(model, parts, field, detail))
    return "\n".join(sentences.values())


def _explain_detail(model: type[BaseModel], parts: list[str], field: FieldInfo | None, detail: Any) -> str:
    key = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return _explain_unknown(model, parts)
    if detail["type"] == "value_error":
        return f"{key or 'configuration'}: {detail['ctx']['error']}"
    shown = _show_value(detail["input"])
    if field is None:
        table = _find_model(model, parts)
        return f"{key}: must be a table with the keys {', '.join(table.model_fields)}, got {shown}"
    allowed = _phrase_allowed(field, is_entry=detail["type"] != "dict_type")
    if not detail["type"].endswith(_TYPE_ERRORS):
        allowed = _phrase_range(field) or allowed
    return f"{key}: must be {allowed}, got {shown}"


def _explain_unknown(model: type[BaseModel], parts: list[str]) -> str:
    *tables, last = parts
    known = list(_find_model(model, tables).model_fields)
    guesses, note = _guess_keys(model, tables, last), find_note(last)
    if guesses:
        return f"{'.'.join(parts)}: unknown key; did you mean {' or '.join(guesses)}?" + (f" ({note})" if note else "")
    if note:
        return f"{'.'.join(parts)}: unknown key; {note}"
    owner = f" of {'.'.join(tables)}" if tables else ""
    return f"{'.'.join(parts)}: unknown key; known keys{owner}: {', '.join(known)}"


def _guess_keys(model: type[BaseModel], tables: list[str], last: str) -> list[str]:
    """What another framework calls so, keys elsewhere that end so (`lr`), a neighbour spelled alike, or other keys."""
    keys = [key for key, _ in _walk_fields(model, "")]
    for name in (".".join([*tables, last]), last):
        if FOREIGN_NAMES.get(name) in keys:
            return [FOREIGN_NAMES[name]]
    if last in FOREIGN_NOTES:
        return []
    ends = {key: key.rpartition(".")[2] for key in keys}
    if last in ends.values():
        return [key for key, end in ends.items() if end == last]
    if close := difflib.get_close_matches(last, _find_model(model, tables).model_fields, n=1):
        return [".".join([*tables, close[0]])]
    alike = difflib.get_close_matches(last, set(ends.values()), n=1, cutoff=0.8)
    return [key for key, end in ends.items() if end in alike]


def _phrase_allowed(field: FieldInfo, *, is_entry: bool = False) -> str:
    """What a field allows; `is_entry`: one value within it, if it is a table with free keys and without own words."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "allowed" in extra:
        return str(extra["allowed"])
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if (value_type := _find_value_type(field)) is not None:
        return _phrase_union(value_type) if is_entry else f"a table of values, each {_phrase_union(value_type)}"
    return " ".join(filter(None, [_phrase_union(annotation), _phrase_range(field)]))


def _phrase_union(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        return "a list of strings"
    if get_origin(annotation) not in (Union, types.UnionType):
        return _TYPES[annotation]
    names = [_TYPES[kind] for kind in get_args(annotation) if kind is not int or float not in get_args(annotation)]
    return ", ".join(names[:-1]) + " or " + names[-1]


def _phrase_range(field: FieldInfo) -> str:
    return " and ".join(filter(None, map(_phrase_rule, field.metadata)))


def _phrase_rule(rule: Any) -> str:
    match rule:
        case Gt(gt=bound):
            return f"greater than {_show_bound(bound)}"
        case Ge(ge=bound):
            return f"at least {_show_bound(bound)}"
        case Lt(lt=int(bound)) if bound >= 2**31:
            return f"less than 2^{bound.bit_length() - 1}"  # for 9.22337e+18 is no bound one could keep
        case Lt(lt=bound):
            return f"less than {_show_bound(bound)}"
        case Le(le=bound):
            return f"at most {_show_bound(bound)}"
        case MultipleOf(multiple_of=base):
            return f"a multiple of {_show_bound(base)}"
    return ""


def _show_bound(bound: Any) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _show_value(value: Any) -> str:
    if isinstance(value, dict):
        return "a table" if value else "{}"
    if isinstance(value, list | tuple):
        return "a list" if value else "[]"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _walk_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            yield from _walk_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _find_value_type(field: FieldInfo) -> Any:
    """The type of the values of a table with free keys, None for any other field."""
    return get_args(field.annotation)[1] if get_origin(field.annotation) is dict else None


def _find_model(model: type[BaseModel], parts: Sequence[str]) -> type[BaseModel]:
    for part in parts:
        annotation = model.model_fields[part].annotation
        assert _is_model(annotation)
        model = annotation
    return model


def _locate(model: type[BaseModel], parts: Sequence[str]) -> tuple[int, FieldInfo | None]:
    """How many parts of a location name a field, a value in a table with free keys, or an unknown key; and the field.

    Parts beyond are what pydantic appends below a field, such as the alternative of a union. Without a field: a table,
    or an unknown key.
    """
    for index, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            return index + 1, None
        if not _is_model(field.annotation):
            return index + (2 if _find_value_type(field) is not None else 1), field
        model = field.annotation
    return len(parts), None
