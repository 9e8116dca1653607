"""What a candidate asks for against what it is laid over."""

from pathlib import Path

from harness.tools.bisection.bisect_report import describe_unmet
from harness.tools.bisection.installation import Environment, unmet_requirements
from harness.tools.bisection.state import Record


def test_requires_dist_of_the_overlay(tmp_path: Path) -> None:
    info = tmp_path / "moving-1.0.dist-info"
    info.mkdir()
    requires = [
        "helper==1.0",
        "Torch.Thing>=2,<3",
        "fine>=1",
        "elsewhere; python_version < '3'",
        "extra-only; extra == 'x'",
    ]
    requires += ["absent"]
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: moving\nVersion: 1.0\n" + "".join(f"Requires-Dist: {each}\n" for each in requires)
    )
    freeze = {"helper": "2.0", "torch-thing": "3.1+cpu", "fine": "1.5", "moving": "1.0"}
    environment = Environment(python="", paths=(str(tmp_path),), freeze=freeze)
    record = Record(name="1.0", verdict="bad", reason="", environment=environment)
    assert unmet_requirements(environment, "moving") == {
        "helper": ("==1.0", "2.0"),
        "Torch.Thing": ("<3,>=2", "3.1+cpu"),
        "absent": ("any", ""),
    }
    assert describe_unmet(record, "moving") == (
        "1.0 was tested with helper 2.0 (it asks for ==1.0), with Torch.Thing 3.1+cpu (it asks for <3,>=2), without 1 of its"
        " dependencies; leave out --only-package to install what it asks for."
    )
    assert unmet_requirements(environment, "other") == {} and describe_unmet(record, "other") == ""
