"""Tasks of our own families in a task set: {"family": its name, "info": what its verifier needs}."""

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import build_task, score_text
from shoal.tasks.registry import GYM, list_families, load_family
from shoal.tasks.verify.base import Cheap, Info


class FamilyVerifier(Cheap):
    """The verifier of the family that a task came from. A score never depends on a family's options (tasks/base.py)."""

    name = "family"
    version = 1

    def check_info(self, info: Info) -> None:
        known = info.get("family") in list_families() and not str(info.get("family")).startswith(GYM)
        if not known or not isinstance(info.get("info"), dict):
            raise ConfigError("info: a task of a family has the name of one and what its verifier needs")

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        family = load_family(info["family"], {})
        return score_text(family, build_task(family.name, prompt, info["info"]), completion)
