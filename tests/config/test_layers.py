"""Properties: what to_toml writes, read_layer reads back; later layers win key by key; the digest follows the
values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.layers import ConfigError, Layer, build_config, digest, read_layer, to_redacted_toml, to_toml
from harness.config.schema import Config
from harness.tools.command_line import parse

REPOSITORY = Path(__file__).resolve().parents[2]

VALUES = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(args=st.dictionaries(st.text(min_size=1), VALUES, max_size=4), template=st.text(), rate=st.floats(1e-9, 1e9))
def test_resolved_config_reads_back(args: dict[str, object], template: str, rate: float) -> None:
    import tomllib

    config = Config()
    config.engine.args, config.task.template, config.actor.learning_rate = args, template, rate
    table = tomllib.loads(to_toml(config))
    assert build_config([Layer(source="file", table=table)]) == config


@pytest.mark.parametrize("template", ['password="{question}"', "Secret:\n{question}", "{question}"])
def test_what_a_run_writes_reads_back_without_its_secrets(template: str, tmp_path: Path) -> None:
    file, args = tmp_path / "config.toml", {"api_key": "correcthorse", "page_size": 16}
    given = ["--task.template", template, "--engine.args", json.dumps(args).replace(":", " =")]
    file.write_text(to_redacted_toml(parse(given).config))
    assert "correcthorse" not in file.read_text()
    read = build_config([read_layer(str(file))])
    assert (read.task.template, read.engine.args["page_size"]) == (template, 16)
    with pytest.raises(ConfigError, match=r"^engine.args has \[redacted [0-9a-f]{4}\] where a secret was left out"):
        parse([str(file)])
    assert parse([str(file), "--engine.args.api_key", "x"]).config.engine.args["api_key"] == "x"


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[run]\nsteps = 7\nseed = 1\n[engine.args]\nmem_fraction_static = 0.5\nlog_level = 'info'\n")
    second.write_text("[run]\nseed = 2\n[engine.args]\nmem_fraction_static = 0.6\n")
    config = parse([str(first), str(second), "--run.steps", "9", "--engine.args.max_total_tokens=64"]).config
    assert (config.run.steps, config.run.seed) == (9, 2)
    assert config.engine.args == {"mem_fraction_static": 0.6, "log_level": "info", "max_total_tokens": 64}


def test_override_text_is_read_by_the_type_of_its_key() -> None:
    config = parse(
        [
            "--actor.learning-rate",
            ".5",
            "--run.dir",
            "1",
            "--model.overrides",
            "{num_hidden_layers = 3}",
            "--rollout.top_k",
            "-1",
        ]
    ).config
    assert (config.actor.learning_rate, config.run.dir, config.rollout.top_k) == (0.5, "1", -1)
    assert config.model.overrides == {"num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("actor", ("actor",)),
        ("actor,critic", ("actor", "critic")),
        ("critic, actor", ("critic", "actor")),
        ('["actor", "critic"]', ("actor", "critic")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_a_list_of_names_is_read_with_commas_or_as_toml(text: str, value: tuple[str, ...]) -> None:
    assert parse([f"--memory.offload_optimizer={text}"]).config.memory.offload_optimizer == value


def test_lists_read_back_and_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text in ("0.9,1e-1", "[0.9, 0.1]"):
        file.write_text("[memory]\noffload_parameters = ['actor', 'reference']\noffload_optimizer = ['critic']\n")
        config = parse([str(file), "--memory.offload_optimizer", "actor", "--actor.betas", text]).config
        assert config.memory.offload_parameters == ("actor", "reference")
        assert config.memory.offload_optimizer == ("actor",) and config.actor.betas == (0.9, 0.1)
        file.write_text(to_toml(config))
        assert parse([str(file)]).config == config
    for source in ("openai/gsm8k", ["openai/gsm8k"]):
        assert build_config([Layer("a.toml", {"task": {"source": source}})]).task.source == ("openai/gsm8k",)


def test_digest_follows_the_values() -> None:
    assert digest(Config()) == digest(Config())
    assert digest(parse(["--run.seed", "1"]).config) != digest(Config())


def test_every_config_in_the_tree_is_valid() -> None:
    files = sorted((REPOSITORY / "configs").rglob("*.toml"))
    assert files
    for file in files:
        assert read_layer(str(file))
        parse([str(file)])


def test_help_lists_every_key_without_torch() -> None:
    code = "import sys, runpy; sys.path.insert(0, 'launch'); sys.argv = ['launch/ppo.py', '--help']\ntry: runpy.run_path('launch/ppo.py', run_name='__main__')\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for key in ("--actor.learning_rate", "--engine.args", "--dry-run", "--weights.bucket_size_mib"):
        assert key in done.stdout
    assert done.stdout.index("--model.name") < done.stdout.index("\nrun:")  # common keys come before the sections
    assert "--critic.learning_rate" in done.stdout
