"""Inputs: what a run reads before it builds anything. The rows, the model's folder, the tokenizer, saved rollouts.

With them the config can be resolved: what "auto" became, how many steps run.epochs is.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from harness.cluster.world import all_gather
from harness.config.checkpoint_folder import checkpoint_to_resume, step_of
from harness.config.facts import Facts
from harness.config.layers import ConfigError
from harness.config.model_fields import fields_of_file, model_fields
from harness.config.resolve import resolve
from harness.config.run_folder import write_config
from harness.config.schema import Config
from harness.observer import RunContext
from harness.rollout import sglang_api
from harness.rollout.sglang_api.probe import engine_facts
from harness.runtime.errors import UnsupportedEnvironment
from harness.task.data import Prompt, PromptSampler, Row, load_rows, tokenize_prompts
from harness.task.rewards import Reward, load_reward
from harness.task.tiny_models import is_tiny, save_tiny_model
from harness.trainer.model import Attention, choose_attention
from harness.trainer.saved_rollouts import SavedRollouts
from harness.weights.quantizers import quantizer_of
from harness.weights.transports import check_shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run reads before its parts are built."""

    model_folder: Path
    """The model that the trainer loads."""
    engine_folder: Path
    """The model that the engine loads: the same, or its copy in model.rollout_precision."""
    tokenizer: Any
    attention: Attention
    """The trainer's."""
    reward: Reward
    prompts: PromptSampler
    validation_prompts: list[Prompt]
    saved: SavedRollouts | None


def read_inputs(run: RunContext) -> tuple[RunContext, Inputs]:
    """Read the task's rows, the model's folder and the tokenizer.

    Return the run with its resolved config, and the inputs.

    A collective call. Raise ConfigError for what is missing or wrong, UnsupportedEnvironment for what cannot run here.
    """
    with as_config_error():
        check_weights_folder(run)
    config, task, held_out = run.config, run.config.task, run.config.validation
    with (
        as_config_error(),
        run.events.phase("inputs", waiting_for="the task's rows, the model's folder and the tokenizer"),
    ):
        rows, validation_rows = load_rows(task.source, task.split, task.rows, task.rows_seed), []
        if held_out.source:
            validation_rows = load_rows(held_out.source, held_out.split, held_out.rows, held_out.rows_seed)
        reward = load_reward(task.reward, [*rows, *validation_rows], run.rewards)
        model_folder = make_model_folder(run, rows)
        load_model_config(model_folder)  # a broken one would be blamed on the tokenizer, which reads it too
        tokenizer = load_tokenizer(model_folder)
        attention = trainer_attention(config, model_folder, run.world.device_type, run.events.say)
        limits = task.max_prompt_tokens, task.long_prompts
        usable = tokenize_prompts(rows, tokenizer, task.template, *limits)
        prompts = PromptSampler(usable, config.rollout.prompts_per_step, config.run.seed)
        validated = tokenize_prompts(validation_rows, tokenizer, task.template, *limits) if validation_rows else []
        check_vocabulary([*usable, *validated], model_folder)
    run.events.say(f"{len(usable)} prompts of {len(rows)} rows ({', '.join(task.source)})")
    run = resolved(run, len(usable), model_folder)
    with as_config_error():
        resumed = checkpoint_to_resume(run.config)
        saved = open_saved_rollouts(run, step_of(resumed) if resumed else 0)
    return run, Inputs(
        model_folder=model_folder,
        engine_folder=make_engine_folder(run, model_folder),
        tokenizer=tokenizer,
        attention=attention,
        reward=reward,
        prompts=prompts,
        validation_prompts=validated,
        saved=saved,
    )


def resolved(run: RunContext, prompts: int, model_folder: Path) -> RunContext:
    """Return the run with its config as it will run, which rank 0 writes and observers see; say what it became, and
    why.

    prompts: how many there are. Raise ConfigError or UnsupportedEnvironment for what cannot work.
    """
    facts = Facts(
        device=run.world.device_type,
        environment=os.environ,
        sglang=engine_facts(sglang_api.probe()),
        model=model_fields(str(model_folder), {}, run.world.device_type),
        prompts=prompts,
    )
    found = resolve(run.config, facts)
    for sentence in (*found.reasons, *(f"warning: {each}" for each in found.warnings)):
        run.events.say(sentence)
    if run.world.rank == 0:
        write_config(run.folder, found.config, run.world.device_type)
    run = replace(run, config=found.config)
    run.observer.resolved(run)
    return run


def open_saved_rollouts(run: RunContext, first: int) -> SavedRollouts | None:
    """Return the folder that rollout.save or rollout.load names. Raise ValueError on every rank if it cannot be used.

    first: the run's first step.
    """
    config, problem = run.config, ""
    saved = SavedRollouts.of(config, run.world.rank)
    if saved:
        try:
            saved.check(config, first)
        except ValueError as error:
            problem = str(error)
    if problem := next(filter(None, all_gather(problem)), ""):
        raise ValueError(problem)
    return saved


def make_model_folder(run: RunContext, rows: list[Row]) -> Path:
    """Return the folder that trainer and engine load: the configured one, or that of a tiny model, made once on each
    host.
    """
    model, world = run.config.model, run.world
    if not is_tiny(model.name):
        return Path(model.name)
    folder = run.folder / f"model-host{world.hosts.index(world.host)}"
    if world.rank == next(location.rank for location in world.locations if location.host == world.host):
        texts, has_weights = [row.text for row in rows], model.weights == "checkpoint"
        arguments = model.name, folder, run.config.run.seed, model.dtype, world.device_type, model.overrides
        save_tiny_model(*arguments, texts=texts, weights=has_weights)
    dist.barrier()
    return folder


def make_engine_folder(run: RunContext, model_folder: Path) -> Path:
    """Return the folder that the engine loads: the model's own, or its quantized copy, made once on each host.

    Collective.
    """
    config, world = run.config, run.world
    quantizer = quantizer_of(config.model.precision)
    if quantizer is None or config.rollout.load:
        return model_folder
    folder = run.folder / f"model-fp8-host{world.hosts.index(world.host)}"
    with run.events.phase("quantize_model", waiting_for="the model's quantized copy"), as_config_error():
        if world.rank == next(location.rank for location in world.locations if location.host == world.host):
            # The engine loads them when it starts, or for the baseline of the log-probs.
            has_weights = config.model.weights == "checkpoint" and (
                config.weights.verify or config.engine.initial_weights == "checkpoint"
            )
            dtype = getattr(torch, config.model.dtype)
            quantizer.write_model(str(model_folder), folder, dtype, weights=has_weights)
        dist.barrier()
    if world.device_type == "cpu":
        run.events.say("FP8 on the CPU: plain torch stands in for SGLang's FP8 kernels (harness_sglang_fp8)")
    return folder


def check_vocabulary(prompts: Iterable[Prompt], model_folder: Path) -> None:
    """Raise ValueError for a token that the model has no embedding for: on a GPU it would end the engine in an
    assertion.
    """
    size = load_model_config(model_folder).get_text_config().vocab_size
    for prompt in prompts:
        if (token := max(prompt.input_ids, default=0)) >= size:
            raise ValueError(
                f"the prompt of {prompt.row.where} has token {token}, but model.name's vocab_size is {size}: use the model"
                " that the tokenizer in its folder was made for"
            )


def trainer_attention(config: Config, model_folder: Path, device: str, say: Callable[[str], None]) -> Attention:
    """Return the trainer's attention, by transformers' name; say why, if it is not sdpa.

    Raise ValueError if the model does not have the attention that was asked for, UnsupportedEnvironment if SGLang's CPU
    mode does not compute the model's attention.
    """
    attention, why = choose_attention(
        load_model_config(model_folder),
        config.model.attention,
        config.model.packed,
    )
    if why:
        say(f'model.attention = "{attention}": {why}')
    if "attn_logit_softcapping" in why and device == "cpu" and "attention_backend" not in config.engine.args:
        raise UnsupportedEnvironment(
            f"{why}; so does SGLang's torch_native attention on the CPU, which would compute another model."
        )
    return attention


def load_model_config(model_folder: Path) -> PretrainedConfig:
    """Return the model's config. Raise ConfigError if transformers cannot read its config.json."""
    try:
        return AutoConfig.from_pretrained(str(model_folder), trust_remote_code=False)
    except Exception as error:  # of transformers, of huggingface_hub's checks of types, of the model's own class
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f'model.name = "{model_folder}" has a config.json that transformers cannot read: {cause}'
        ) from error


def load_tokenizer(model_folder: Path) -> Any:
    """Return the tokenizer in the model's folder. Raise ConfigError if it cannot be loaded, or if it is code of the model."""
    try:
        return AutoTokenizer.from_pretrained(str(model_folder), trust_remote_code=False)
    except Exception as error:  # of transformers, of tokenizers' Rust, which raises plain ones, of sentencepiece
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        if "auto_map" in fields_of_file(str(model_folder), "tokenizer_config.json", download=False):
            raise ConfigError(
                f'model.name = "{model_folder}" has a tokenizer for which tokenizer_config.json names Python code (auto_map), and'
                f" the trainer runs no code of a model; give it one that transformers has a class for: {cause}"
            ) from error
        raise ConfigError(
            f'model.name = "{model_folder}" has no tokenizer that transformers can load from tokenizer.json,'
            f" tokenizer_config.json and the files they need: {cause}"
        ) from error


def check_weights_folder(run: RunContext) -> None:
    """Raise ConfigError if engines are to load checkpoints from a folder that some host does not see. Collective."""
    weights = run.config.weights
    folder = Path(weights.folder).resolve() if weights.folder else run.folder
    if weights.transport == "disk":
        check_shared(folder, run.world, "weights.folder" if weights.folder else "run.dir")


@contextmanager
def as_config_error() -> Iterator[None]:
    """Raise ValueErrors of this block as ConfigError: data, a model or engine arguments that are missing or wrong."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
