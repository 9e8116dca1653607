"""What the page of a bisect shows beside its text: the candidates in order, links, and commits between two sides."""

import re
from pathlib import Path

from harness.tools.bisection.answer import candidate_rows
from harness.tools.bisection.bisect_report import UPSTREAM, bisect_page
from harness.tools.bisection.question import Options
from harness.tools.bisection.state import Attempt, Record, State
from tests.tools.bisection.test_confidence import state_of


def judged(folder: Path) -> State:
    """1.0 is good with 3, 1.9 is bad with 8, 1.1 was skipped; 1.2 cannot run."""
    state = state_of(Options(package="sglang", metric="x", above=4.0), 20)
    for name, verdict, value in (("1.9", "bad", 8.0), ("1.0", "good", 3.0), ("1.1", "skip", None)):
        log = f"runs/{name}/1/log.txt"
        (folder / log).parent.mkdir(parents=True)
        (folder / log).write_text("x\n")
        attempt = Attempt(code=0, timed_out=False, seconds=1.0, verdict=verdict, log=log, value=value)  # type: ignore[arg-type]
        state.records.append(Record(name=name, verdict=verdict, reason=f"<{name}>", attempts=[attempt]))  # type: ignore[arg-type]
    state.closed["1.2"] = "no wheel for this Python"
    return state


def test_the_candidates_are_in_order_with_their_verdicts(tmp_path: Path) -> None:
    rows = [(label, verdict, why) for label, verdict, _, why in candidate_rows(judged(tmp_path))]
    ran = [("1.0", "good", "<1.0>"), ("1.1", "skip", "<1.1>"), ("1.2", "skip", "no wheel for this Python")]
    assert rows == [*ran, ("  6 more", "", ""), ("1.9", "bad", "<1.9>"), ("  10 more", "", "")]


def test_the_page_links_logs_and_upstream_and_fits_a_phone(tmp_path: Path) -> None:
    address = f"https://github.com/{UPSTREAM['sglang']}/compare/v1.0...v1.1"
    text = (
        f"# Bisect\n\n- {address}\n\n| log |\n|---|\n| runs/1.9/1/log.txt |\n\nIn {tmp_path}/runs/1.0/1/log.txt <b>\n"
    )
    made = bisect_page(text, judged(tmp_path))
    assert f'<a href="{address}">' in made and "&lt;b&gt;" in made
    links = re.findall(r'href="(runs/[^"]*)"', made)
    assert links == [f"runs/{name}/1/log.txt" for name in ("1.9", "1.0")]
    assert 'name="viewport"' in made and "prefers-color-scheme: dark" in made and "pre-wrap" in made
    assert 'title="&lt;1.9&gt;"' in made


def test_only_logs_of_runs_and_addresses_are_links(tmp_path: Path) -> None:
    text = (
        f'# Bisect\n\n../runs/../1/x {tmp_path}/secret.txt runs/a/b/c.txt javascript:alert(1)/x https://a"onclick=b\n'
    )
    made = bisect_page(text, judged(tmp_path))
    assert re.findall(r"href=.*?>", made) == ['href="https://a&quot;onclick=b">']
