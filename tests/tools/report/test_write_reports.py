"""Reports of run directories; those of fake_run.py are fake, and say so."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import export
import pytest
from matplotlib.figure import Figure

from harness.config.layers import ConfigError
from harness.tools.export import evidence
from harness.tools.report import pictures
from harness.tools.report.issue_text import MOST_ROWS
from harness.tools.report.pictures import curves
from harness.tools.report.write_reports import to_html, write_reports
from tests.tools.report.fake_run import STARTED, fake_run

REPOSITORY = Path(__file__).resolve().parents[3]


def reports_of(folder: Path) -> tuple[str, str]:
    """Return report.md and report.html."""
    markdown, html, _ = write_reports(folder)
    return markdown.read_text(), html.read_text()


def sections(markdown: str) -> list[str]:
    return re.findall(r"(?m)^## (.*)$", markdown)


def test_a_passed_run_has_its_sections_and_is_written_alike_every_time(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    once, html = reports_of(folder)
    assert reports_of(folder) == (once, html) and html.count("<svg") == 2 and "dc:date" not in html
    assert sections(once) == [
        "Result",
        "What ran",
        "Steps",
        "Verification",
        "Start-up",
        "Engine",
        "Environment",
        "Reproduce with",
    ]
    assert once.startswith("# PASSED: PPO on sglang, qwen3_moe, dp 1 tp 1 pp 1\n")
    assert "| 3 | 0.5 | " in once and "- engine: 31.0 s" in once
    assert "every tensor by fingerprint (fake)" in once
    assert all("sglang 0.5.20 on cuda, preset: sglang" in text for text in (once, html))
    assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\((?!#)", html), "the page needs no other file"
    assert re.findall("<h2>(.*?)</h2>", html) == sections(once)
    assert html.count("<table>") == 2 and "<script" not in html
    for text in (once, html):
        changed, _, whole = text.split("Reproduce with")[1].partition("<details>")
        assert "qwen3_moe" in changed and "[memory]" not in changed, "what has the default value is folded"
        assert "[memory]" in whole and "qwen3_moe" in whole


@pytest.mark.parametrize(
    ("words", "title", "ran", "again"),
    [
        ("launch/sync.py a.toml --bench", "Weight sync on", "`launch/sync.py --bench`: qwen3_moe", "launch/sync.py config.toml --bench"),
        ("launch/step_bench.py --prompt-tokens 9", "Timed PPO on", ", 4 steps, weights sent by ", "config.toml --prompt-tokens 9"),
        ("launch/mismatch.py a.toml", "Mismatch search on", "`launch/mismatch.py`: qwen3_moe", "launch/mismatch.py config.toml"),
    ],
)  # fmt: skip
def test_what_ran_is_what_was_started(words: str, title: str, ran: str, again: str, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    ranks = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps([ranks[0] | {"command": f"torchrun {words}"}]))
    markdown, _ = reports_of(folder)
    assert markdown.startswith(f"# PASSED: {title} sglang, ")
    assert ran in markdown and f"{again} --run.dir runs/again" in markdown
    assert (" steps, " in markdown.split("## What ran")[1].split("##")[0]) == ("step_bench" in words)


def test_a_hang_is_told_first_with_the_rank_that_is_behind(tmp_path: Path) -> None:
    markdown, html = reports_of(fake_run(tmp_path / "run", 64))
    assert sections(markdown) == [
        "First failure",
        "Where the ranks stood",
        "What ran",
        "Steps",
        "Start-up",
        "Engine",
        "Environment",
        "Reproduce with",
    ]
    for text in (markdown, html):
        assert "a deadline passed, with rank 60 behind in update_critic of step 1" in text
        assert "NCCL_CUMEM_ENABLE" in text and "24-31" in text, "what differs, and on which ranks"
        assert "Exit code 124, a deadline passed." in text and "failure-host0.json" in text
    assert (
        "| 0-59, 61-63 | in sync of step 2 |" in markdown and "after update_critic of step 1: furthest behind" in html
    )
    assert "rank 60</text>" in html and "8 of 64 ranks" in html
    assert '<body class="FAILED">' in html


def test_what_a_program_printed_is_text_on_the_page() -> None:
    markdown = "# <script>x</script>\n\n![a](http://x/y.png) [b](javascript:x) __init__ https://a.example/issue\n\n<img src=x>\n"
    html = to_html(markdown)
    assert "<script" not in html and "<img" not in html and "__init__" in html
    assert re.findall(r'href="([^"]*)"', html) == ["http://x/y.png", "https://a.example/issue"]
    quoted = to_html('see "https://a.example/?a=1&b=2", or <https://b.example>')
    assert re.findall(r'href="([^"]*)"', quoted) == ["https://a.example/?a=1&amp;b=2", "https://b.example"]


def test_a_long_run_has_its_last_steps_and_validations_and_takes_seconds(tmp_path: Path) -> None:
    """The first step lacks the actor's metrics, as with algorithm.critic_warmup."""
    folder = fake_run(tmp_path / "run", 2, passed=True, steps=400)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] = {name: value for name, value in rows[0].items() if not name.startswith("actor/")}
    for updates, accuracy in ((0, 0.25), (3, 0.5)):
        values = {"step": updates, "accuracy": accuracy, "accuracy/gsm8k": accuracy, "rows": 8}
        rows.append({"kind": "validation"} | {f"validation/{name}": value for name, value in values.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.process_time()
    markdown, _ = reports_of(folder)
    assert time.process_time() - began < 20, "CPU seconds; a pass over all events for each of them takes a minute"
    assert f"The first {400 - MOST_ROWS} rows are left out" in markdown and "| 399 | " in markdown
    assert "| updates | accuracy | accuracy/gsm8k | rows |" in markdown and "| 3 | 0.5 | 0.5 | 8 |" in markdown
    assert "| actor/loss |" in markdown


def test_an_issue_has_no_secret(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 8)
    facts = json.loads((folder / "environment.json").read_text())
    for each in facts:
        each["environment"]["SGLANG_API_KEY"] = "hunter2"
    (folder / "environment.json").write_text(json.dumps(facts))
    markdown, html = reports_of(folder)
    assert "hunter2" not in markdown + html and "SGLANG_API_KEY=[redacted " in markdown
    assert "torchrun --standalone --nproc-per-node=8 launch/ppo.py config.toml" in markdown


def test_a_run_that_began_no_phase_has_a_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    for name in ("metrics.jsonl", "events/rank0.jsonl"):
        (folder / name).unlink()
    assert reports_of(folder)[0].startswith("# DID NOT END: ")


def test_keys_of_another_version_are_named_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    file = folder / "config.toml"
    text = file.read_text().replace("[weights]", "[weights]\ntolerance_mean = 0.1") + "\n[later]\nkey = 1\n"
    assert "verify = true" in text
    file.write_text(text.replace("verify = true", 'verify = "bytes"'))  # a level of an older version
    markdown, _ = reports_of(folder)
    assert "does not know: `weights.tolerance_mean`, `later`." in markdown and "qwen3_moe" in markdown
    monkeypatch.setattr(evidence, "check_env", lambda subject: [])  # it takes seconds
    assert export.main([str(folder)]) == 0 and "weights.tolerance_mean, later" in capsys.readouterr().err


def test_a_folder_that_is_not_a_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.toml"):
        write_reports(tmp_path)
    with pytest.raises(ConfigError, match=r"nothere is not a folder here"):
        write_reports(tmp_path / "nothere")
    done = subprocess.run(
        [sys.executable, "launch/report.py", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")


FOREIGN = ("", "[1, 2]", "{", '{"first": 3, "code": 1, "said": []}', '{"message": "mine"}', "[" * 20_000)
OTHER_METRICS = (
    '{"kind": "validation", "validation/x": 1}',
    '{"kind": "step", "step": 9, "startup/a": "b"}',
)
OTHER_EVENTS = (
    '{"time": 1e9, "rank": 0, "host": "h", "event": "phase_start", "phase": 7, "step": "\\"; import os"}',
    '{"time": 1e999, "rank": 0, "host": "h", "event": "span"}',
    '{"time": 1e999, "rank": 0, "host": "h", "event": "log_prob_baseline", "log_prob_difference_mean": 1.0}',
    '{"time": 1e999, "rank": 0, "host": "h", "event": "say", "text": ""}',
    '{"time": 1.0, "rank": 0, "host": "h", "event": "span"}',
)


def test_torn_and_foreign_files_keep_nobody_from_the_rest_of_a_run(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    before, _ = reports_of(folder)
    for number, foreign in enumerate(FOREIGN):
        (folder / f"failure-mine{number}.json").write_text(foreign)
    both = (*FOREIGN, '{"step": "x", "phase": {"y": 1}}')
    for name, lines in (("metrics.jsonl", OTHER_METRICS), ("events/rank0.jsonl", OTHER_EVENTS)):
        with (folder / name).open("a") as file:
            file.write("\n".join([*both, *lines, ""]))
    assert reports_of(folder)[0] == before


def test_links_pipes_and_devices_in_a_run_directory_are_neither_read_nor_written_through(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 1, passed=True)
    before, _ = reports_of(folder)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.md", "report.html", "trace.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(precious)
        (folder / f".{name}.part").symlink_to(precious)
    (folder / "events" / "rank9.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder / "events" / "rank8.jsonl")
    os.mkfifo(folder / "failure-mine.json")
    assert reports_of(folder)[0] == before and precious.read_text() == "mine"
    assert not (folder / "report.md").is_symlink()


def test_a_value_that_is_missing_or_nan_is_no_zero() -> None:
    rows = [{"step": step, "reward_mean": 0.25, "actor/loss": 0.5} for step in range(4)]
    rows[1]["reward_mean"] = float("nan")
    del rows[2]["actor/loss"]
    figure = Figure()
    curves(figure, rows)
    for axes, title, missing in zip(figure.axes, ("Reward", "Loss of the actor"), (1, 2), strict=True):
        line, crosses = axes.lines
        assert axes.get_title() == title and axes.get_xlabel() == "step"
        assert [step for step, value in enumerate(line.get_ydata()) if value != value] == [missing]
        assert crosses.get_xdata() == [missing]


def test_without_matplotlib_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    assert "<svg" not in (html := reports_of(fake_run(tmp_path / "run", 1))[1]) and "pip install matplotlib" in html


def test_a_killed_rank_is_shown_where_it_stood_and_its_name_is_text(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    file = folder / "failure-host0.json"
    verdict = json.loads(file.read_text())
    verdict["first"] |= {"kind": "died", "ranks": [1], "error": "was killed by <SIGKILL>"}
    verdict["said"] += ["```", "## not a heading", "a | b"]
    file.write_text(json.dumps(verdict))
    events = folder / "events" / "rank1.jsonl"
    events.write_text(events.read_text().replace("build_trainer", "<script>$x^2$"))
    markdown, html = reports_of(folder)
    assert "in sync of step 2 (was killed by <SIGKILL>): first failure" in markdown
    assert "(was killed by &lt;SIGKILL&gt;): first failure</text>" in html
    assert "&lt;script&gt;$x^2$</text>" in html and "<script" not in html and "<SIGKILL>" not in html
    assert "fill: url(#h" in html, "the phase that did not end is hatched"
    assert "<h2>not a heading</h2>" not in html


def test_a_sample_of_each_step_is_shown_as_text_and_cut(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2, passed=True)
    evil = "<script>x</script>\n```\n## not a heading\x1b[31m\u202e " + "long " * 200 + "the end"
    for rank in (0, 1):
        sample = {"time": STARTED, "rank": rank, "host": "h", "event": "sample", "step": 2, "prompt": f"of rank {rank}"}
        with (folder / "events" / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(sample | {"response": evil, "reward": 0.25}) + "\n")
            file.write(json.dumps(sample | {"response": 7, "reward": "much"}) + "\n")
    markdown, html = reports_of(folder)
    [shown] = re.findall(r"## Samples\n\n`{4}\n(.*)\n`{4}\n", markdown, re.DOTALL)
    assert shown.startswith("step 2, reward 0.25\n  prompt   'of rank 0'\n  response '<script>x</script>\\n```\\n## ")
    assert len(shown.splitlines()) == 3 and r"\x1b[31m\u202e" in shown
    assert shown.endswith("'...") and "the end" not in shown
    assert "<script" not in html and "not a heading</h2>" not in html and "of rank 0" in html
