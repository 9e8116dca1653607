"""The HTML page shows every rank, marks what is lost, and escapes every name."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
import torch

from harness.cluster.mesh import ParallelDims
from harness.config.layers import Layer, build_config
from harness.runtime import GIB
from harness.tools.full_size.export_answer import ExportAnswer
from harness.tools.full_size.findings import Findings
from harness.tools.full_size.gpu_stages import EngineShare, GpuMemory, Shares, TrainerShare
from harness.tools.full_size.model_and_options import Options, Question
from harness.tools.full_size.model_verdict import Answer
from harness.tools.full_size.name_lists import Line, NameLists
from harness.tools.full_size.page import page_of
from harness.tools.full_size.ranks_at_true_size import EngineRank, filled_in_part
from harness.tools.full_size.sync_plan import RunShape, SyncPlan
from harness.tools.full_size.trainer_names import TrainerNames
from harness.tools.full_size.whole_run import WholeRun, missing_bytes, own_parts
from harness.weights.tensor_view import TensorView
from harness.weights.traced.coverage import LoadCoverage
from tests.tools.full_size.test_full_size import full_size, with_layers

LAYERS = range(9)
EMBEDDING = "model.embed_tokens.weight"
HOSTILE = '"><img src=http://evil.example/x onerror=alert(1)><script>alert(2)</script>'
Missing = dict[str, int]


def experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts.w13_weight"


def engine_rank(
    rank: int, missing: Missing, *, layers: Sequence[int] = LAYERS, given: Sequence[int] = LAYERS,
    errors: dict[str, str] | None = None, weights: int = 3 * GIB,
) -> EngineRank:  # fmt: skip
    """A rank that holds these layers, each with 64 experts of 32 elements, and lacks so many elements of a
    parameter."""
    held = {experts(layer): ("bfloat16", (64, 8, 4)) for layer in layers} | {EMBEDDING: ("bfloat16", (16, 4))}
    told = [EMBEDDING, *(experts(layer) for layer in layers if layer in given)]
    sizes = {name: 64 if name == EMBEDDING else 2048 for name in told}
    found = {} if errors else {name: (missing.get(name, 0), sizes[name]) for name in told}
    known = {
        "rank": rank, "parameters": len(held), "nbytes": weights, "held": held, "built": "QwenForCausalLM",
        "coverage": LoadCoverage(rank=rank, missing=found, errors=errors or {}),
    }  # fmt: skip
    unread = {name: hint for name, hint in get_type_hints(EngineRank).items() if name not in known}
    return EngineRank(**known, **{name: (get_origin(hint) or hint)() for name, hint in unread.items()})


def question(tp: int = 4, pp: int = 1) -> Question:
    return Question(folder=Path("model"), tp=tp, pp=pp, dtype="bfloat16", arguments={"tp_size": tp})


def answer(ranks: Sequence[EngineRank] = (), problems: Sequence[str] = (), **fields: Any) -> Answer:
    view = TensorView(name="a.weight", of="a.weight", dtype=torch.bfloat16, shape=(4,), stride=(1,))
    findings = Findings(problems=tuple(problems), padding=(), untold=(), kv_cache_scales=False) if ranks else None
    given = {"name": "qwen", "options": Options(), "question": question(), "layout": (view,)} | fields
    return Answer(ranks=tuple(ranks), findings=findings, **given)


def page_with(missing: dict[int, Missing]) -> str:
    """Return the page of an engine whose ranks lack this, with the problems that its ranks are found to have."""
    ranks = [engine_rank(rank, missing.get(rank, {})) for rank in range(4)]
    problems, _ = filled_in_part(ranks)
    return page_of(answer(ranks, problems))


def fields_of(page: str, of: str) -> dict[str, str]:
    """Return the fields of the maps whose title has such a part: title -> shade."""
    found = re.findall(r'<g><title>([^<]*)</title><rect class="([^"]*)"', page)
    return {unescape(title): shade for title, shade in found if of in title}


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
        assert fields_of(page, f"rank {rank}: 10 parameters, {3 * GIB:,} bytes")
        assert all(fields_of(page, f"layer {layer}, rank {rank}: 100% filled") for layer in LAYERS)
        assert fields_of(page, f"outside layers, rank {rank}: 100% filled")
    assert shades(page, "filled") == {"whole"} and '"mark"' not in page
    assert '<body class="code0">' in page


def test_one_lost_expert_marks_its_layer_and_rank_alone() -> None:
    page = page_with({3: {experts(7): 32}})
    marked = [title for title, shade in fields_of(page, "filled,").items() if shade == "fault"]
    assert marked == [f"layer 7, rank 3: 98.44% filled, 32 of 2,048 elements are not; {experts(7)}"]
    assert [title for title, shade in fields_of(page, "that nothing sent fills").items() if shade == "fault"] == [
        "rank 3: 32 elements that nothing sent fills, 0 names that the loader refuses"
    ]
    assert page.count('class="mark"') == 1 and ">1 problem<" in page
    assert '<body class="code1">' in page and f"first: {experts(7)}: on engine rank 3" in page


def test_padding_is_no_fault() -> None:
    page = page_with({3: {experts(layer): 64 for layer in LAYERS}})
    assert shades(page, ", rank 3: 96.88% filled") == {"padded"}
    assert shades(page, "rank 3: 0 elements that nothing sent fills") == {"whole"}


def test_more_than_the_padding_is_a_fault_of_its_rank_alone() -> None:
    padding = {experts(layer): 64 for layer in LAYERS}
    page = page_with({2: padding, 3: padding | {experts(7): 96}})
    assert shades(page, "layer 7, rank 3: 95.31% filled") == {"fault"}
    assert shades(page, "layer 7, rank 2: 96.88% filled") == {"padded"}


def test_a_refused_name_marks_its_layer_and_nothing_else_is_said_of_that_rank() -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    ranks = [engine_rank(0, {}), engine_rank(1, {}, errors={name: "RuntimeError: shape"})]
    page = page_of(answer(ranks, [f"{name}: the engine's loader refuses it"]))
    assert shades(page, f"layer 2, rank 1: the loader refuses 1 names, such as {name}") == {"fault"}
    assert shades(page, "layer 3, rank 1: 2,048 elements; how many are filled cannot be told") == {"unknown"}
    assert shades(page, "layer 2, rank 0: 100% filled") == {"whole"}


def test_layers_that_a_rank_was_not_given_are_told_by_other_ranks() -> None:
    ranks = [engine_rank(0, {}), engine_rank(1, {}, given=[0]), engine_rank(2, {})]
    page = page_of(answer(ranks))
    assert shades(page, "layer 0, rank 1: 100% filled") == {"whole"}
    assert shades(page, "layer 8, rank 1: 2,048 elements; another rank of the stage was given its names") == {"told"}


def test_a_stage_has_a_row_and_other_layers_are_empty() -> None:
    ranks = [engine_rank(rank, {}, layers=range(4) if rank < 2 else range(4, 9)) for rank in range(4)]
    page = page_of(answer(ranks, question=question(tp=2, pp=2)))
    assert ">stage 0<" in page and ">stage 1<" in page
    assert fields_of(page, "layer 3, rank 1:") and not fields_of(page, "layer 3, rank 2:")


def test_a_model_without_numbered_layers_has_one_row() -> None:
    ranks = [engine_rank(rank, {}, layers=()) for rank in range(2)]
    assert fields_of(page_of(answer(ranks)), "all parameters, rank 1: 100% filled")


def test_hostile_names_are_text() -> None:
    rank = engine_rank(0, {}, errors={f"model.layers.1.{HOSTILE}": HOSTILE})
    rank.held[f"model.layers.1.{HOSTILE}"] = ("bfloat16", (2, 2))
    findings = Findings(problems=(f"model.layers.1.{HOSTILE}: lost",), padding=(HOSTILE,), untold=(HOSTILE,), kv_cache_scales=False)  # fmt: skip
    hostile = replace(answer([rank], name=HOSTILE, question=replace(question(), arguments={HOSTILE: HOSTILE})), findings=findings)  # fmt: skip
    for page in (page_of(hostile), page_of(answer(name=HOSTILE, cannot_build=HOSTILE))):
        found = Elements(page)
        assert not found.names & {"script", "img", "link", "iframe", "a"}
        assert not found.attributes & {"src", "href", "onerror", "style"}
        assert HOSTILE in found.text


def test_the_lists_of_an_export_and_their_cause_are_on_the_page() -> None:
    lists = NameLists(unexpected=(Line(names=(HOSTILE, "b"), about="no rank's loader reads it"),))
    of_names = Findings(problems=(), padding=(), untold=(), kv_cache_scales=False)
    exported = ExportAnswer(ranks=(), findings=of_names, draft=None, lists=lists, causes=("the prefix module.",))
    page = page_of(answer([engine_rank(0, {})], exported=exported, options=Options(names="sent.json")))
    assert "Names of sent.json" in page and '<body class="code1">' in page
    assert "<p>sent and not expected: 2 name(s) of 1 kind(s)</p>" in page and "cause: the prefix module." in page
    assert HOSTILE in Elements(page).text and HOSTILE not in page


def test_an_engine_that_cannot_be_built_has_a_page_with_its_own_words() -> None:
    page = page_of(answer(cannot_build="engine rank 0: ValueError: 576 is not divisible by 128"))
    assert "<h1>the engine cannot be built: engine rank 0: ValueError: 576 is not divisible by 128</h1>" in page
    assert '<body class="code1">' in page and "1 names" in page and "<figure>" not in page


def test_many_problems_are_folded_and_the_longest_lists_are_cut() -> None:
    problems = [f"model.layers.1.mlp.experts.{number}.up_proj.weight: lost" for number in range(2000)]
    page = page_of(answer([engine_rank(0, {})], problems))
    listed = re.findall(r"<li>(model\.layers[^<]*)</li>", page)
    assert listed == problems[: len(listed)] and 12 < len(listed) < 2000
    assert "1,988 more" in page and f"{2000 - len(listed):,} more are in the JSON" in page
    assert "of which" not in Elements(page).text, "all are there, if they are unfolded"


def whole_run(ranks: Sequence[EngineRank], tp: int, pp: int, hosts: int, experts: int) -> WholeRun:
    """A run of 8 GPUs for each host, whose trainer has one tensor with a row for each expert."""
    dims = ParallelDims(dp=hosts * 8 // (tp * pp), tp=tp, pp=pp, rank_order="dp,pp,tp")
    keys = {"parallel": {"dp": dims.dp, "tp": tp, "pp": pp}, "engine": {"device": "cuda"}}
    lean = {"algorithm": {"advantage": "grpo", "kl_placement": "none"}}
    config = build_config([Layer("a default", lean), Layer("a test", keys)])
    chunk = -(-experts // dims.world_size) * GIB
    shares = Shares(
        engine=[EngineShare(stage, 0, 1, ranks[stage * tp].nbytes, 1000 * (stage + 1)) for stage in range(pp)],
        trainers={"actor": TrainerShare(parameters=chunk, log_probs={"activations": GIB}, update={"activations": 2 * GIB})},
        bucket_bytes=GIB,
    )  # fmt: skip
    memory = GpuMemory(config, 80 * GIB, shares)
    tensor = torch.nn.Parameter(torch.empty(experts, GIB // 4, device="meta"))
    missing = missing_bytes(TrainerNames(layout=(), tensors={"experts": tensor}), dims.world_size, torch.float32)
    between = tuple(tuple(0 if host == sender else 10**9 + sender for sender in range(hosts)) for host in range(hosts))
    plan = SyncPlan(
        transport="pull", same_gpu=1, nvlink=2, network_in=tuple(map(sum, between)), network_out=tuple(map(sum, between)),
        between_hosts=between, least_network=3, messages=4, staging=5,
    )  # fmt: skip
    return WholeRun(
        memory=memory, transport="pull", plans={"pull": plan}, peaks={}, shape=RunShape(dims=dims, nproc_per_node=8),
        pairs=[{rank: 10**6 * (number + 1) for rank in range(dims.world_size)} for number in range(tp * pp)],
        own=own_parts(memory, dims, ranks, missing),
    )  # fmt: skip


def run_page(whole: WholeRun, ranks: Sequence[EngineRank]) -> str:
    dims = whole.shape.dims
    return page_of(answer(ranks, whole=whole, question=question(dims.tp, dims.pp)))


def test_gpus_that_are_alike_are_said_once_and_each_stage_has_its_bar() -> None:
    ranks = [engine_rank(rank, {}) for rank in range(4)]
    whole = whole_run(ranks, tp=4, pp=1, hosts=2, experts=64)
    page = run_page(whole, ranks)
    assert "All 16 GPUs hold the same in every stage." in page and "GiB of each GPU" not in page
    assert all(f">{stage}</text>" in page for stage in whole.memory.stages)
    assert fields_of(page, "sync, engine: weights: 3.00 GiB") and 'class="limit"' in page
    [alike] = whole.table()["gpus"]
    assert alike == {"ranks": list(range(16)), "stages": whole.table()["stages"]}


def test_trainer_ranks_without_an_expert_have_smaller_moments_and_the_same_parameters() -> None:
    ranks = [engine_rank(rank, {}) for rank in range(4)]
    whole = whole_run(ranks, tp=4, pp=1, hosts=2, experts=8)
    full, empty = whole.table()["gpus"]
    assert full["ranks"] == list(range(8)) and empty["ranks"] == list(range(8, 16))
    assert full["stages"] == whole.table()["stages"]
    learning = [each["stages"]["update_actor"] for each in (full, empty)]
    assert [each["actor: AdamW states"] for each in learning] == [2 * GIB, 0]
    assert [each["actor: parameters"] for each in learning] == [GIB, GIB]
    assert ">host 0<" in (page := run_page(whole, ranks)) and ">host 1<" in page
    assert len(fields_of(page, "actor: AdamW states 0.00 GiB")) == 8 * len(whole.memory.stages)


def test_gpus_of_pipeline_stages_hold_their_own_stage() -> None:
    ranks = [engine_rank(rank, {}, weights=(4 if rank < 4 else 2) * GIB) for rank in range(8)]
    whole = whole_run(ranks, tp=4, pp=2, hosts=1, experts=8)
    first, last = (whole.gpu_stages(rank)["generate"] for rank in (0, 7))
    assert (first["engine: weights"], last["engine: weights"]) == (4 * GIB, 2 * GIB)
    assert last["engine: KV cache"] == 2 * first["engine: KV cache"] > 0
    fullest = max(sum(whole.gpu_stages(rank)["generate"].values()) for rank in range(8))
    assert fullest == sum(whole.memory.stages["generate"].values()), "the GPU of the table is one of these"


def test_a_gpu_that_holds_too_much_is_marked() -> None:
    ranks = [engine_rank(rank, {}, weights=(90 if rank == 2 else 3) * GIB) for rank in range(4)]
    whole = whole_run(ranks, tp=4, pp=1, hosts=1, experts=8)
    page = run_page(whole, ranks)
    assert "fault" in shades(page, "rank 2, engine rank 2: ") and "more than the 80.00 GiB of a GPU" in page
    assert "fault" not in shades(page, "rank 1, engine rank 1: ")


@pytest.mark.parametrize("hosts", [16, 512])
def test_a_run_of_any_size_is_a_page_that_can_be_read(hosts: int) -> None:
    ranks = [engine_rank(rank, {}) for rank in range(16)]
    whole = whole_run(ranks, tp=16, pp=1, hosts=hosts, experts=256)
    page = run_page(whole, ranks)
    assert len(page) < 3e6
    received = fields_of(page, "receiving host")
    assert len(received) == min(hosts, 64) ** 2
    read = fields_of(page, "engine rank 15, ")
    assert len(read) == (128 if hosts == 16 else 64)
    title = "trainer rank that holds it 0: 0.0160 GB" if hosts == 16 else "host whose trainers hold it 0-7: 1.02 GB"
    assert f"engine rank 15, {title}" in read, "16 MB of each of the 64 ranks of 8 hosts"


PADDING = """
import json, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from harness.trainer.model import allocate, shard
from harness.trainer.offload import local
rank, ranks, rows = map(int, sys.argv[1:])
dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, rows, bias=False))
shard(model, nn.ModuleList(model), init_device_mesh("cpu", (ranks,)), torch.float32)
allocate(model, torch.device("cpu"))
model(torch.ones(2, 64)).sum().backward()
optimizer = torch.optim.AdamW(model.parameters())
optimizer.step()
[weight] = model.parameters()
moments = [optimizer.state[weight][each] for each in ("exp_avg", "exp_avg_sq")]
print(json.dumps([local(each).untyped_storage().nbytes() for each in (weight, weight.grad, *moments)]))
"""


@pytest.mark.long
def test_fsdp2_pads_parameters_and_gradients_but_not_moments() -> None:
    """What own_parts takes for granted: of 4 rows on 8 ranks the last rank has none."""
    command = [sys.executable, "-c", PADDING, "7", "8", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    row = 64 * 4
    assert json.loads(done.stdout) == [row, row, 0, 0]


def test_a_page_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    done = full_size("deepseek_v3", "--page", tmp_path / "none" / "page.html")
    assert done.returncode == 2 and "--page" in done.stderr.splitlines()[-1], done.stderr


def test_a_page_shows_one_release(tmp_path: Path) -> None:
    done = full_size("deepseek_v3", "--against", "0.5.17", "--page", tmp_path / "page.html")
    assert done.returncode == 2 and "--page shows one answer" in done.stderr.splitlines()[-1], done.stderr


def pages(tmp_path: Path, *arguments: object) -> Iterator[Any]:
    """Yield the exit code, the verdict, the JSON and the page of one call."""
    page, table = tmp_path / "page.html", tmp_path / "found.json"
    done = full_size(*arguments, "--page", page, "--json", table)
    yield done.returncode
    yield done.stdout.splitlines()[-1].removeprefix("VERDICT: ")
    yield json.loads(table.read_text())
    yield page.read_text()


@pytest.mark.long
def test_a_real_run_has_its_page(tmp_path: Path) -> None:
    folder = with_layers("qwen3_30b_a3b", 6, tmp_path)
    code, verdict, table, page = pages(tmp_path, folder, "--tp", 2, "--pp", 2, "--nnodes", 2)
    assert code == 0 and table["verdict"] == verdict
    assert f"<h1>{verdict}</h1>" in unescape(page)
    for each in table["ranks"]:
        assert fields_of(page, f"rank {each['rank']}: {each['parameters']} parameters, {each['bytes']:,} bytes")
    assert shades(page, " filled, ") == {"whole"}
    gpus = table["run"]["gpus"]
    assert sorted(rank for each in gpus for rank in each["ranks"]) == list(range(16)) and len(gpus) > 1
    assert fields_of(page, "receiving host 1, sending host 0: ") and "data:" not in page and "http" not in page
