"""What launch/repro.py says of a case before it is run."""

from harness.tools.repro.case import Case, entry_of, module_name


class WrongRequest(ValueError):
    """What was asked of the command line makes no sense."""


def in_one_line(slug: str, case: Case) -> str:
    """As `list` has it."""
    needs = f"{case.needs}, one_gpu" if case.on_gpu else case.needs
    return f"{slug:<32} {needs:<13} {'engine' if case.engine else '':<7} {case.title}"


def described(slug: str, case: Case) -> str:
    """As `show` has it: the case, the catalogue's entry, and what was seen."""
    entry = entry_of(slug, case)
    number = case.number
    measured = (
        [f"number: {number.name} > {number.broken_above:g}; control < {number.healthy_below:g}"] if number else []
    )
    seen = [f"seen: {each.date}, {each.device}, {_versions(each.versions)}: {each.result}" for each in entry.seen]
    lines = [
        f"{slug}: {case.title}",
        f"needs: {', '.join((case.needs, *case.requires))}; at most {case.seconds:.0f} s a variant",
        differs(case),
        *(f"signature: {each}" for each in case.signature),
        *measured,
        f"entry: {entry.slug}, in {', '.join(entry.phases)}",
        f"cause: {' '.join(entry.cause.split())}",
        f"fix: {' '.join(entry.fix.split())}",
        *entry.links,
        *(" ".join(each.split()) for each in seen),
        f"by hand: PYTHONPATH=. python -m {module_name(slug)} broken",
    ]
    return "\n".join(lines)


def differs(case: Case) -> str:
    """The one thing in which the two variants do."""
    return f"differs in: {case.broken} (broken) | {case.healthy} (healthy)"


def _versions(versions: object) -> str:
    return ", ".join(f"{name} {version}" for name, version in dict(versions).items())  # type: ignore[call-overload]
