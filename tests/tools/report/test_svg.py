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


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors (#rrggbb) as WCAG has it, 1 to 21."""
    light = sorted(_luminance(shade) for shade in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def _luminance(shade: str) -> float:
    parts = [int(shade[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_text_of_the_page_stands_out_in_light_and_in_dark(theme: int) -> None:
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{.*\}", STYLE)[theme]))
    for text in ("ink", "muted", "bad", "link"):
        for ground in ("paper", "panel", "bad-panel"):
            assert contrast(colors[text], colors[ground]) >= AA, (text, ground)


def test_the_badges_can_be_read() -> None:
    badges = re.findall(r"\.(?:PASSED|FAILED|DID) \{ background: (#[0-9a-f]{6})", STYLE)
    assert len(badges) == 3
    assert all(contrast("#ffffff", shade) >= AA for shade in badges)


def test_columns_of_memory_are_named_and_steps_marked_where_they_begin() -> None:
    places = [(step, f"phase{number}") for step in range(20) for number in range(12)]
    readings = [Reading(phase=name, step=step, figures={"rss": 1 << 30}) for step, name in places]
    drawn = svg.memory(readings, "rank 0", svg.WIDTH, 220, 1 << 30, names=True)
    labels = re.findall(r"rotate\(-60\)\">(.*?)</text>", drawn)
    assert len(labels) == svg.MOST_LABELS and labels[0] == "phase0 of step 0"
    assert drawn.count('class="step"') == 19


def test_a_stack_adds_up_to_the_gpu() -> None:
    column = svg.stack({"used": 10, "reserved": 15, "engine": 20, "free": 65})
    assert column == {"used": 10, "reserved": 5, "engine": 20, "free": 65}
    assert svg.stack({"rss": 7}) == {"rss": 7}


def test_values_without_a_number_are_left_out() -> None:
    assert "no values" in svg.lines({"mean": [0.0]}, "difference", log=True)
