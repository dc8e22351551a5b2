"""Tasks of reasoning-gym in a task set: {"dataset": its name there, "answer": the right one}."""

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.gym import VERSION, find_scorer, score_gym, stamp_gym
from shoal.tasks.verify.base import Cheap, Info


class GymVerifier(Cheap):
    """The scorer of the family that a task came from."""

    name = "gym"
    version = VERSION

    @property
    def stamp(self) -> str:
        return stamp_gym()

    def check_info(self, info: Info) -> None:
        if not isinstance(info.get("answer"), str) or not isinstance(info.get("dataset"), str):
            raise ConfigError("info: a task of reasoning-gym has a dataset and an answer, both texts")
        find_scorer(info["dataset"])

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        return score_gym(info["dataset"], info["answer"], completion)
