"""The pasted functions with those of launch/minimal.py, on one rank, and an engine that is a transformers model."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from harness.tools.export import pasted
from harness.tools.export.program import MINIMAL, ORDER, STEP_PHASES
from harness.tools.tiny_models import tiny_fields

SETTINGS = {"tp": 1, "steps": 2, "prompts": 2, "responses": 2, "response_tokens": 4, "tolerance": 1e-4}


class ModelEngine:
    """Loads checkpoints, at most so many of them, and answers with a model's log-probs of tokens that it makes up."""

    def __init__(self, most: int) -> None:
        self.most, self.model = most, None

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        if self.most:
            self.most -= 1
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        return True, "Success"

    @torch.no_grad()
    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool) -> Any:
        prompts = torch.tensor(input_ids)
        tokens = torch.arange(sampling_params["max_new_tokens"]).expand(len(prompts), -1)
        logits = self.model(torch.cat([prompts, tokens], dim=1)).logits[:, prompts.shape[1] - 1 : -1]  # type: ignore[misc]
        found = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).tolist()
        rows = [zip(row, tokens[0].tolist(), strict=True) for row in found]
        return [{"meta_info": {"output_token_logprobs": list(row)}} for row in rows]


@pytest.fixture
def minimal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """launch/minimal.py, whose names pasted.py has too."""
    spec = importlib.util.spec_from_file_location("minimal_with_pasted", MINIMAL)
    assert spec and spec.loader
    found: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    found.DEVICE, found.DTYPE = "cpu", torch.float32
    chosen = {"build_actor": pasted.build_actor__random, "sync_weights": pasted.sync_weights__disk}
    chosen |= {"MODEL_CONFIG": tiny_fields("qwen2", "cpu")}
    for name, value in (vars(found) | chosen).items():
        if name not in vars(pasted):
            monkeypatch.setattr(pasted, name, value, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


@pytest.mark.parametrize("loads", [2, 1])
def test_a_program_trains_in_the_phases_of_a_run_and_stops_where_weights_did_not_arrive(
    loads: int, minimal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = pasted.write_tiny__random("qwen2", str(tmp_path / "model"), seed=0)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    settings, engine = minimal.Settings(**SETTINGS), ModelEngine(most=loads)
    phases = [f"{name} of step {step}" for step in (0, 1) for name in STEP_PHASES]
    if loads == 2:
        pasted.train__in_phases(settings, mesh, engine, folder)
    else:
        with pytest.raises(pasted.WeightsDidNotArrive, match=r"step 1: the engine's log-probs are off by \d"):
            pasted.train__in_phases(settings, mesh, engine, folder)
        phases.remove("update_actor of step 1")
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("PASSED: 2 of 2 steps")] == [*ORDER[2:4], *phases]
    assert len(printed) - len(phases) == 2 + (loads == 2)
    assert not list(tmp_path.glob("repro-*")), "the checkpoint is gone"


class Started(SimpleNamespace):
    """The arguments and the environment with which an engine was started."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(arguments=arguments, environment=dict(os.environ))


@pytest.mark.parametrize(
    ("device", "name", "value"),
    [("cpu", "SGLANG_USE_CPU_ENGINE", "1"), ("cuda", "CUDA_VISIBLE_DEVICES", "3")],
)
def test_an_engine_starts_in_an_environment_of_its_own(
    device: str, name: str, value: str, minimal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = SimpleNamespace(ServerArgs=lambda *, tp_size, dtype, device: None)
    fakes = {"sglang": SimpleNamespace(Engine=Started, __version__="0.5.20"), "sglang.srt.server_args": server_args}
    for module, fake in fakes.items():
        monkeypatch.setitem(sys.modules, module, fake)
    ends: list[tuple[int, str]] = []
    constants = {"DEVICE": device, "PP": 1, "PP_FIRST": False, "COLOCATE": True, "GIVEN": ("tp_size", "odd")}
    constants |= {"ENGINE_ARGUMENTS": {"device": device, "new": 1}, "leave": lambda *end: ends.append(end)}
    for key, constant in constants.items():
        monkeypatch.setattr(pasted, key, constant, raising=False)
    monkeypatch.setattr(pasted, "LOCAL_WORLD", 1)
    environment = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "CUDA_VISIBLE_DEVICES": "3", "MASTER_ADDR": "127.0.0.1"}
    for key, text in environment.items():
        monkeypatch.setenv(key, text)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    engine = pasted.start_engine__anywhere(minimal.Settings(**SETTINGS), mesh, "folder")
    assert ends == [(2, "error: engine.args.odd: sglang 0.5.20 has no such engine argument.\n")]
    assert engine.environment[name] == value and not {"TORCHELASTIC_RUN_ID", "RANK"} & set(engine.environment)
    assert os.environ["RANK"] == "0" and "SGLANG_BLOCK_NONZERO_RANK_CHILDREN" not in os.environ
    given = engine.arguments
    assert given.pop("dist_init_addr").startswith("127.0.0.1:") and given.pop("custom_sigquit_handler")
    assert given == {
        "model_path": "folder", "device": device, "tp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0,
        "dtype": "float32", "random_seed": 1,
    }  # fmt: skip
