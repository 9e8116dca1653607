"""Bug: one mistake that was merged into SGLang or a trainer once, put back by replacing one function by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

Expected = Literal["caught", "outside", "passes"]


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug, where it is, the setting in which it acts, and what a check must say of it."""

    id: str
    pull: str
    """The pull request that mended it, such as sglang#2009."""
    sentence: str
    """What is wrong."""
    function: str
    """MODULE:NAME of the function that it replaces, such as harness.trainer.advantages:gae."""
    replacement: Callable[..., Any]
    """Called with the function as it was, and then the arguments."""
    settings: tuple[str, ...] = ()
    """Overrides in which it acts, each NAME=VALUE."""
    config: str = "configs/cpu/quickstart.toml"
    says: str = ""
    """A pattern of what the failure must name: the tensor or the cause; "" if nothing in a run can tell."""
    slugs: tuple[str, ...] = ()
    """Entries of the catalogue that may be named as known; any other one is a wrong name."""
    unsaid: str = ""
    """A pattern of what a run that passes must not claim."""
    expected: Expected = "caught"
    """outside: no check of weights can see it; passes: the engine is healthy, and a failure is a false alarm."""

    def plant(self, module: Any) -> None:
        """Replace the function in its module."""
        *owners, name = self.function.partition(":")[2].split(".")
        owner = module
        for each in owners:
            owner = getattr(owner, each)
        before = getattr(owner, name)

        @wraps(before)
        def replaced(*arguments: Any, **named: Any) -> Any:
            return self.replacement(before, *arguments, **named)

        setattr(owner, name, replaced)

    def words(self) -> list[str]:
        """Return the command line of launch/ppo.py in which it acts."""
        return [self.config, *(word for each in self.settings for word in f"--{each}".split("=", 1))]

    def environment(self, mark: Path) -> dict[str, str]:
        """Return the variables by which hook/sitecustomize.py plants it. mark: the file that shows whether it acts."""
        here = Path(__file__).parent
        paths = (str(here / "hook"), str(here.parents[1]), os.environ.get("PYTHONPATH", ""))
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "REAL_BUG": f"{self.replacement.__module__}:{self.replacement.__name__}",
            "REAL_BUG_PLACE": self.function.partition(":")[0],
            "REAL_BUG_MARK": str(mark),
        }


def bug(
    id: str, pull: str, sentence: str, function: str, *settings: str, **more: Any
) -> Callable[[Callable[..., Any]], Bug]:
    """Make a Bug of the function below; see Bug's fields."""

    def declare(replacement: Callable[..., Any]) -> Bug:
        return Bug(
            id=id,
            pull=pull,
            sentence=sentence,
            function=function,
            replacement=replacement,
            settings=settings,
            **more,
        )

    return declare


def acted() -> None:
    """Note that the bug has done something: one byte in the run's mark."""
    descriptor = os.open(os.environ["REAL_BUG_MARK"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, b".")
    os.close(descriptor)
