"""Repros as text and as modules. Whether they run is in test_real_programs.py."""

import ast
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import ModuleType
from typing import Any

import minimal
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness.runtime import events
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.export.program import ELSEWHERE, ORDER, Evidence, literal, missing_tensors, planted_fault, render
from harness.tools.export.subject import RunEnd, Subject, behind, read_subject, what_was_started
from harness.weights.fp8_checkpoint import write_quantized_model
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).resolve().parents[3]
FP8 = "configs/cpu/fp8_block.toml"
DRAFTED = "configs/cpu/mtp.toml"
"""The one config that no file can repeat."""
CONFIGS = sorted({str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "configs").glob("*/*.toml")} - {DRAFTED})
PHASES = ("meet", "start_engine", "build_trainer", "sync", "generate", "old_log_probs", "update_actor", "shutdown")
FAILED = RunEnd(
    code=1, verdict=("FIRST FAILURE: rank 1 failed",), kind="exception", ranks=(1,), phase="advantages", step=1,
    error="MyError: a 'quoted'\nmessage", traceback=("Traceback:", '  File "/a/b/c.py", line 1, in f', "MyError"),
)  # fmt: skip
LOST = RunEnd(
    code=1, verdict=("FIRST FAILURE: x",), kind="exception", ranks=(0,), phase="verify_log_probs", step=0,
    error="WeightsDidNotArrive: step 0: off by 8.68e-01 in the mean; largest 3.94e+00; engine tensors that differ from the"
    " trainer's: model.layers.1.mlp.gate_up_proj.weight (model.layers.1.mlp.gate_proj.weight,"
    " model.layers.1.mlp.up_proj.weight); model.norm.weight; and 3 more",
)  # fmt: skip

REFUSED = RunEnd(
    code=1, verdict=("FIRST FAILURE: y",), kind="exception", ranks=(0,), phase="sync", step=1,
    error="EngineRefused: update_weights_from_tensor: the engine refused: no",
)  # fmt: skip
ENDS = {"new": None, "failed": FAILED, "lost": LOST, "refused": REFUSED}


def check(files: Path) -> None:
    """What a maintainer's linter would say, and Python."""
    rules = ("--select", "E,F,I,B,UP,SIM,RUF", "--ignore", "E501", "--line-length", "120", "--target-version", "py311")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format", "concise", *rules, str(files)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for file in files.glob("*.py"):
        text = file.read_text(encoding="ascii")
        compile(text, str(file), "exec")
        assert "harness" not in text.split("import faulthandler")[1].replace("the harness's own", "")


def subject_of(*words: str) -> Subject:
    return read_subject(words)


@pytest.mark.long
def test_every_config_on_both_devices_is_a_clean_short_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config has each device, and one after the other of the ends."""
    monkeypatch.chdir(REPOSITORY)
    ends = cycle(ENDS)
    for config, device in product(CONFIGS, ("cpu", "cuda")):
        name = next(ends)
        subject = replace(subject_of(config, "--engine.device", device), seen=ENDS[name])
        (tmp_path / f"{Path(config).stem}_{device}_{name}.py").write_text(render(subject))
        if subject.config.parallel.tp * subject.config.parallel.pp <= 8:
            file = tmp_path / f"{Path(config).stem}_{device}_{name}_server.py"
            file.write_text(render(replace(subject, nproc_per_node=8), server=True))
    many = "configs/multinode/deepseek_v3_671b.toml"
    (tmp_path / "hosts.py").write_text(render(replace(subject_of(many, "--nnodes", "32"), seen=FAILED)))
    check(tmp_path)


CHOICES = (
    ("--model.name", "deepseek_v3"),
    ("--model.name", "moonlight", "--weights.transport", "bucket"),
    ("--model.name", "qwen3_moe", "--weights.transport", "disk"),
    ("--weights.verify", "false", "--run.phase_timeouts.sync", "5"),
    ("--parallel.tp", "2", "--parallel.pp", "2"),
    ("--model.name", "some/model"),
)


def test_other_choices_make_clean_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    for (number, words), device in product(enumerate(CHOICES), ("cpu", "cuda")):
        subject = subject_of("configs/cpu/quickstart.toml", "--engine.device", device, *words)
        for server in (False, True):
            seen = LOST if server == (device == "cpu") else None
            text = render(replace(subject, seen=seen), server=server)
            assert ("'copy_all_layer_kv_cache_cpu'," in text) == (device == "cpu"), "the names of the stand-in"
            (tmp_path / f"{device}_{number}_{'lost' if seen else 'new'}_{server}.py").write_text(text)
    check(tmp_path)


def header_of(text: str) -> str:
    compile(text, "repro.py", "exec")
    return text.split('"""')[1]


def kept_programs(folder: Path) -> dict[str, str]:
    """Four programs, from configs and from a run. The text of others cannot end the string that it is in."""
    quickstart = str(REPOSITORY / "configs/cpu/quickstart.toml")
    said = ["python3 launch/bisect_versions.py --good 1 --bad 2 -- s.py", 'It says """x""" \\']
    evidence = Evidence(slug="some-slug", said="some line", check_env=["sglang: 0.5.23", "vllm: none"], bisect=said)
    failed = replace(subject_of(quickstart, "--engine.device", "cpu"), seen=FAILED)
    lost = replace(subject_of(quickstart, "--engine.device", "cuda", "--weights.transport", "disk"), seen=LOST)
    words = ("--engine.device", "cuda", "--engine.args.page_size", "3", "--weights.transport", "pull")
    refused = subject_of(str(REPOSITORY / FP8), *words)
    refused = replace(refused, seen=replace(REFUSED, phase="start_engine"))
    hosts = fake_run(folder / "run", 64)
    ranks = json.loads((hosts / "environment.json").read_text())
    (hosts / "environment.json").write_text(json.dumps([each | {"command": "torchrun ppo.py --x y"} for each in ranks]))
    hung = read_subject([str(hosts), "--run.phase_timeouts.update_critic", "7"])
    return {
        "torchrun": render(failed, evidence),
        "server": render(lost, evidence, server=True),
        "fp8": render(refused),
        "hosts": render(hung),
    }


def without_minimal(text: str) -> str:
    """Name the functions that are those of launch/minimal.py, source and all, instead of showing them."""
    for name, source in sources(minimal).items():
        text = text.replace(source, f"# {name}(), as in launch/minimal.py\n")
    return text


def test_the_programs_are_those_that_are_kept(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After a change, --rewrite-said writes tests/tools/export/programs/*.txt, to be read as a diff."""
    for name, text in kept_programs(tmp_path).items():
        compile(text, f"{name}.py", "exec")
        file = Path(__file__).with_name("programs") / f"{name}.txt"
        if request.config.getoption("--rewrite-said"):
            file.write_text(without_minimal(text))
        assert without_minimal(text) == file.read_text(), file


def test_every_phase_of_a_run_has_one_in_a_program() -> None:
    there = {*ORDER, *ELSEWHERE, events.RUN}
    assert [phase for phase in events.PHASES if phase not in there and not phase.startswith("verify_")] == []
    assert set(ELSEWHERE.values()) <= set(ORDER)


@pytest.mark.parametrize(
    ("command", "script", "options"),
    [
        ("", "launch/ppo.py", []),
        ("python torchrun 'unclosed", "launch/ppo.py", []),
        ("python -m torch.distributed.run --nproc-per-node=2 launch/ppo.py a.toml", "launch/ppo.py", []),
        (
            "python /x/launch/torchrun.py --nnodes=1 /x/launch/sync.py --syncs 3 a.toml --bench b.toml --transports pull disk",
            "launch/sync.py",
            ["--syncs", "3", "--bench", "--transports", "pull", "disk"],
        ),
        (
            "torchrun launch/step_bench.py a.toml --prompt-tokens 512 --model.packed --repeats=2 --parallel.dp 2 c.toml",
            "launch/step_bench.py",
            ["--prompt-tokens", "512", "--repeats=2"],
        ),
        ("torchrun my/own.py --what else", "my/own.py", ["--what", "else"]),
        (
            "torchrun --no-python /x/bin/sglang-rl-harness step-bench a.toml --repeats 2",
            "launch/step_bench.py",
            ["--repeats", "2"],
        ),
    ],
)
def test_what_a_run_was_started_with(command: str, script: str, options: list[str]) -> None:
    assert what_was_started(command) == (script, tuple(options))


@pytest.mark.parametrize(
    ("phase", "words", "says"),
    [
        ("sync", (), "passes, without updates: the engine reads the checkpoint itself"),
        ("load_baseline", (), "passes, without updates"),
        ("start_engine", ("--engine.args.page_size", "3"), "passes, without the run's own engine arguments"),
        ("start_engine", (), ""),
    ],
)
def test_where_sglang_fails_by_itself_the_control_arm_leaves_out_what_may_be_the_cause(
    phase: str, words: tuple[str, ...], says: str
) -> None:
    subject = subject_of(str(REPOSITORY / "configs/cpu/quickstart.toml"), "--engine.device", "cpu", *words)
    text = render(replace(subject, seen=replace(REFUSED, phase=phase)), server=bool(words))
    assert ("--arm control" in header_of(text)) == ("ARM == " in text) == bool(says)
    assert says in " ".join(header_of(text).split()) and "THE FAULT" not in text


def test_a_server_on_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    many = subject_of("configs/multinode/deepseek_v3_671b.toml", "--nnodes", "32")
    assert many.config.parallel.tp * many.config.parallel.pp > many.nproc_per_node
    with pytest.raises(ValueError, match="--server needs an engine that fits on one host"):
        render(many, server=True)


def test_a_run_with_a_draft_model_is_refused() -> None:
    drafted = subject_of(str(REPOSITORY / DRAFTED), "--engine.device", "cpu")
    with pytest.raises(
        ValueError, match=r"no weights of a draft model.*EAGLE.*remove engine.args.speculative_algorithm"
    ):
        render(drafted)


def definitions(text: str, *names: str) -> dict[str, Any]:
    """Return functions and constants of a program, without running the rest of it."""
    tree = ast.parse(text)
    wanted = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names)
    ]
    found: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "json": json, "os": os, "Path": Path}
    exec(compile(ast.Module(wanted, []), "repro.py", "exec"), found)
    return found


@pytest.mark.parametrize("server", [False, True])
def test_a_program_quantizes_as_the_run_does(server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's checkpoint is equal bit for bit, so names, scales and config are too."""
    monkeypatch.chdir(REPOSITORY)
    text = render(subject_of(FP8, "--engine.device", "cpu"), server=server)
    assert "in block-FP8" in header_of(text)
    assert "'load_format': 'auto'" in text, "dummy weights would make the scales of the KV cache random"
    program = definitions(text, "quantized", "write_fp8_model", "DTYPE", "UNQUANTIZED")
    torch.manual_seed(0)
    layer = "model.layers.1."
    shapes = {
        "model.embed_tokens.weight": (300, 256), "lm_head.weight": (300, 256), f"{layer}input_layernorm.weight": (256,),
        f"{layer}self_attn.q_proj.weight": (384, 256), f"{layer}self_attn.q_proj.bias": (384,),
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": (200, 256), f"{layer}mlp.gate.weight": (8, 256),
        f"{layer}mlp.experts.3.up_proj.weight": (128, 100), f"{layer}mlp.shared_expert_gate.weight": (1, 256),
    }  # fmt: skip
    model, made, expected = (tmp_path / name for name in ("model", "made", "expected"))
    model.mkdir()
    made.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors[f"{layer}self_attn.q_proj.weight"][:128, :128] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    program["write_fp8_model"](str(model), str(made))
    write_quantized_model(str(model), expected, torch.bfloat16)
    assert json.loads((made / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (made, expected))
    assert ours.keys() == theirs.keys() and len(ours) == len(tensors) + 3
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_program_allows_what_its_run_measured_with_and_without_a_baseline(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    assert "TOLERANCE = 0.026 " in render(read_subject([str(folder)]))
    for file in (folder / "events").iterdir():
        file.write_text(file.read_text().replace("log_prob_baseline", "trainer_rounding").replace("0.026", "0.014"))
    assert "TOLERANCE = 0.014 " in render(read_subject([str(folder)]))


def test_lost_tensors_are_those_that_the_run_named() -> None:
    named = {"model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    assert named == {*missing_tensors(LOST)} - {"model.layers.1.mlp.gate_up_proj.weight"}
    assert planted_fault(LOST, PHASES) is None
    assert missing_tensors(replace(LOST, error="WeightsDidNotArrive: ... the trainer's: none found")) == ()


@pytest.mark.parametrize(
    ("changed", "statement"),
    [
        ({}, "raise type('MyError', (RuntimeError,), {})(\"a 'quoted'\\nmessage\")"),
        ({"error": "ValueError: x"}, "raise ValueError('x')"),
        ({"error": "UnicodeDecodeError: x"}, "raise type('UnicodeDecodeError', (RuntimeError,), {})('x')"),
        ({"error": "ExceptionGroup: x"}, "raise type('ExceptionGroup', (RuntimeError,), {})('x')"),
        ({"error": "no class at all"}, "raise RuntimeError('no class at all')"),
        ({"kind": "vanished", "error": "died"}, "os.kill(os.getpid(), signal.SIGKILL)"),
        ({"kind": "died", "error": "was killed by SIGSEGV"}, "os.kill(os.getpid(), signal.SIGSEGV)"),
        ({"kind": "died", "error": "ended with exit code 3, without a word"}, "leave(3)"),
        ({"kind": "stopped", "error": "", "code": 124}, "os.kill(os.getpid(), signal.SIGSTOP)"),
        ({"kind": "launcher", "error": "(pid 7) is gone"}, "os.kill(os.getppid(), signal.SIGKILL)"),
        ({"kind": "told", "error": "(pid 7) got SIGINT, as from Ctrl-C"}, "os.kill(os.getppid(), signal.SIGINT)"),
        (
            {"kind": "stopped", "error": "engine process sglang::scheduler_TP1 (pid 7)", "code": 124},
            '[each.suspend() for each in __import__("psutil").Process().children(recursive=True)'
            " if each.name() == 'sglang::scheduler_TP1']",
        ),
        ({"kind": "deadline", "error": "", "code": 124}, "time.sleep(1000000000)"),
        ({"error": "ConfigError: no.", "code": 2}, "leave(2, 'error: no.' + chr(10))"),
        # What the engine does by itself.
        ({"code": 0}, None),
        ({"code": None}, None),
        ({"error": "EngineRefused: update_weights_from_tensor: the engine refused: no"}, None),
        (
            {"error": "KeyError: 'x'", "traceback": ('  File "/venv/site-packages/sglang/srt/x.py", line 1, in f',)},
            None,
        ),
        ({"error": "ConfigError: engine.args.x: sglang 0.5.20 has no such engine argument.", "code": 2}, None),
    ],
)
def test_what_the_run_s_own_code_did_is_planted(changed: dict[str, Any], statement: str | None) -> None:
    plant = planted_fault(replace(FAILED, **changed), PHASES)
    assert (plant and plant.statement) == statement
    assert plant is None or (plant.ranks, plant.phase, plant.step) == ((1,), "update_actor", 1)


def frame(file: str) -> tuple[str, ...]:
    return ("Traceback (most recent call last):", f'  File "{file}", line 1, in f', "    f()", "KeyError: 'x'")


@pytest.mark.parametrize(
    ("file", "of_sglang"),
    [
        ("/user/sglang/my_reward.py", False),  # a folder of the user's own
        ("/opt/conda/envs/sglang/lib/python3.11/site-packages/peft/model.py", False),  # an environment of that name
        ("/opt/conda/envs/sglang/lib/python3.11/json/decoder.py", False),
        ("C:\\sglang\\train.py", False),
        ("/user/sglang/ppo-harness/harness/trainer/model.py", False),
        ("/sgl-workspace/sglang/python/sglang/launch_server.py", True),  # a checkout
        ("C:\\env\\Lib\\site-packages\\sglang\\utils.py", True),
    ],
)
def test_code_in_a_folder_named_sglang_is_not_sglangs(file: str, of_sglang: bool) -> None:
    plant = planted_fault(replace(FAILED, error="KeyError: 'x'", traceback=frame(file)), PHASES)
    assert (plant is None) == of_sglang
    assert plant is None or plant.statement == """raise type('KeyError', (RuntimeError,), {})("'x'")"""


def test_a_failure_in_transformers_is_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's forward pass has frames of transformers, whatever fails in it."""
    with pytest.raises(ValueError, match="nope") as found:
        transformers.AutoConfig.for_model("nope")
    trace = tuple("".join(traceback.format_exception(found.value)).splitlines())
    assert any("/transformers/" in line for line in trace)
    monkeypatch.chdir(REPOSITORY)
    seen = replace(FAILED, error="ValueError: nope", traceback=trace, phase="old_log_probs")
    text = render(replace(subject_of("configs/cpu/quickstart.toml", "--engine.device", "cpu"), seen=seen))
    assert "THE FAULT" in text and "SGLang fails by itself" not in header_of(text)


@pytest.mark.parametrize("name", ["torch.OutOfMemoryError", "OutOfMemoryError", "AcceleratorError"])
def test_an_error_of_the_gpu_is_the_trainers_where_only_the_trainer_works(name: str) -> None:
    seen = replace(FAILED, error=f"{name}: CUDA out of memory.")
    for phase in ("update_actor", "update_critic", "old_log_probs", "values", "build_trainer"):
        assert planted_fault(replace(seen, phase=phase), ORDER), phase
    for phase in ("start_engine", "sync", "resume_weights", "generate"):
        assert planted_fault(replace(seen, phase=phase), ORDER) is None, phase


@pytest.mark.parametrize(
    "error", ["KeyError: 'x'", "UnicodeDecodeError: 'utf-8' codec can't decode", "ValueError: a\nb", "MyError: c"]
)
def test_a_planted_exception_prints_what_the_runs_did(error: str) -> None:
    plant = planted_fault(replace(FAILED, error=error), PHASES)
    assert plant
    try:
        exec(plant.statement, {})
    except Exception as raised:
        assert f"{type(raised).__name__}: {raised}" == error
    else:
        pytest.fail("nothing is raised")


def test_the_rank_behind_is_the_one_with_fewest_phases() -> None:
    def event(rank: int, kind: str, phase: str) -> dict[str, Any]:
        return {"rank": rank, "event": kind, "phase": phase, "step": 0}

    both = [event(rank, kind, "sync") for rank in (0, 1) for kind in ("phase_start", "phase_end")]
    assert behind([*both, event(0, "phase_start", "generate")]) == ((1,), ("sync", 0))
    assert behind([*both, *(event(rank, "phase_start", "generate") for rank in (0, 1))]) == ((0, 1), ("generate", 0))
    assert behind([]) is None
    assert behind([event(0, "phase_start", "run")]) == ((0,), ("", None))


def program_of(
    folder: Path, *words: str, seen: RunEnd | None = None, config: str = "cpu/quickstart.toml", server: bool = False
) -> Any:
    """Return a repro as a module, as an engine's process imports it."""
    words = (str(REPOSITORY / "configs" / config), "--engine.device", "cuda", *words)
    subject = replace(subject_of(*words), seen=seen)
    file = folder / "repro.py"
    file.write_text(render(subject, server=server))
    spec = importlib.util.spec_from_file_location("repro", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(module: ModuleType) -> dict[str, str]:
    """The source of each function that is defined in a module's file."""
    own = [each for _, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__]
    return {each.__name__: inspect.getsource(each) for each in own}


def test_tensors_that_did_not_arrive_are_left_out_even_where_a_call_had_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(tmp_path, seen=LOST)
    one = torch.ones(1)
    calls = [{"model.norm.weight": one}, {"lm_head.weight": one, "model.layers.1.mlp.up_proj.weight": one}]
    monkeypatch.setattr(program, "checkpoint_tensors", lambda model: iter(calls))
    assert list(program.sent_tensors(None)) == [{"lm_head.weight": one}]
    monkeypatch.setattr(program, "ARM", "control")
    assert list(program.sent_tensors(None)) == calls


def test_an_update_changes_every_element_of_every_tensor(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64, track_running_stats=False))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(1.0)
    program.change(model, step=0)
    assert all(set(tensor.unique().tolist()) == {7 / 8, 9 / 8} for tensor in model.parameters())


@pytest.mark.parametrize("server", [False, True])
def test_a_phase_that_takes_too_long_ends_the_rank_with_124(
    server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = program_of(tmp_path, "--run.phase_timeouts.sync", "0.3", server=server)
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(program, "leave", lambda *end: ends.append(end))
    program.phase("sync", 1)
    program.watch()
    [(code, text)] = ends
    assert code == 124 and text.endswith("FAILED: its timeout passed in sync of step 1\n")
    printed = capfd.readouterr()
    assert printed.out == "sync of step 1\n" and "most recent call first" in printed.err
    (tmp_path / "repro.log").write_text(printed.err)
    found = diagnose([str(tmp_path / "repro.log")])
    assert found.suspicious and found.suspicious.whole == text.strip(), "the sentence, and not the first of the stacks"


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("key", ["timeout_seconds", "phase_timeouts.sync"])
def test_the_control_arm_does_not_have_the_timeout_that_passed(
    key: str, server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would end as the run did if the timeout was merely too short."""
    words = (f"--run.{key}", "5", "--run.phase_timeouts.generate", "5")
    program = program_of(tmp_path, *words, seen=replace(FAILED, kind="deadline", phase="sync"), server=server)
    ends: list[str] = []
    monkeypatch.setattr(program, "leave", lambda code, text: ends.append(text))
    for arm in ("broken", "control"):
        monkeypatch.setattr(program, "ARM", arm)
        for phase in ("sync", "generate"):
            program.PHASE.update(name=phase, place=f"{phase} of {arm}", began=time.monotonic() - 60)
            monkeypatch.setattr(program.time, "sleep", lambda seconds: pytest.fail("its time has not passed"))
            if (arm, phase) == ("control", "sync"):
                with pytest.raises(pytest.fail.Exception):
                    program.watch()
            else:
                program.watch()
    assert [text.split()[-1] for text in ends] == ["broken", "broken", "control"]


@pytest.mark.parametrize(("master", "begins"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
def test_an_ipv6_address_has_brackets(
    master: str, begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    program = program_of(tmp_path, "--nnodes", "2", "--parallel.dp", "2")
    assert program.free_address().startswith(begins)


@pytest.mark.parametrize(
    ("changed", "said", "slug"),
    [
        ({"kind": "died", "error": "was killed by SIGKILL"}, "injected: kill@update_actor:1:1", "injected-fault"),
        ({"kind": "deadline", "error": "", "code": 124}, "injected: hang@update_actor:1:1", "injected-fault"),
        ({"error": "EngineFailed: a scheduler died"}, "injected: wrong-shape@sync:1:1", "injected-fault"),
        ({"error": "OutOfMemoryError: x", "phase": "sync"}, "injected: oom@sync:1:1", "injected-fault"),
        ({"error": "OSError: x"}, "rank 1 FAILED: OSError: [Errno 28] No space left on device", "disk-full"),
        ({"error": LOST.error}, "rank 1 FAILED: WeightsDidNotArrive: step 0", "weights-did-not-arrive"),
    ],
)
def test_the_log_of_a_program_gets_the_name_that_its_top_says(
    changed: dict[str, Any], said: str, slug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(REPOSITORY / "configs/cpu/quickstart.toml"), "--engine.device", "cpu")
    told = [{"event": "injected"}] * said.startswith("injected")
    subject = replace(subject_of(*words), seen=replace(FAILED, ranks=(0,), **changed), events=tuple(told))
    assert slug not in header_of(render(subject, Evidence(slug=slug))), "its log would not have it"
    text = render(subject, Evidence(slug=slug, said=said))
    assert f"known to launch/diagnose.py as {slug}" in header_of(text)
    assert "THE FAULT" in text and "SGLang fails by itself" not in header_of(text)
    [printed] = [line.strip() for line in text.splitlines() if line.strip().startswith(f"print({said!r}")]
    exec(printed, {"sys": sys})
    (tmp_path / "repro.log").write_text(capsys.readouterr().err)
    found = diagnose([str(tmp_path / "repro.log")]).finding
    assert found and found.entry.slug == slug


def test_the_control_arm_leaves_the_fault_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(tmp_path, seen=replace(FAILED, ranks=(0,), error="ValueError: x"))
    with pytest.raises(ValueError, match="x"):
        program.phase("update_actor", 1)
    monkeypatch.setattr(program, "ARM", "control")
    program.phase("update_actor", 1)


@pytest.mark.long
def test_every_rank_writes_its_model_before_the_ranks_meet(tmp_path: Path) -> None:
    """From then on transformers' save_pretrained writes on rank 0 alone."""
    (tmp_path / "repro.py").write_text(render(subject_of(str(REPOSITORY / "configs/cpu/quickstart.toml"))))
    script = (
        "import os, repro\n"
        "repro.run = lambda folder: print('>', sorted(os.listdir(folder)), repro.dist.is_initialized(), flush=True)\n"
        "repro.dist.barrier = lambda: None\n"
        "repro.RANK = 1\n"
        "repro.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "'config.json'" in done.stdout and "model.safetensors" in done.stdout, done.stdout + done.stderr
    assert done.stdout.strip().endswith(" False")


def test_literals_are_python_and_not_long() -> None:
    value = {"a": 1.5, "b": [1, None], "c": {"d": 'say "x"', "e": True}} | {f"name_{each}": each for each in range(30)}
    text = literal(value, "value")
    assert eval(text) == value and max(map(len, text.splitlines())) <= 120
    odd = {"a": float("inf"), "b": [float("-inf"), (1,), ()], "c": {"nan": [True, "\u00e9\x00"]}}
    assert eval(literal(odd)) == odd and literal(odd).isascii()
    assert math.isnan(eval(literal(float("nan"))))
