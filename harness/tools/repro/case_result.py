"""The result of one case: as a file, and as a [[seen]] table in the catalogue of failures."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.tools.diagnose.entries import FOLDER, Measurement, read_entry
from harness.tools.repro.case import Variant
from harness.tools.repro.case_verdict import VariantOutcome, VerdictKind

FIRST_EXAMPLE = "\n[[examples]]"


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What SLUG.json holds."""

    slug: str
    verdict: VerdictKind
    exit_code: int
    sentence: str
    """The verdict's, with what was measured."""
    device: str
    versions: Mapping[str, str]
    variants: Mapping[Variant, VariantOutcome]
    """Those that ran, with the decisive lines of their output."""


def write_result(folder: Path, result: CaseResult) -> None:
    """Write FOLDER/SLUG.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.slug}.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read_result(file: Path) -> CaseResult:
    """Return what write_result wrote."""
    values = json.loads(file.read_text(encoding="utf-8"))
    return CaseResult(
        **values | {"variants": {name: VariantOutcome(**each) for name, each in values["variants"].items()}}
    )


def as_seen(result: CaseResult, date: str) -> Measurement | None:
    """Return the catalogue's table, None for a result that shows nothing."""
    if result.verdict not in ("reproduced", "not reproduced"):
        return None
    text = f"launch/repro.py run {result.slug}: {result.verdict}: {result.sentence}"
    return Measurement(versions=result.versions, date=date, device=result.device, result=text)


def record(slug: str, seen: Measurement, folder: Path = FOLDER) -> bool:
    """Append the table to those of the catalogue's entry; return False if the entry has it already."""
    file = folder / f"{slug}.toml"
    if seen in read_entry(file).seen:
        return False
    versions = ", ".join(f"{name} = {json.dumps(version)}" for name, version in seen.versions.items())
    lines = [f"{name} = {json.dumps(getattr(seen, name))}" for name in ("date", "device", "result")]
    table = "\n".join(["", "[[seen]]", f"versions = {{ {versions} }}", *lines, ""])
    text = file.read_text(encoding="utf-8")
    at = text.index(FIRST_EXAMPLE)
    file.write_text(text[:at] + table + text[at:], encoding="utf-8")
    if seen not in read_entry(file).seen:
        file.write_text(text, encoding="utf-8")
        raise ValueError(f"{file.name}: the recorded table must read back as it was written, got another: {seen}")
    return True
