"""The HTML page shows every rank, marks what is lost, and escapes every name."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
import torch

from harness.runtime import GIB
from harness.tools.engine_class.engine_answer import EngineAnswer, filled_in_part
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.tools.full_size.export_answer import ExportAnswer
from harness.tools.full_size.model_and_options import Options, Question
from harness.tools.full_size.model_verdict import Answer
from harness.tools.full_size.name_lists import NameLists
from harness.tools.full_size.page import page_of
from harness.weights.findings import Finding
from harness.weights.tensor_view import TensorView
from harness.weights.traced.coverage import LoadCoverage
from tests.tools.full_size.forks import full_size
from tests.tools.full_size.test_full_size import with_layers
from tests.tools.full_size.test_gpu_stages import of

LAYERS = range(9)
EMBEDDING = "model.embed_tokens.weight"
HOSTILE = '"><img src=http://evil.example/x onerror=alert(1)><script>alert(2)</script>'
Missing = dict[str, int]


def experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts.w13_weight"


def engine_rank(
    rank: int, missing: Missing, *, layers: Sequence[int] = LAYERS, given: Sequence[int] = LAYERS,
    errors: dict[tuple[str, ...], str] | None = None, weights: int = 3 * GIB,
) -> EngineRank:  # fmt: skip
    """A rank that holds these layers, each with 64 experts of 32 elements, and lacks so many elements of a
    parameter."""
    held = {experts(layer): ("bfloat16", (64, 8, 4)) for layer in layers} | {EMBEDDING: ("bfloat16", (16, 4))}
    told = [EMBEDDING, *(experts(layer) for layer in layers if layer in given)]
    sizes = {name: 64 if name == EMBEDDING else 2048 for name in told}
    found = {} if errors else {name: (missing.get(name, 0), sizes[name]) for name in told}
    known = {
        "rank": rank, "nbytes": weights, "held": held, "built": "QwenForCausalLM",
        "coverage": LoadCoverage(rank=rank, missing=found, errors=errors or {}),
    }  # fmt: skip
    unread = {name: hint for name, hint in get_type_hints(EngineRank).items() if name not in known}
    return EngineRank(**known, **{name: (get_origin(hint) or hint)() for name, hint in unread.items()})


def question(tp: int = 4, pp: int = 1) -> Question:
    return Question(folder=Path("model"), tp=tp, pp=pp, dtype="bfloat16", arguments={"tp_size": tp})


def answer(ranks: Sequence[EngineRank] = (), findings: Sequence[Finding] = (), **fields: Any) -> Answer:
    view = TensorView(name="a.weight", of="a.weight", dtype=torch.bfloat16, shape=(4,), stride=(1,))
    engine = EngineAnswer(ranks=tuple(ranks), findings=tuple(findings)) if ranks else None
    given = {"name": "qwen", "options": Options(), "question": question(), "layout": (view,)} | fields
    return Answer(engine=engine, **given)


def page_with(missing: dict[int, Missing]) -> str:
    """Return the page of an engine whose ranks lack this, with the problems that its ranks are found to have."""
    ranks = [engine_rank(rank, missing.get(rank, {})) for rank in range(4)]
    problems, _ = filled_in_part(ranks)
    return page_of(answer(ranks, problems))


def fields_of(page: str, of: str) -> dict[str, str]:
    """Return title -> shade of the cells whose title contains `of`."""
    found = re.findall(r'<td class="([^"]*)" title="([^"]*)">', page)
    return {unescape(title): shade for shade, title in found if of in unescape(title)}


def shades(page: str, of: str) -> set[str]:
    return set(fields_of(page, of).values())


class Elements(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_rank_and_layer_is_on_the_page_and_nothing_is_marked() -> None:
    page = page_with({})
    for rank in range(4):
        assert f"rank {rank}: 10 parameters, {3 * GIB:,} bytes" in page
        assert all(fields_of(page, f"layer {layer}, rank {rank}: 100% filled") for layer in LAYERS)
        assert fields_of(page, f"outside layers, rank {rank}: 100% filled")
    assert shades(page, "filled") == {"whole"} and "problem" not in page.partition("</h1>")[0]
    assert '<body class="code0">' in page


def test_one_lost_expert_marks_its_layer_and_rank_alone() -> None:
    page = page_with({3: {experts(7): 32}})
    marked = [title for title, shade in fields_of(page, "filled,").items() if shade == "fault"]
    assert marked == [f"layer 7, rank 3: 98.44% filled, 32 of 2,048 elements are not; {experts(7)}"]
    assert page.count(">1 problem<") == 1
    assert '<body class="code1">' in page and f"first: {experts(7)}: on engine rank 3" in page


def test_more_than_the_padding_is_a_fault_of_its_rank_alone() -> None:
    padding = {experts(layer): 64 for layer in LAYERS}
    page = page_with({2: padding, 3: padding | {experts(7): 96}})
    assert shades(page, "layer 7, rank 3: 95.31% filled") == {"fault"}
    assert shades(page, "layer 7, rank 2: 96.88% filled") == {"padded"}


def test_a_refused_name_marks_its_layer_and_nothing_else_is_said_of_that_rank() -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    ranks = [engine_rank(0, {}), engine_rank(1, {}, errors={(name,): "RuntimeError: shape"})]
    page = page_of(answer(ranks, [Finding(kind="refused", tensor=name, counts={"error": "RuntimeError: shape"})]))
    assert shades(page, f"layer 2, rank 1: the loader refuses 1 names, such as {name}") == {"fault"}
    assert shades(page, "layer 3, rank 1: 2,048 elements; how many are filled cannot be told") == {"unknown"}
    assert shades(page, "layer 2, rank 0: 100% filled") == {"whole"}


def test_layers_that_a_rank_was_not_given_are_told_by_other_ranks() -> None:
    ranks = [engine_rank(0, {}), engine_rank(1, {}, given=[0]), engine_rank(2, {})]
    page = page_of(answer(ranks))
    assert shades(page, "layer 0, rank 1: 100% filled") == {"whole"}
    assert shades(page, "layer 8, rank 1: 2,048 elements; another rank of the stage was given its names") == {"told"}


def test_a_layer_that_a_rank_does_not_hold_is_empty() -> None:
    ranks = [engine_rank(rank, {}, layers=range(4) if rank < 2 else range(4, 9)) for rank in range(4)]
    page = page_of(answer(ranks, question=question(tp=2, pp=2)))
    assert fields_of(page, "layer 3, rank 1:") and not fields_of(page, "layer 3, rank 2:")


def test_hostile_names_are_text() -> None:
    rank = engine_rank(0, {}, errors={(f"model.layers.1.{HOSTILE}",): HOSTILE})
    rank.held[f"model.layers.1.{HOSTILE}"] = ("bfloat16", (2, 2))
    findings = [Finding(kind="unknown", tensor=f"model.layers.1.{HOSTILE}")]
    asked = replace(question(), arguments={HOSTILE: HOSTILE})
    hostile = answer([rank], findings, name=HOSTILE, question=asked)
    assert hostile.engine
    hostile = replace(hostile, engine=replace(hostile.engine, untold=(HOSTILE,), padding=tuple(findings)))
    for page in (page_of(hostile), page_of(answer(name=HOSTILE, cannot_build=HOSTILE))):
        found = Elements(page)
        assert not found.names & {"script", "img", "link", "iframe", "a"}
        assert not found.attributes & {"src", "href", "onerror", "style"}
        assert HOSTILE in found.text


def test_the_lists_of_an_export_and_their_cause_are_on_the_page() -> None:
    unread = [Finding(kind="unread", tensor=name, counts={"form": ""}) for name in (HOSTILE, "b")]
    lists, engine = NameLists(unexpected=tuple(unread)), EngineAnswer(ranks=(), findings=())
    exported = ExportAnswer(engine=engine, draft=None, lists=lists, causes=("the prefix module.",))
    page = page_of(answer([engine_rank(0, {})], exported=exported, options=Options(names="sent.json")))
    assert "Names of sent.json" in page and '<body class="code1">' in page
    assert "<p>sent and not expected: 2 name(s) of 2 kind(s)</p>" in page and "cause: the prefix module." in page
    assert HOSTILE in Elements(page).text and HOSTILE not in page


def test_an_engine_that_cannot_be_built_has_a_page_with_its_own_words() -> None:
    page = page_of(answer(cannot_build="engine rank 0: ValueError: 576 is not divisible by 128"))
    assert "<h1>the engine cannot be built: engine rank 0: ValueError: 576 is not divisible by 128</h1>" in page
    assert '<body class="code1">' in page and "1 names" in page and 'class="ranks"' not in page


def test_the_longest_lists_are_cut() -> None:
    problems = [Finding(kind="unknown", tensor=f"model.{chr(97 + number % 26)}{number}") for number in range(2000)]
    page = page_of(answer([engine_rank(0, {})], problems))
    listed = re.findall(r"<li>(model[^<]*)</li>", page)
    assert 12 < len(listed) < 2000 and f"{2000 - len(listed):,} more are in the JSON" in page


def test_a_gpu_that_holds_too_much_is_told_with_its_table() -> None:
    memory = of("--memory.resume", "all")
    page = page_of(answer([engine_rank(0, {})], memory=memory))
    assert f"Does not fit: {memory.problems[0]}" in unescape(page) and '<body class="code1">' in page
    assert all(f"<th>{stage}</th>" in page for stage in memory.stages)


@pytest.mark.slow
def test_a_whole_run_says_what_fits_and_has_its_page(tmp_path: Path) -> None:
    page_file, file = tmp_path / "page.html", tmp_path / "found.json"
    folder, words = with_layers("qwen3_30b_a3b", 6, tmp_path), ["--actor.microbatch_size", 1]
    done = full_size(folder, "--tp", 2, "--pp", 2, "--nnodes", 2, "--page", page_file, "--json", file, *words)
    assert done.returncode == 0, done.stderr
    verdict, page, table = done.stdout.splitlines()[-1], page_file.read_text(), json.loads(file.read_text())
    assert "it fits; generate is the fullest stage" in verdict
    assert list(table["run"]["stages"]) == ["sync", "generate", "log_probs", "update_actor"]
    assert table["run"]["fits"] and table["run"]["problems"] == []
    assert f"VERDICT: {table['verdict']}" == verdict and f"<h1>{table['verdict']}</h1>" in unescape(page)
    for each in table["ranks"]:
        assert f"rank {each['rank']}: {each['parameters']} parameters, {each['bytes']:,} bytes" in page
    assert shades(page, " filled, ") == {"whole"}
    assert all(f"<th>{stage}</th>" in page for stage in table["run"]["stages"])
    assert "data:" not in page and "http" not in page
