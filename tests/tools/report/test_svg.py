"""What a reader can see of drawings: whole labels, limits, and text that stands out from its color."""

import re
from pathlib import Path

import pytest

from harness.tools.report import svg
from harness.tools.report.run_history import Reading

AA = 4.5
"""The least contrast of small text, as WCAG has it."""
STYLE = (Path(svg.__file__).parent / "style.css.jinja").read_text()


@pytest.mark.parametrize("values", [(-4.986e-05, 1.2e-05), (-0.0002195, 0.0003556), (-123456.0, -123455.0)])
def test_labels_of_an_axis_are_inside_the_drawing_and_differ(values: tuple[float, float]) -> None:
    drawn = svg.lines({"actor/loss": values}, "actor/loss")
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">(-?[\d.]+(?:e[+-]\d+)?)</text>', drawn)
    assert len({label for _, label in labels}) == 3
    assert labels[0][1].startswith("-")
    for end, label in labels:
        assert float(end) - svg.CHARACTER * len(label) >= 0


def test_the_limit_is_drawn_and_the_logarithmic_axis_named() -> None:
    drawn = svg.lines({"mean": [1e-7, 2e-7]}, "difference", log=True, limits={"allowed for the mean": 1e-5})
    assert "difference (logarithmic)" in drawn
    assert "allowed for the mean" in drawn and 'class="limit"' in drawn
    assert ">1e-05</text>" in drawn, "the axis reaches the limit"


def test_the_labels_of_phases_can_be_read_on_their_color() -> None:
    shades = [shade for shade, _ in svg.GROUPS.values()] + [svg.FAILED, svg.OTHER]
    assert all(svg.contrast(svg.ink(shade), shade) >= AA for shade in shades)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_of_the_page_stands_out_in_light_and_in_dark(theme: int) -> None:
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{.*\}", STYLE)[theme]))
    for text in ("ink", "muted", "bad", "link"):
        for ground in ("paper", "panel", "bad-panel"):
            assert svg.contrast(colors[text], colors[ground]) >= AA, (text, ground)


def test_the_badges_can_be_read() -> None:
    badges = re.findall(r"\.(?:PASSED|FAILED|DID) \{ background: (#[0-9a-f]{6})", STYLE)
    assert len(badges) == 3
    assert all(svg.contrast("#ffffff", shade) >= AA for shade in badges)


@pytest.mark.parametrize(("steps", "phases"), [(3, 12), (20, 2), (2, 12)])
def test_the_marks_of_steps_are_inside_the_drawing_and_apart(steps: int, phases: int) -> None:
    places = [(step, f"phase{number}") for step in range(steps) for number in range(phases)][: 1 - phases]
    readings = [Reading(rank=0, phase=name, step=step, at=0.0, figures={"rss": 1 << 30}) for step, name in places]
    drawn = svg.memory(readings, "rank 0", svg.WIDTH, 220, 1 << 30, names=True)
    marks = re.findall(r'<text x="([\d.]+)" y="29" text-anchor="(\w+)" class="mark">(step \d+)<', drawn)
    wide = [svg.CHARACTER * len(text) for _, _, text in marks]
    begins = [float(x) - (size if anchor == "end" else 0) for (x, anchor, _), size in zip(marks, wide, strict=True)]
    ends = [begin + size for begin, size in zip(begins, wide, strict=True)]
    assert ends[-1] <= svg.WIDTH
    assert all(end < begin for end, begin in zip(ends[:-1], begins[1:], strict=True))
