import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from harness.rollout.engine_settings import CPU_MODE
from harness.runtime.cpu_standins import STANDINS
from harness.tools.environments import start_in_cpu_mode

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = str(Path(torch.__file__).parents[1])


class TopK(NamedTuple):
    """As SGLang's StandardTopKOutput."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


IMPORTS = """
import importlib.metadata, importlib.util, multiprocessing, os, sys

def report(where):
    import torchvision
    from torchvision import transforms
    from torchvision.ops import nms
    assert "standins" not in torchvision.__file__, torchvision.__file__
    assert importlib.util.find_spec("torchvision").origin == torchvision.__file__
    assert transforms.Resize(4).size == 4
    assert torchvision.__version__.split("+")[0] == importlib.metadata.version("torchvision").split("+")[0]
    print(where, "torchvision", flush=True)

def child():
    import sgl_kernel
    assert "standins" in sgl_kernel.__file__
    report("child")

if __name__ == "__main__":
    report("parent")
    from transformers.image_utils import load_image
    from transformers import AutoImageProcessor, LlamaConfig, Qwen2ForCausalLM
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0, method
"""


def python(*arguments: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=timeout,
        env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
    )


def as_from_a_shell(**more: str) -> dict[str, str]:
    """The environment without what the environment's Python, and conftest.py, have set."""
    return {name: value for name, value in os.environ.items() if name not in (*CPU_MODE, "PYTHONPATH")} | more


def environment(folder: Path) -> Path:
    """The Python of an environment with the packages of this one, as harness/tools/environments.py leaves it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = (folder / "venv").glob("lib/python3*/site-packages")
    (packages / "packages.pth").write_text(PACKAGES)
    start_in_cpu_mode(folder / "venv")
    return folder / "venv" / "bin" / "python"


@pytest.mark.long
def test_the_real_packages_import_in_parent_and_children(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    run = subprocess.run(
        [environment(tmp_path), script], capture_output=True, text=True, env=as_from_a_shell(), timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("parent torchvision") == 1
    assert run.stdout.count("child torchvision") == 2


def test_what_has_no_stand_in_can_be_imported_but_not_called() -> None:
    code = """
import sgl_kernel
import sgl_kernel.kvcacheio as of_older_releases
transfers = [name for name in vars(of_older_releases) if name.startswith("transfer_kv_")]
assert sgl_kernel.NAMES and transfers
for module, names in ((sgl_kernel, sgl_kernel.NAMES), (of_older_releases, transfers)):
    for name in names:
        try:
            getattr(module, name)(1, key=2)
        except NotImplementedError as error:
            assert f"{module.__name__}.{name}:" in str(error), error
        else:
            raise AssertionError(name)
try:
    from sgl_kernel import rmsnorm
except ImportError:
    print("refused")
"""
    run = python("-c", code, PYTHONPATH=str(STANDINS))
    assert run.stdout == "refused\n", run.stderr


def speculative() -> Any:
    """The stand-ins for sgl_kernel's functions of speculative decoding."""
    file = STANDINS / "sgl_kernel" / "speculative.py"
    spec = importlib.util.spec_from_file_location("speculative_standins", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain(requests: int, width: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Return mask, positions and the tree of a chain of drafts, as the stand-in describes it."""
    mask = torch.ones(requests * width * width, dtype=torch.bool)
    positions = torch.empty(requests * width, dtype=torch.long)
    tree = [torch.full((requests, width), -1) for _ in range(3)]
    nothing = torch.empty(0)
    speculative().build_tree_kernel_efficient_cpu(
        nothing, nothing, torch.tensor(lengths), mask, positions, *tree, 1, width - 1, width, 0
    )
    return mask, positions, *tree


def test_a_chain_of_drafts_has_positions_children_and_a_causal_mask() -> None:
    mask, positions, index, children, siblings = chain(2, 3, [7, 4])
    assert positions.tolist() == [7, 8, 9, 4, 5, 6] and index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert children.tolist() == [[1, 2, -1]] * 2 and siblings.eq(-1).all()
    assert torch.equal(mask.view(2, 3, 3), torch.ones(2, 3, 3, dtype=torch.bool).tril())
    with pytest.raises(NotImplementedError, match="topk = 1"):
        nothing = torch.empty(0)
        speculative().build_tree_kernel_efficient_cpu(*[nothing] * 8, 4, 1, 2, 0)


def test_greedy_drafts_are_accepted_for_as_long_as_they_are_the_targets_own() -> None:
    _, _, index, children, siblings = chain(2, 3, [7, 4])
    predicts = torch.zeros(6, dtype=torch.int32)
    accepted, counts = torch.full((2, 3), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    drafts, choices = torch.tensor([[9, 5, 6], [9, 5, 6]]), torch.tensor([[5, 6, 7], [5, 8, 7]])
    speculative().verify_tree_greedy_cpu(predicts, accepted, counts, drafts, index, children, siblings, choices)
    assert counts.tolist() == [2, 1] and accepted.tolist() == [[0, 1, 2], [3, 4, -1]]
    assert predicts[accepted[0].long()].tolist() == [5, 6, 7] and predicts[:5].tolist()[3:] == [5, 8]
    bonus = torch.zeros(2, dtype=torch.int32)
    speculative().fill_bonus_tokens_cpu(predicts[accepted.long()], counts + 1, bonus, 3)
    assert bonus.tolist() == [7, 8]


def test_sampled_drafts_leave_the_targets_distribution_as_it_is() -> None:
    requests, vocabulary = 4000, 4
    wanted = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7]])
    _, _, index, children, siblings = chain(requests, 2, [7] * requests)
    predicts = torch.zeros(2 * requests, dtype=torch.int32)
    accepted, counts = torch.full((requests, 2), -1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    drafts = torch.tensor([[0, 1]]).expand(requests, 2)  # the draft always says 1, which the target takes in 30 %
    speculative().tree_speculative_sampling_target_only(
        predicts, accepted, counts, drafts, index, children, siblings,
        torch.rand(requests, 2, generator=draw), torch.rand(requests, generator=draw),
        wanted.expand(requests, 2, vocabulary), torch.zeros(requests, 2, vocabulary), 1.0, 1.0,
    )  # fmt: skip
    first = predicts.view(requests, 2)[:, 0]
    shares = torch.bincount(first, minlength=vocabulary) / requests
    assert torch.allclose(shares, wanted[0], atol=0.03)
    assert abs(float(counts.float().mean()) - 0.3) < 0.03 and torch.equal(counts == 1, first == 1)
    second = predicts.view(requests, 2)[:, 1][counts == 1]
    assert torch.allclose(torch.bincount(second, minlength=vocabulary) / len(second), wanted[1], atol=0.05)


def test_top_k_and_top_p_keep_the_likeliest_tokens() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.4, 0.1]])
    kept = torch.tensor([[0, 4 / 7, 0, 3 / 7], [0.25, 0.25, 0.4, 0.1]])
    assert torch.allclose(speculative().top_k_renorm_prob(probs, torch.tensor([2, 1 << 30])), kept)
    assert torch.allclose(speculative().top_p_renorm_prob(probs, torch.tensor([0.65, 1.0])), kept)


def test_slots_of_the_kv_cache_are_read_and_noted_request_by_request() -> None:
    kernels, table = speculative(), torch.arange(20, dtype=torch.int32).view(2, 10)
    rows, starts, ends = torch.tensor([1, 0]), torch.tensor([2, 5]), torch.tensor([4, 6])
    slots = torch.zeros(3, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, 10)
    assert slots.tolist() == [12, 13, 5]
    kernels.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([70, 71, 72]), 10)
    assert table[1, 2:4].tolist() == [70, 71] and table[0, 5] == 72
    two = torch.zeros(2, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, starts, two, 10, 1, 1)
    assert two.tolist() == [70, 72]


def test_the_torchvision_stand_in_needs_the_installed_package_and_not_that_of_another_checkout(tmp_path: Path) -> None:
    code = f"""
import torch, sys
sys.path[:] = [{str(STANDINS)!r}, *(p for p in sys.path if "site-packages" not in p)]
try:
    import torchvision
except ModuleNotFoundError as error:
    print(error.name)
"""
    run = python("-c", code)
    assert run.stdout == "torchvision\n", run.stderr
    other = shutil.copytree(STANDINS, tmp_path / "standins")
    run = python("-c", "import torchvision; print(torchvision.__file__)", PYTHONPATH=f"{other}{os.pathsep}{STANDINS}")
    assert run.stdout == f"{PACKAGES}/torchvision/__init__.py\n", run.stderr


def test_scripts_bring_the_cpu_mode_to_an_environment_that_was_made_otherwise() -> None:
    code = "import _checkout; _checkout.use(); import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"
    base = getattr(sys, "_base_executable", sys.executable)  # a .pth file is not read on PYTHONPATH
    for visible in ("", "0") if list(Path("/dev").glob("nvidia[0-9]*")) else ("",):
        env = as_from_a_shell(PYTHONPATH=f"{REPOSITORY}/launch{os.pathsep}{PACKAGES}", CUDA_VISIBLE_DEVICES=visible)
        done = subprocess.run([base, "-c", code], capture_output=True, text=True, env=env, check=True)
        found, path = json.loads(done.stdout)
        assert (CPU_MODE.items() <= found.items()) is (visible == ""), "never on CUDA"
        assert (path[0] == str(STANDINS) == found["PYTHONPATH"].split(os.pathsep)[0]) is (visible == "")


def test_experts_of_other_ranks_add_nothing_and_those_here_count_in_full() -> None:
    """Expert parallelism: each rank computes with its own experts, marks the others with -1, and outputs are added
    up."""
    from harness.runtime.standins.harness_sglang_cpu import _without_absent_experts

    draw = torch.Generator().manual_seed(0)
    experts, x = torch.randn(4, 3, 3, generator=draw), torch.randn(5, 3, generator=draw)
    ids = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(5)])
    weights = torch.rand(5, 2, generator=draw)

    def forward(layer: torch.Tensor, x: torch.Tensor, chosen: "TopK", config: object) -> torch.Tensor:
        assert all(len(set(row)) == len(row) for row in chosen.topk_ids.tolist())  # SGLang's counts them so
        return torch.einsum("tk,tkoi,ti->to", chosen.topk_weights, layer[chosen.topk_ids], x)

    whole = forward(experts, x, TopK(weights, ids), None)
    parts = []
    for rank in range(2):
        local = ids - 2 * rank
        local[(local < 0) | (local > 1)] = -1
        mine = experts[2 * rank : 2 * rank + 2]
        parts.append(_without_absent_experts(forward)(mine, x, TopK(weights, local), None))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def blocks(weight: torch.Tensor, scales: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """As SGLang's block_quant_dequant."""
    each = scales.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)
    return (weight.float() * each[..., : weight.shape[-2], : weight.shape[-1]]).to(dtype)


def test_fp8_layers_compute_with_dequantized_weights() -> None:
    from harness.runtime.standins.harness_sglang_fp8 import _linear

    draw = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(5, 7, generator=draw).to(torch.float8_e4m3fn), torch.rand(3, 2, generator=draw)
    layer = SimpleNamespace(weight=weight, weight_scale_inv=scales)
    x, bias = torch.randn(2, 7, generator=draw), torch.randn(5, generator=draw)
    applied = _linear(blocks)
    method = SimpleNamespace(block_quant=True, quant_config=SimpleNamespace(weight_block_size=[2, 4]))
    right = torch.empty(5, 7)
    for row in range(5):
        for column in range(7):
            right[row, column] = weight[row, column].float() * scales[row // 2, column // 4]
    torch.testing.assert_close(applied(method, layer, x, bias), x @ right.T + bias)
    one_scale = SimpleNamespace(weight=weight.t(), weight_scale=torch.tensor(0.5))
    torch.testing.assert_close(applied(SimpleNamespace(block_quant=False), one_scale, x), x @ (weight.float() * 0.5).T)


def test_the_plugins_are_entry_points() -> None:
    found = importlib.metadata.distributions(path=[str(STANDINS)])
    points = [point for distribution in found for point in distribution.entry_points]
    names = ("harness_sglang_cpu", "harness_sglang_fp8", "harness_sglang_draft")
    assert [(each.group, each.value) for each in points] == [
        ("sglang.srt.plugins", f"{name}:register") for name in names
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "from harness.task.tiny_models import tiny_config, tiny_model; tiny_model(tiny_config('qwen2', 'cpu'), 0)",
        *(f"import harness.{name}" for name in ("trainer.actor", "weights.sync")),
    ],
)
def test_any_module_may_be_imported_first(code: str) -> None:
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
