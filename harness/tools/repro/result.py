"""What one run of a case came to, as a file, and as an entry of the catalogue."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.tools.diagnose.entries import FOLDER, Seen, read_entry
from harness.tools.repro.case import Case, Variant
from harness.tools.repro.verdict import Kind, Outcome, Verdict, decisive

FIRST_EXAMPLE = "\n[[examples]]"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of `launch/repro.py run SLUG`."""

    slug: str
    verdict: Kind
    exit_code: int
    sentence: str
    """With what was measured."""
    device: str
    """On which it ran, for people: "2-core CPU", "1 x NVIDIA H200"."""
    versions: Mapping[str, str]
    variants: Mapping[Variant, Outcome]
    """Their output cut to the lines that tell most, joined."""


def make_result(
    slug: str,
    case: Case,
    verdict: Verdict,
    outcomes: Mapping[Variant, Outcome],
    *,
    device: str,
    versions: Mapping[str, str],
) -> Result:
    """verdict: of the outcomes, of which there may be one, or none."""
    told = {name: replace(each, output="\n".join(decisive(case, each.output))) for name, each in outcomes.items()}
    return Result(
        slug=slug,
        verdict=verdict.kind,
        exit_code=verdict.exit_code,
        sentence=verdict.sentence,
        device=device,
        versions=versions,
        variants=told,
    )


def file_of(folder: Path, slug: str) -> Path:
    """Where its result lies."""
    return folder / f"{slug}.json"


def write_result(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, result.slug).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read_result(folder: Path, slug: str) -> Result:
    """What write_result wrote."""
    values = json.loads(file_of(folder, slug).read_text(encoding="utf-8"))
    return Result(**values | {"variants": {name: Outcome(**each) for name, each in values["variants"].items()}})


def as_seen(result: Result, date: str) -> Seen | None:
    """None where it showed nothing: it could not run, or proved nothing."""
    if result.verdict not in ("reproduced", "not reproduced"):
        return None
    said = f"launch/repro.py run {result.slug}: {result.verdict}: {result.sentence}"
    return Seen(versions=result.versions, date=date, device=result.device, result=said)


def record(slug: str, seen: Seen, folder: Path = FOLDER) -> bool:
    """Write it into the catalogue's entry, after what was seen before. False where it stands there already."""
    file = folder / f"{slug}.toml"
    if seen in read_entry(file).seen:
        return False
    text = file.read_text(encoding="utf-8")
    at = text.index(FIRST_EXAMPLE)
    file.write_text(text[:at] + "\n" + seen_as_toml(seen) + text[at:], encoding="utf-8")
    if seen not in read_entry(file).seen:
        file.write_text(text, encoding="utf-8")
        raise ValueError(f"{file.name}: what was seen does not read back as it was written: {seen}")
    return True


def seen_as_toml(seen: Seen) -> str:
    """One [[seen]] table."""
    versions = ", ".join(f"{name} = {json.dumps(version)}" for name, version in seen.versions.items())
    lines = [f"{name} = {json.dumps(getattr(seen, name))}" for name in ("date", "device", "result")]
    return "\n".join(["[[seen]]", f"versions = {{ {versions} }}", *lines]) + "\n"
