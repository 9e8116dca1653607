"""The catalogue of known failures: read strictly, complete, and each entry's example its own."""

from pathlib import Path

import msgspec
import pytest

from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.entries import (
    FOLDER,
    OF_SGLANG,
    CatalogueEntry,
    CatalogueError,
    Pattern,
    catalogue,
    read_entry,
    surroundings,
)

REPOSITORY = Path(__file__).resolve().parents[3]
ENTRIES = list(catalogue().values())
EXAMPLES = [(entry, index) for entry in ENTRIES for index in range(len(entry.examples))]
SOURCES = ("measured: ", "reported: ", "source: ", "harness: ", "signature: ")

GOOD = """
slug = "good"
title = "A title"
context = ["engine"]
cause = "A cause."
fix = "A fix."
signatures = [{ role = "cause", pattern = "some words" }]
affected = [{ package = "sglang" }]
examples = [{ source = "harness: x", log = "some words" }]
"""


def written(folder: Path, text: str, name: str = "good") -> Path:
    file = folder / f"{name}.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.slug)
def test_an_entry_is_sound(entry: CatalogueEntry) -> None:
    file = FOLDER / f"{entry.slug}.toml"
    strict = msgspec.toml.decode(file.read_bytes(), type=CatalogueEntry, dec_hook=lambda kind, value: kind(value))
    assert strict == entry, "each value is of the type, and one of the literals, that the class says"
    assert all([entry.affected, entry.examples, entry.title, entry.cause, entry.fix])
    assert set(entry.context) <= {*surroundings().contexts, OF_SGLANG}
    assert {"cause", "likely"} & {signature.role for signature in entry.signatures}, "it would never be named"
    assert all(
        each.regex and each.word
        for signature in entry.signatures
        for each in (signature.pattern, signature.near)
        if each
    )
    assert all(each.regex and each.word for each in entry.conditions or ())
    assert all(link.startswith("https://") for link in entry.links)
    assert len(set(entry.signatures)) == len(entry.signatures)
    assert len(set(entry.links)) == len(entry.links)
    assert all(example["source"].startswith(SOURCES) for example in entry.examples)
    own = [
        source[9:].partition(",")[0] for example in entry.examples if (source := example["source"])[:9] == "harness: "
    ]
    assert all((REPOSITORY / each).is_file() for each in own), own
    assert all(seen.versions and seen.date and seen.device and seen.result for seen in entry.seen)
    # A measurement is of a release, never of "some".
    assert all(version[0].isdigit() for seen in entry.seen for version in seen.versions.values())


@pytest.mark.parametrize(("entry", "index"), EXAMPLES, ids=[f"{entry.slug}-{index}" for entry, index in EXAMPLES])
def test_an_example_is_diagnosed_as_its_entry_and_as_no_other_cause(
    entry: CatalogueEntry, index: int, tmp_path: Path
) -> None:
    log = tmp_path / "example.log"
    log.write_text(entry.examples[index]["log"])
    found = diagnose([str(log)])
    assert found.finding and found.finding.entry.slug == entry.slug
    assert [other.entry.slug for other in found.others if not other.entry.consequence] == []


def test_an_entry_of_every_program_claims_no_more_than_its_sentence() -> None:
    general = [entry for entry in ENTRIES if not entry.context]
    assert general
    for entry in general:
        assert {signature.role for signature in entry.signatures} == {"likely"} and not entry.conditions, entry.slug
        assert "SGLang" not in entry.title + entry.cause, entry.slug


def test_no_cause_signature_matches_an_example_of_another_entry() -> None:
    wrong = [
        f"{entry.slug}: {signature.pattern} matches an example of {other.slug}"
        for entry in ENTRIES
        for signature in entry.signatures
        if signature.role == "cause" and signature.near is None
        for other in ENTRIES
        # Of one sentence a consequence names the general case, and its cause the special one.
        if other is not entry and not entry.consequence and not other.consequence
        for example in other.examples
        if any(signature.pattern.regex.search(line) for line in example["log"].splitlines())
    ]
    assert wrong == []


def test_a_good_file_is_read(tmp_path: Path) -> None:
    entry = read_entry(written(tmp_path, GOOD))
    assert (entry.slug, entry.signatures[0].pattern, entry.consequence) == ("good", "some words", False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "A title"', 'titel = "A title"', "titel"),
        ('title = "A title"', "", "title"),
        ('context = ["engine"]', "", "context"),
        ('role = "cause"', 'rol = "cause"', "rol"),
        ('fix = "A fix."', "fix = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(CatalogueError, match="good.toml") as caught:
        read_entry(written(tmp_path, GOOD.replace(old, new, 1)))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["[0-9]+", "some|words", "an?"])
def test_a_pattern_must_have_a_word(pattern: str) -> None:
    with pytest.raises(CatalogueError, match="must have a word of 3 letters"):
        assert Pattern(pattern).word


def test_the_surroundings_are_read() -> None:
    assert set(surroundings().contexts) == {"engine", "trainer", "rollout", "harness", "memory_saver", "distributed"}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"Connection closed by peer \[", {"connection", "closed", "by", "peer"}),
        (r"KeyError: '(?:kv_cache|weights)'", {"keyerror"}),
        (r"\bin update_weights\b", {"in", "update_weights"}),
        (r"timed out after \d+ ?ms while", {"timed", "out", "after", "while"}),
        (r"Duplicate GPU detected ?: rank \d+", {"duplicate", "gpu", "rank"}),
        (r"\w+Error: The memory", {"the", "memory"}),
        (r"a.*bcd[ef]gh", {"a"}),
        (r"versions? of", {"of"}),
        (r"\W{1,4}abc x{0,2} de{1,2}", {"abc"}),
    ],
)
def test_words_that_every_match_has(pattern: str, words: set[str]) -> None:
    found = {word.decode() for word in Pattern(pattern).words}
    assert found == words
