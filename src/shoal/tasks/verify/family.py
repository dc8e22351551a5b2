"""Tasks of our own families in a task set: {"family": its name, "info": what its verifier needs}.

Tasks of reasoning-gym in a task set: {"dataset": its name there, "answer": the right one}.
"""

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import build_task, score_text
from shoal.tasks.families.reasoning_gym import VERSION, find_scorer, score_gym, stamp_gym
from shoal.tasks.registry import GYM, list_families, load_family
from shoal.tasks.verify.base import Info, Verifier


class FamilyVerifier(Verifier):
    """The verifier of the family that a task came from. A score never depends on a family's options (tasks/base.py)."""

    name = "family"
    version = 1

    def check_info(self, info: Info) -> None:
        known = info.get("family") in list_families() and not str(info.get("family")).startswith(GYM)
        if not known or not isinstance(info.get("info"), dict):
            raise ConfigError("info: a task of a family needs the name of a family and the info of its verifier")

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        family = load_family(info["family"], {})
        return score_text(family, build_task(family.name, prompt, info["info"]), completion)


class GymVerifier(Verifier):
    """The scorer of the family that a task came from."""

    name = "gym"
    version = VERSION

    @property
    def stamp(self) -> str:
        return stamp_gym()

    def check_info(self, info: Info) -> None:
        if not isinstance(info.get("answer"), str) or not isinstance(info.get("dataset"), str):
            raise ConfigError("info: a task of reasoning-gym needs a dataset and an answer, both texts")
        find_scorer(info["dataset"])

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        return score_gym(info["dataset"], info["answer"], completion)
