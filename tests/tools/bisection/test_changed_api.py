"""Which engine arguments changed between two SGLangs: the installed one, each time with another argument more."""

import importlib.util
import re
from pathlib import Path

import pytest

from harness.tools.bisection.bisect_report import changed_api
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.state import Record


def site(folder: Path, argument: str) -> Record:
    """Site-packages with the installed SGLang, all of it links, save for its server arguments."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("there is no sglang")
    package = Path(spec.origin).parent
    (folder / "sglang" / "srt").mkdir(parents=True)
    for source in [*package.iterdir(), *(package / "srt").iterdir()]:
        link = folder / "sglang" / source.relative_to(package)
        if source.name not in ("srt", "server_args.py"):
            link.symlink_to(source)
    text = (package / "srt" / "server_args.py").read_text()
    (folder / "sglang" / "srt" / "server_args.py").write_text(
        re.sub(r"(?m)^(class ServerArgs\b.*:)$", rf"\1\n    {argument}: int = 0", text)
    )
    return Record(name="1.0", verdict="bad", reason="", environment=Environment(python="", paths=(str(folder),)))


def test_a_renamed_engine_argument_is_listed(tmp_path: Path) -> None:
    before, after = site(tmp_path / "a", "haste"), site(tmp_path / "b", "patience")
    lines = list(changed_api(before, after))
    assert "- engine arguments gone: haste" in lines and "- engine arguments new: patience" in lines
    assert list(changed_api(before, before)) == []
