"""Reports of run directories; those of fake_run.py are fake, and say so."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.config.layers import ConfigError
from harness.tools.report.write_reports import write_reports
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).resolve().parents[3]


def page_of(folder: Path) -> str:
    return write_reports(folder)[1].read_text()


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.mark.parametrize("ranks", [1, 16])
def test_a_page_has_a_row_and_a_memory_plot_for_every_rank_and_needs_no_other_file(ranks: int, tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "run", ranks, passed=True))
    assert (
        ">PASSED</span>" in page
        and ">allowed for the mean<" in page
        and not re.search(r"(?:src|href)=|@import|url\(", page)
    )
    whole, steps, large, *others = drawings(page)
    for timeline in (whole, steps):
        told = {each.text.split(":")[0] for each in timeline.iter("{http://www.w3.org/2000/svg}title") if each.text}
        assert told == {f"rank {rank}" for rank in range(ranks)}
    assert large.attrib["aria-label"].startswith("rank ")
    assert sum(each.attrib["aria-label"].startswith("rank ") for each in others) == ranks
    # Nothing is drawn outside of its drawing.
    for drawing in drawings(page):
        wide, tall = float(drawing.attrib["width"]), float(drawing.attrib["height"])
        for each in drawing.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(each.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= wide + 1 and y + h <= tall + 1


def test_validations_have_a_curve_over_updates_and_a_table(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    page = page_of(folder)
    assert "Validation" not in page and "Validation" not in (folder / "report.md").read_text()
    with (folder / "metrics.jsonl").open("a") as file:
        for updates, accuracy in ((0, 0.25), (3, 0.5), (4, 0.75)):
            values = {"step": updates, "accuracy": accuracy, "accuracy/gsm8k": accuracy, "rows": 8}
            row = {"kind": "validation"} | {f"validation/{name}": value for name, value in values.items()}
            file.write(json.dumps(row) + "\n")
    (curve,) = [each for each in drawings(page_of(folder)) if each.attrib["aria-label"].startswith("accuracy")]
    first, second, third = [float(each.attrib["cx"]) for each in curve.iter("{http://www.w3.org/2000/svg}circle")][:3]
    assert second - first == pytest.approx(3 * (third - second), abs=0.2), "three updates lie between the first two"
    markdown = (folder / "report.md").read_text()
    assert "| updates | accuracy | accuracy/gsm8k | rows |" in markdown and "| 3 | 0.5 | 0.5 | 8 |" in markdown


def test_the_reports_of_a_long_run_take_seconds(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2, passed=True, steps=400)
    began = time.process_time()
    write_reports(folder)
    assert time.process_time() - began < 5, "CPU seconds; a pass over all events for each of them takes a minute"


def test_a_hang_is_told_with_the_rank_that_is_behind(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 64)
    page = page_of(folder)
    markdown = (folder / "report.md").read_text()
    for text in (page, markdown):
        assert "a deadline passed, with rank 60 behind in update_critic of step 1" in text
        assert "NCCL_CUMEM_ENABLE" in text and "24-31" in text, "what differs, and on which ranks"
    assert ">FAILED</span>" in page and "Exit code 124" in page and "Exit code 124" in markdown
    assert 'font-weight="700">rank 60<' in page


def test_an_issue_has_all_its_parts_and_no_secret(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 8)
    facts = json.loads((folder / "environment.json").read_text())
    for each in facts:
        each["environment"]["SGLANG_API_KEY"] = "hunter2"
    (folder / "environment.json").write_text(json.dumps(facts))
    page = page_of(folder)
    markdown = (folder / "report.md").read_text()
    sections = re.findall(r"(?m)^## (.*)$", markdown)
    assert sections == ["What", "Expected", "Seen", "Environment", "Reproduce with"]
    assert "hunter2" not in markdown + page and "SGLANG_API_KEY=[redacted " in markdown
    assert "torchrun --standalone --nproc-per-node=8 launch/ppo.py config.toml" in markdown


def test_a_passed_run_has_its_sections_and_is_written_alike_every_time(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    write_reports(folder)
    once = (folder / "report.md").read_text()
    write_reports(folder)
    assert (folder / "report.md").read_text() == once
    sections = re.findall(r"(?m)^## (.*)$", once)
    assert sections == [
        "What", "Expected", "Seen", "Steps", "Verification", "Start-up", "Environment", "Reproduce with",
    ]  # fmt: skip
    assert "| 3 | 0.5 | " in once and "- engine: 31.0 s" in once
    assert "every tensor by fingerprint (fake)" in once


def test_a_run_that_began_no_phase_has_a_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    for name in ("metrics.jsonl", "events/rank0.jsonl"):
        (folder / name).unlink()
    assert "DID NOT END" in page_of(folder)


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory: it has no config\.toml"):
        write_reports(tmp_path)
    done = subprocess.run(
        [sys.executable, "launch/report.py", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "foreign",
    [
        "[1, 2]",
        "{",
        '{"first": 3, "code": 1, "said": []}',
        '{"message": "mine"}',
        "[" * 20_000,
        '{"first": {}, "code": 1, "said": []}',
    ],
)
def test_a_failure_file_of_another_program_is_a_mistake(foreign: str, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    (folder / "failure-mine.json").write_text(foreign)
    with pytest.raises(ConfigError, match=r"failure-mine\.json is not what a watchdog writes"):
        write_reports(folder)


def test_a_failed_page_shows_its_traceback_once_and_links_what_to_read_next(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    page = page_of(folder)
    assert re.findall(r'href="([^"]*)"', page) == ["failure-host0.json", "events", "config.toml"]
    assert "RUN_DIR" not in page
    assert "prefers-color-scheme: dark" in page
    assert "[engine]" in page.split("Reproduce with")[1]
    frames = re.findall(r"File &#34;[^&]*&#34;, line \d+, in \w+", page)
    assert len(frames) == len(set(frames))


def test_the_sync_after_the_last_update_is_no_step_more(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True, steps=3)
    file = folder / "events" / "rank0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-2:-2] = [
        {**lines[-3], "event": f"phase_{half}", "phase": "sync", "step": 3, "seconds": 0.0} for half in ("start", "end")
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = page_of(folder)
    assert "Steps 0 to 2, and what followed" in page and "sync 0 to 2" in page
