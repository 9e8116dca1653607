"""Models x precisions x meshes x options on GPUs: three PPO steps each, every element read back after every sync.

`pytest -m gpu -s` prints what stands in a table of docs/measurements/gpu_runs.md for each. The runs share the GPUs, AT_ONCE
of them at a time, and so without the memory saver; test_gpu_memory.py has it.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from harness.tools.repro.predictable_drafts import ENGINE_ARGUMENTS
from tests.end_to_end.launching import SHARING_GPUS, Job, run
from tests.end_to_end.newer_models import FIELDS, save_newer_model
from tests.weights.fp8_on_two_ranks import OVERRIDES_ON_GPU

pytestmark = pytest.mark.gpu

CONFIG = "configs/gpu/tiny.toml"
AT_ONCE = 10
SECONDS = 560
OPTIONS: dict[str, list[str]] = {
    **{name: ["--weights.transport", name] for name in ("bucket", "tensor", "disk", "pull")},
    "dp attention": ["--engine.args.enable_dp_attention", "true", "--engine.args.dp_size", "2"],
    "ep": ["--engine.args.ep_size", "2"],
    "graphs": ["--engine.args.disable_cuda_graph", "false"],
    "SGLang's preset": ["--engine.preset", "sglang"],
    "first weights loaded": ["--engine.initial_weights", "checkpoint"],
    **{name: ["--engine.args.attention_backend", name] for name in ("flashinfer", "fa3")},
    "float32 masters": ["--model.master_dtype", "float32"],
    "routing replayed": ["--rollout.routing", "replay", "--algorithm.advantage", "grpo"],
    "offloaded": ["--memory.offload_parameters", "actor", "--memory.offload_optimizer", "actor"],
    "MTP": [
        *["--model.overrides.num_nextn_predict_layers", "1"],
        *[word for name, value in ENGINE_ARGUMENTS.items() for word in (f"--engine.args.{name}", str(value))],
    ],
    "online FP8": ["--engine.args.quantization", "fp8"],
    "INT4": ["--engine.args.torchao_config", "int4wo-128"],
    "data-parallel replicas": ["--engine.args.dp_size", "2"],
}
SHARED = [
    *SHARING_GPUS,
    # Graphs are captured for so many requests at most, which takes a minute with SGLang's own number.
    *["--engine.args.max_running_requests", "32", "--run.steps", "3"],
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the table."""

    model: str
    precision: str = "bfloat16"
    mesh: tuple[int, int, int] = (1, 2, 1)
    """dp, tp, pp."""
    options: tuple[str, ...] = ("bucket",)
    refused: str = ""
    """If the run must be refused: some words of the sentence that refuses it. Otherwise it must pass."""
    known: str = ""
    """Some words of a failure of SGLang's with which it may end instead, in the releases that have it."""

    def __str__(self) -> str:
        dp, tp, pp = self.mesh
        return f"{self.model} {self.precision} dp {dp} tp {tp} pp {pp} {' + '.join(self.options)}"

    @property
    def ranks(self) -> int:
        dp, tp, pp = self.mesh
        return dp * tp * pp

    def words(self, model: str) -> list[str]:
        """The command line of its run. model: its name, or the folder of its checkpoint."""
        mesh = [f"--parallel.{name}={size}" for name, size in zip(("dp", "tp", "pp"), self.mesh, strict=True)]
        precision = ["--model.dtype", "bfloat16" if self.precision == "fp8_block" else self.precision]
        if self.precision == "fp8_block":
            precision += ["--model.rollout_precision", "fp8_block"]
            sizes = dict(OVERRIDES_ON_GPU.get(self.model, OVERRIDES_ON_GPU["qwen2"]))
            if "MTP" in self.options:
                sizes["hidden_size"] = 512  # fused_eh_norm takes no 256
            precision += [f"--model.overrides.{name}={value}" for name, value in sizes.items()]
        options = [word for name in self.options for word in OPTIONS[name]]
        return ["--model.name", model, *mesh, *precision, *options]


TP, DP, PP, ONE = (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 1)
DENSE = [
    Cell(model="qwen2", mesh=ONE),
    Cell(model="qwen2", options=("bucket", "SGLang's preset")),
    Cell(model="qwen2", options=("pull", "graphs")),
    Cell(model="qwen2", options=("tensor", "flashinfer")),
    Cell(model="qwen2", options=("pull", "fa3")),
    Cell(model="qwen2", mesh=DP, options=("disk", "float32 masters")),
    Cell(model="qwen2", mesh=PP),
    Cell(model="qwen2", precision="float16"),
    Cell(model="qwen2", precision="float16", mesh=DP, options=("pull",)),
    Cell(model="qwen2", precision="fp8_block", options=("pull",)),
    Cell(model="qwen2", precision="fp8_block", mesh=DP, options=("disk",)),
    Cell(model="qwen2", precision="fp8_block", options=("pull", "offloaded")),
    Cell(model="qwen2", precision="fp8_block", options=("bucket", "graphs", "first weights loaded")),
    Cell(model="qwen2", options=("online FP8",), refused="fp8_block"),
    Cell(model="qwen2", options=("INT4",), refused="fp8_block"),
    Cell(model="qwen2", options=("data-parallel replicas",), refused="enable_dp_attention"),
    Cell(model="qwen2", precision="fp8_block", options=("bucket", "graphs"), refused="engine.initial_weights"),
    Cell(model="llama", precision="fp8_block", refused="sglang#30234"),
]
MIXTURES = [
    Cell(model="qwen3_moe"),
    Cell(model="qwen3_moe", options=("bucket", "SGLang's preset")),
    Cell(model="qwen3_moe", options=("pull", "ep")),
    Cell(model="qwen3_moe", options=("pull", "dp attention", "ep")),
    Cell(model="qwen3_moe", options=("bucket", "dp attention", "ep", "graphs")),
    Cell(model="qwen3_moe", options=("bucket", "routing replayed")),
    Cell(model="qwen3_moe", precision="float16", options=("pull",)),
    Cell(model="qwen3_moe", precision="fp8_block", options=("bucket", "ep")),
    Cell(model="qwen3_moe", precision="fp8_block", mesh=DP, options=("pull",)),
    Cell(model="qwen3_moe", precision="fp8_block", options=("pull", "dp attention", "ep")),
]
DEEPSEEK = [
    Cell(model="deepseek_v3"),
    Cell(model="deepseek_v3", options=("bucket", "SGLang's preset")),
    Cell(model="deepseek_v3", options=("pull", "dp attention")),
    Cell(model="deepseek_v3", options=("pull", "ep")),
    Cell(model="deepseek_v3", options=("bucket", "dp attention", "ep")),
    Cell(model="deepseek_v3", options=("pull", "dp attention", "ep", "graphs")),
    Cell(model="deepseek_v3", mesh=PP, options=("tensor",)),
    Cell(model="deepseek_v3", options=("bucket", "fa3")),
    Cell(model="deepseek_v3", options=("bucket", "routing replayed")),
    *[Cell(model="deepseek_v3", options=(name, "MTP")) for name in ("bucket", "tensor", "disk", "pull")],
    Cell(model="deepseek_v3", options=("pull", "ep", "MTP", "graphs")),
    Cell(model="deepseek_v3", options=("bucket", "dp attention", "ep", "MTP")),
    Cell(model="deepseek_v3", precision="fp8_block", options=("bucket", "MTP")),
    Cell(
        model="deepseek_v3",
        precision="fp8_block",
        options=("pull", "dp attention", "ep", "MTP"),
        known="object has no attribute 'kv_indptr'",
    ),
    Cell(model="deepseek_v3", mesh=PP, options=("bucket", "MTP"), refused="last pipeline stage"),
    Cell(model="deepseek_v3", precision="float16", options=("tensor",)),
    Cell(model="deepseek_v3", precision="fp8_block"),
    Cell(model="deepseek_v3", precision="fp8_block", mesh=DP, options=("disk",)),
    Cell(model="deepseek_v3", precision="fp8_block", options=("pull", "dp attention", "ep")),
    Cell(
        model="deepseek_v3",
        precision="fp8_block",
        options=("pull", "dp attention", "ep", "graphs", "first weights loaded"),
    ),
]
KNOWN = {"glm4_moe": "stale-copy-of-weights"}  # until 0.5.18
NEWER = [
    *[Cell(model=name, options=("pull",), known=KNOWN.get(name, "")) for name in FIELDS],
    Cell(model="glm4_moe", options=("bucket", "dp attention", "ep", "graphs"), known=KNOWN["glm4_moe"]),
    Cell(model="qwen3_next", options=("bucket", "graphs")),
    Cell(model="deepseek_v32", options=("bucket", "SGLang's preset")),
    Cell(model="gpt_oss", options=("bucket", "SGLang's preset")),
    Cell(model="qwen3_next", options=("bucket", "SGLang's preset")),
]
CELLS = [*DENSE, *MIXTURES, *DEEPSEEK, *NEWER]


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Cell, Future[Job]]]:
    """The runs of the cells that were asked for, AT_ONCE at a time."""
    asked = [
        item.callspec.params["cell"] for item in request.session.items if "cell" in getattr(item, "fixturenames", ())
    ]
    folder = tmp_path_factory.mktemp("table")
    newer = {cell.model for cell in asked} & FIELDS.keys()
    models = {name: str(save_newer_model(name, folder / name)) for name in newer}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            cell: pool.submit(
                run,
                *(folder / str(at), cell.ranks, CONFIG, *SHARED, *cell.words(models.get(cell.model, cell.model))),
                seconds=SECONDS,
            )
            for at, cell in enumerate(asked)
            if cell.ranks <= torch.cuda.device_count()
        }


def result(job: Job) -> str:
    """The verdict of a run in one line: what it passed, why it was refused, or its first failure."""
    said = job.output().splitlines()
    for word in ("PASSED: ", "FIRST FAILURE: ", "FAILED: ", "error: "):
        if found := [line for line in said if word in line]:
            return found[-1][found[-1].index(word) :]
    return f"exit code {job.process.returncode}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell(cell: Cell, jobs: dict[Cell, Future[Job]]) -> None:
    if cell not in jobs:
        pytest.skip(f"needs {cell.ranks} GPUs")
    job = jobs[cell].result()
    verdict = result(job)
    dp, tp, pp = cell.mesh
    print(f"\n| {cell.model} | {cell.precision} | {dp}, {tp}, {pp} | {', '.join(cell.options)} | {verdict} |")
    if cell.refused:
        assert job.process.returncode != 0 and verdict.startswith("error: ") and cell.refused in verdict
        return
    if cell.known and cell.known in verdict:
        assert job.process.returncode != 0
        return
    assert job.process.returncode == 0, job.output()[-6000:]
    assert "by fingerprint" in verdict
    assert len([step for step in job.metrics() if step["kind"] == "step"]) == 3
    assert job.left_behind() == []
