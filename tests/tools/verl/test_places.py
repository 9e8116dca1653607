"""The places in verl's repository that show why a key changes nothing here."""

import os
import re
import subprocess
from functools import cache

import pytest

from harness.tools.verl.draft import counterparts
from harness.tools.verl.overrides import RELEASES

PLACE = re.compile(r"(?P<tag>v(?P<release>0\.\d+)\.\d+(\.post\d)?) (?P<file>[\w/]+\.py): (?P<symbol>\w+)")
PLACES = {key: place for row in counterparts()["row"] if "harmless" in row for key, place in row["keys"].items()}


@cache
def text_of(tag: str, file: str) -> str:
    """Return a file of verl at a tag; skip the test if there is no copy of verl's repository."""
    repository = os.environ.get("VERL_REPOSITORY", "")
    if not repository:
        pytest.skip("VERL_REPOSITORY names no copy of github.com/verl-project/verl")
    command = ["git", "-C", repository, "show", f"{tag}:verl/{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("place", sorted(set(PLACES.values())))
def test_each_harmless_key_names_a_place_that_exists(place: str) -> None:
    match = PLACE.fullmatch(place)
    assert match and match["release"] in RELEASES
    assert re.search(
        rf"^\s*(async )?(def|class) {match['symbol']}\b", text_of(match["tag"], match["file"]), re.MULTILINE
    )
