"""From a question to its candidates, and to where their environments come from."""

import re
import sys
from dataclasses import replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from harness.tools.bisection import command, commits, registry, uv
from harness.tools.bisection.candidates import Candidate, between, check_order, in_environments, in_wheels
from harness.tools.bisection.environment import Provider, base_python, canonical, own_version
from harness.tools.bisection.laid_over import Commits, Overlay, Prepared
from harness.tools.bisection.pinned import PYTHONS, Pinned
from harness.tools.bisection.question import Options, Question, WrongQuestion
from harness.tools.bisection.store import Store, default_root
from harness.tools.bisection.trace import module_of

OWN_NEEDS = ("accelerate", "datasets", "jinja2", "psutil", "rich", "safetensors", "tyro")
"""What a script of this repository imports beside SGLang and what that brings."""


def settle(question: Question) -> Question:
    """With --git: its ends as hashes, for a branch moves, and the package that the checkout is of. Raises WrongQuestion."""
    options = question.options
    if not options.git:
        return question
    checkout = Path(options.git)
    good, bad = (commits.resolved(checkout, name) for name in (options.good, options.bad))
    package = options.package
    if package == Options.package and not commits.has_module(checkout, bad, module_of(package)):
        package = commits.package_of(checkout, bad)
        if not package:
            raise WrongQuestion(
                f"neither pyproject.toml nor setup.cfg of {checkout} names its package; give --package."
            )
    return replace(question, options=replace(options, good=good, bad=bad, package=package))


def candidates(question: Question) -> list[Candidate]:
    """Oldest first, both ends included. Raises WrongQuestion, NoNetwork."""
    options, older, newer = question.options, question.older, question.newer
    if options.git:
        return commits.commits(Path(options.git), older, newer, options.find_fix)
    check_order(older, newer, options.find_fix)
    if options.environments:
        found, of = in_environments(Path(options.environments)), options.environments
    elif options.wheels:
        found, of = in_wheels(Path(options.wheels), options.package), options.wheels
    else:
        found, of = registry.releases(options.package), options.package
    return between(found, older, newer, pre_releases=options.pre_releases, of=of)


def provider(question: Question, folder: Path, no_gpu: bool) -> Provider:
    """Raises WrongQuestion."""
    options = question.options
    python = base_python(options.python)
    if options.python and "/" in options.python and not Path(python).exists():
        raise WrongQuestion(f"--python {options.python} is not there.")
    if options.environments:
        return Prepared(python)
    store = store_of(options)
    if options.git:
        return Commits(Path(options.git), python, store)
    environment = uv.environment(store.root)
    sources = tuple(["--no-index", "--find-links", options.wheels] if options.wheels else registry.sources())
    if options.only_package:
        return Overlay(options.package, python, store, sources, environment)
    needs = OWN_NEEDS if command.is_own(command.script_of(question)) else ()
    held = _held(question)
    return Pinned(
        package=options.package,
        requirements=(*held, *needs),
        held_since=_published(held) if held and not options.wheels else "",
        today=options.today,
        no_gpu=no_gpu,
        pythons=_pythons(options.python, environment),
        store=store,
        sources=sources,
        environment=environment,
        locks=folder / "resolutions",
        dated=not options.wheels,
    )


def store_of(options: Options) -> Store:
    """Where environments are kept, made or not; those of --environments are not in it."""
    root = Path(options.store).absolute() if options.store else default_root()
    return Store(root, int(options.store_gib * (1 << 30)))


def _held(question: Question) -> tuple[str, ...]:
    """Requirements; without --hold, this Python's sglang when something else moves."""
    options = question.options
    if options.hold == ("none",) or (not options.hold and (canonical(options.package) == "sglang" or options.wheels)):
        return ()
    if not options.hold:
        own = own_version("sglang")
        if not own:
            raise WrongQuestion(
                f"--package {options.package} holds sglang, of which this Python has none; give --hold sglang==VERSION, or --hold none."
            )
        return (f"sglang=={own}",)
    for each in options.hold:
        try:
            Requirement(each)
        except InvalidRequirement as error:
            raise WrongQuestion(f"--hold {each!r} is no requirement; give one such as sglang==0.5.20.") from error
    return options.hold


def _published(held: tuple[str, ...]) -> str:
    """When the newest of what is held by version was published."""
    times = []
    for each in held:
        if match := re.search(r"==\s*([\w.]+)", each):
            found = registry.releases(canonical(each)).get(Version(match[1]))
            if found is None:
                raise WrongQuestion(f"--hold {each}: there is no such release.")
            times.append(found.time)
    return max((time for time in times if time), default="")


def _pythons(asked: str, environment: dict[str, str]) -> tuple[str, ...]:
    """Minor versions, the preferred one first."""
    if asked:
        if not uv.has_python(asked, environment):
            raise WrongQuestion(f"--python {asked} is not on this machine.")
        return (asked,)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (own, *(each for each in PYTHONS if each != own))
