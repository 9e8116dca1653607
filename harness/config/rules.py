"""Rules about the config itself. engine_rules.py and model_rules.py have those that need a device, an sglang or a
model.

Each rule yields a BrokenRule for the key that the user should change, and goes on. resolve() makes the sentences, and tells
them all. A rule whose text names the other keys that it looks at is left out where one of these is wrong by itself.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from string import Formatter

from harness.config.layers import nearest
from harness.config.schema import TINY_MODELS, Config
from harness.runtime.events import PHASES
from harness.task.rewards import HANDED_IN, REWARDS, is_reward


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A setting that cannot work."""

    key: str
    """section.name, or section.name.inner for an entry of a table."""
    text: str
    """"must ...", or why it cannot work and what to do instead."""
    unsupported: bool = False
    """The setting is right, but not on this machine or with this sglang: exit code 125 instead of 2."""
    alone: bool = False
    """The value is wrong whatever the other keys are. Rules that look at it too are not judged then."""


_AT_LEAST_1 = (
    "dp tp pp steps prompts_per_step responses_per_prompt max_response_tokens max_prompt_tokens bucket_size_mib"
    " minibatch_size microbatch_size ppo_epochs"
)
_AT_LEAST_0 = (
    "seed rows weight_decay entropy_coefficient value_clip kl_coefficient warmup_steps critic_warmup"
    " epochs every keep validation.temperature tokens_per_microbatch"
)
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "a finite number",
        math.isfinite,
        "learning_rate max_grad_norm weight_decay rollout.temperature validation.temperature heartbeat_timeout"
        " kl_coefficient entropy_coefficient",
    ),
    ("at least 1", lambda value: value >= 1, _AT_LEAST_1),
    ("above 0", lambda value: value > 0, "learning_rate max_grad_norm clip_low clip_high"),
    ("above 0 and at most 1000000 seconds (12 days)", lambda value: 0 < value <= 1e6, "timeout_seconds"),
    ("0 or more", lambda value: value >= 0, _AT_LEAST_0),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "gamma lam"),
    ("below 1", lambda value: value < 1, "clip_low"),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, "top_p"),
    ("between 1024 and 60000", lambda value: 1024 <= value <= 60000, "base_port"),
    ("at least 3 (hosts send a heartbeat every second)", lambda value: value >= 3, "heartbeat_timeout"),
    # Below this, and with top_k = 1, SGLang samples greedily and reports log-probs at temperature 1.
    ("at least 1e-06 (greedy responses teach nothing)", lambda value: value >= 1e-6, "rollout.temperature"),
    ("-1 (all tokens) or at least 2 (1 is greedy)", lambda value: value == -1 or value >= 2, "top_k"),
)
"""What a value must be, and the keys it applies to: NAME in every section that has it, or SECTION.NAME."""

DERIVED_ENGINE_ARGUMENTS = {
    "model.name": "model_path",
    "model.dtype": "dtype",
    "engine.device": "device",
    "parallel.tp": "tp_size",
    "parallel.pp": "pp_size",
    "torchrun's --nnodes": "nnodes node_rank",
    "engine.base_port": "dist_init_addr nccl_port port",
    "CUDA_VISIBLE_DEVICES": "base_gpu_id gpu_id_step",
    "run.seed": "random_seed",
    "engine.initial_weights": "load_format",
}
"""Setting -> the arguments of sglang.Engine that the harness derives from it."""

QUANTIZED = "a quantized engine keeps parameters whose shapes differ from the trainer's, so weight updates cannot load"
SEEN_FAILING = {
    "fp8": "; sglang 0.5.17 could not load a second time what it had quantized itself (as in sglang#5424)",
    "mxfp8": "; log-probs were off by 3.8 after an update (sglang#28676)",
}
"""Value of engine.args.quantization -> what is known of weight updates with it."""


def config_rules(config: Config) -> Iterator[BrokenRule]:
    """Yield what is wrong on any machine, with any model and any data. All values are in their ranges."""
    for rules in (
        _run,
        _task,
        _batches,
        _rollout,
        _algorithm,
        _optimizers,
        _model,
        _engine,
        _updates,
        _memory,
    ):
        yield from rules(config)


def in_ranges(config: Config) -> tuple[Config, list[BrokenRule]]:
    """Return the config with the default in the place of each value that is out of its range, and these values."""
    wrong = {each.key: each for each in _ranges(config)}
    for section in {key.partition(".")[0] for key in wrong}:
        values = getattr(config, section)
        names = [each.name for each in fields(values) if f"{section}.{each.name}" in wrong]
        defaults = {name: getattr(type(values)(), name) for name in names}
        config = replace(config, **{section: replace(values, **defaults)})
    return config, list(wrong.values())


def _ranges(config: Config) -> Iterator[BrokenRule]:
    for section in fields(config):
        values = getattr(config, section.name)
        for words, is_in, names in reversed(RANGES):
            for key in names.split():
                only, _, name = key.rpartition(".")
                if only in ("", section.name) and hasattr(values, name) and not is_in(getattr(values, name)):
                    yield BrokenRule(f"{section.name}.{name}", f"must be {words}", alone=True)


def _run(config: Config) -> Iterator[BrokenRule]:
    if ":" in config.run.dir:
        yield BrokenRule("run.dir", "must have no colon: SGLang refuses one in the path of a model", alone=True)
    for phase, seconds in config.run.phase_timeouts.items():
        key = f"run.phase_timeouts.{phase}"
        if phase not in PHASES:
            hint = nearest(phase, PHASES, f"the phases are {', '.join(PHASES)}")
            yield BrokenRule(key, f"{phase} is not a phase; {hint}", alone=True)
        elif type(seconds) not in (int, float) or not 0 < seconds <= 1e6:
            yield BrokenRule(key, "must be a number of seconds above 0 and at most 1000000", alone=True)
    if not config.rollout.has_both:
        why = "a checkpoint needs both engine and trainer, and rollout.load or rollout.only runs one of them; remove one of the two"
        for key in ("every", "resume"):
            if getattr(config.checkpoint, key):
                yield BrokenRule(f"checkpoint.{key}", why)
    if config.checkpoint.resume == "latest" and not config.checkpoint.folder:
        where = "set checkpoint.folder to the folder of the earlier runs, or give one of its folders step-N"
        yield BrokenRule("checkpoint.resume", f"there is no folder to look through; {where}")


def _task(config: Config) -> Iterator[BrokenRule]:
    task, validation = config.task, config.validation
    found = set()
    with suppress(ValueError):  # a single brace
        found = {part[1:] for part in Formatter().parse(task.template) if part[1] is not None}
    if found != {("question", "", None)}:
        yield BrokenRule(
            "task.template",
            "must have the field {question}, and only that one ({{ and }} are literal braces)",
            alone=True,
        )
    if not task.source:
        yield BrokenRule("task.source", "must name at least one source", alone=True)
    if not is_reward(task.reward):
        names = ", ".join((*REWARDS, *HANDED_IN))
        yield BrokenRule(
            "task.reward", f"must be one of {names}, or your own as module:function or FILE.py:function", alone=True
        )
    for key in ("every", "before_train"):
        if getattr(validation, key) and not validation.source:
            yield BrokenRule(f"validation.{key}", "there are no prompts to validate on; set validation.source")
    if validation.source and config.rollout.load:
        yield BrokenRule(
            "validation.source", "rollout.load runs without an engine, so nothing can answer; remove one of the two"
        )


def _batches(config: Config) -> Iterator[BrokenRule]:
    """Every rank must have the same number of sequences, and room for the longest: FSDP's collectives run once for
    each.
    """
    parallel, rollout = config.parallel, config.rollout
    ranks = parallel.dp * parallel.tp * parallel.pp
    sequences = rollout.prompts_per_step * rollout.responses_per_prompt
    if uneven := _uneven(config):
        yield BrokenRule("rollout.prompts_per_step", uneven)
    longest = config.task.max_prompt_tokens + rollout.max_response_tokens
    if 0 < config.actor.tokens_per_microbatch < longest:
        room = f"task.max_prompt_tokens + rollout.max_response_tokens = {longest}"
        yield BrokenRule("actor.tokens_per_microbatch", f"must be 0 (off) or at least {room}")
    if config.actor.minibatch_size % ranks:
        mesh = "parallel.dp x parallel.tp x parallel.pp"
        yield BrokenRule("actor.minibatch_size", f"must be a multiple of the {ranks} ranks ({mesh})")
    elif sequences % config.actor.minibatch_size and not uneven:  # which changes the number of sequences
        step = "rollout.prompts_per_step x rollout.responses_per_prompt"
        yield BrokenRule("actor.minibatch_size", f"must divide the {sequences} sequences of a step ({step})")


def _uneven(config: Config) -> str:
    """Return why the prompts of a step cannot be shared equally by the engines and their ranks; "" if they can."""
    parallel, rollout = config.parallel, config.rollout
    if rollout.prompts_per_step % parallel.dp:
        return f"must be a multiple of parallel.dp = {parallel.dp}"
    ranks = parallel.tp * parallel.pp
    each = rollout.prompts_per_step * rollout.responses_per_prompt // parallel.dp
    if each % ranks:
        what = f"each engine's {each} responses must be a multiple of its {ranks} ranks (parallel.tp x parallel.pp)"
        return f"{what}; change it, or rollout.responses_per_prompt"
    return ""


def _rollout(config: Config) -> Iterator[BrokenRule]:
    rollout = config.rollout
    if rollout.stop_token_ids and rollout.ignore_eos:
        yield BrokenRule(
            "rollout.stop_token_ids", "stop tokens have no effect with rollout.ignore_eos = true; remove one of the two"
        )
    if min(rollout.stop_token_ids, default=0) < 0:
        yield BrokenRule("rollout.stop_token_ids", "must be token ids of 0 or more", alone=True)
    if "" in rollout.stop:
        yield BrokenRule("rollout.stop", "must be strings of at least one character", alone=True)
    if rollout.stop and config.engine.args.get("skip_tokenizer_init"):
        why = "SGLang needs its tokenizer to find stop strings; remove engine.args.skip_tokenizer_init"
        yield BrokenRule("rollout.stop", why)
    if rollout.load and rollout.only:
        yield BrokenRule("rollout.only", "rollout.load runs without an engine; remove one of the two")
    if rollout.load and rollout.save:
        yield BrokenRule("rollout.save", "rollout.load reads responses that are saved already; remove one of the two")
    if rollout.routing != "off" and config.parallel.pp > 1:
        yield BrokenRule(
            "rollout.routing",
            'each pipeline stage of SGLang knows only its own layers\' experts; use "off", or parallel.pp = 1',
        )
    if rollout.routing != "off" and config.engine.args.get("enable_return_routed_experts") is False:
        why = f'rollout.routing = "{rollout.routing}" needs it; remove it'
        yield BrokenRule("engine.args.enable_return_routed_experts", why)
    if rollout.routing == "replay" and rollout.only:
        yield BrokenRule("rollout.routing", 'rollout.only runs without a trainer, which would replay; use "record"')
    if rollout.only and config.model.weights == "random":
        yield BrokenRule("rollout.only", 'model.weights = "random" leaves the engine nothing to load; use "checkpoint"')


def _algorithm(config: Config) -> Iterator[BrokenRule]:
    algorithm = config.algorithm
    if not algorithm.has_critic and config.rollout.responses_per_prompt < 2:
        why = f'for algorithm.advantage = "{algorithm.advantage}", which compares the responses to one prompt'
        yield BrokenRule("rollout.responses_per_prompt", f"must be at least 2 {why}")
    if not algorithm.has_critic and algorithm.critic_warmup:
        why = f'algorithm.advantage = "{algorithm.advantage}" has no critic, so nothing would learn'
        yield BrokenRule("algorithm.critic_warmup", f"{why}; use 0")


def _optimizers(config: Config) -> Iterator[BrokenRule]:
    if not all(0 <= beta < 1 for beta in config.actor.betas):
        yield BrokenRule("actor.betas", "must be at least 0 and below 1", alone=True)
    if config.actor.schedule == "constant" and config.actor.warmup_steps:
        yield BrokenRule("actor.schedule", 'this schedule ignores the warm-up; use "constant_with_warmup"')


def _model(config: Config) -> Iterator[BrokenRule]:
    model = config.model
    if not model.name:
        yield BrokenRule("model.name", f"must be a folder, a hub id, or one of {', '.join(TINY_MODELS)}", alone=True)
    if model.overrides and model.name not in TINY_MODELS:
        only = f'only the tiny models ({", ".join(TINY_MODELS)}) have overrides, and model.name = "{model.name}"'
        yield BrokenRule(f"model.overrides.{next(iter(model.overrides))}", f"{only}; edit its config.json instead")
    if model.dtype != "bfloat16" and model.master_dtype == "bfloat16":
        why = f'model.dtype = "{model.dtype}" would compute with weights that are already rounded'
        yield BrokenRule("model.master_dtype", f'{why}; use "float32"')
    if model.master_dtype == "float16":
        why = "AdamW does not work in float16, where its second moments (squares of gradients) are 0 below 6e-8"
        yield BrokenRule("model.master_dtype", f'{why}; use "float32"')
    if model.attention == "flash_attention_2" and model.dtype == "float32":
        yield BrokenRule(
            "model.attention",
            'flash attention cannot compute in float32; use model.dtype = "bfloat16" or "float16", or "auto"',
        )
    if model.weights == "random" and config.engine.initial_weights == "checkpoint":
        why = 'model.weights = "random" saves no checkpoint'
        yield BrokenRule("engine.initial_weights", f'{why}; use engine.initial_weights = "dummy"')


def _engine(config: Config) -> Iterator[BrokenRule]:
    arguments, parallel, transport = config.engine.args, config.parallel, config.weights.transport
    if arguments.get("preferred_sampling_params"):
        why = "SGLang would change log-probs by penalties that the trainer does not compute"
        yield BrokenRule(
            "engine.args.preferred_sampling_params", f"{why}; set the keys of [rollout] instead", alone=True
        )
    for key, names in DERIVED_ENGINE_ARGUMENTS.items():
        for name in names.split():
            if name in arguments:
                yield BrokenRule(
                    f"engine.args.{name}", f"the harness derives it from {key}; set that instead", alone=True
                )
    fraction, tokens = arguments.get("mem_fraction_static", 0.5), arguments.get("max_total_tokens", 1)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        yield BrokenRule(
            "engine.args.mem_fraction_static", "must be a number above 0 and at most 1, such as 0.4", alone=True
        )
    if type(tokens) is not int or tokens < 1:
        yield BrokenRule("engine.args.max_total_tokens", "must be a whole number of at least 1", alone=True)
    if transport == "distributed" and parallel.pp > 1:
        why = "sglang gives every pipeline stage the same ranks of an update group"
        yield BrokenRule("weights.transport", f"{why}; use parallel.pp = 1 or another transport")


def _updates(config: Config) -> Iterator[BrokenRule]:
    """Refuse engines that no sync can reach: quantized or replicated ones."""
    arguments = config.engine.args
    for name in ("quantization", "torchao_config"):
        if value := arguments.get(name):
            known, instead = SEEN_FAILING.get(str(value), ""), 'or set model.rollout_precision = "fp8_block" instead'
            yield BrokenRule(f"engine.args.{name}", f"{QUANTIZED}{known}; remove it, {instead}", alone=True)
    if arguments.get("dp_size") not in (None, 1) and not arguments.get("enable_dp_attention"):
        why = "SGLang does not update the weights of data-parallel replicas"
        yield BrokenRule("engine.args.dp_size", f"{why}; use parallel.dp, or set engine.args.enable_dp_attention too")
    takes_all = "takes every GPU that the engine sees, and an engine here sees all GPUs of its host; remove it"
    if arguments.get("enable_mscclpp"):
        yield BrokenRule("engine.args.enable_mscclpp", f"mscclpp {takes_all}")
    if arguments.get("moe_a2a_backend") == "flashinfer":
        yield BrokenRule("engine.args.moe_a2a_backend", f'"flashinfer" {takes_all}')


def _memory(config: Config) -> Iterator[BrokenRule]:
    """Refuse to offload a model that the run does not have."""
    algorithm = config.algorithm
    absent = {}
    if not algorithm.has_critic:
        absent["critic"] = f'algorithm.advantage = "{algorithm.advantage}" has no critic'
    if algorithm.kl_placement == "none":
        absent["reference"] = 'algorithm.kl_placement = "none" has no reference'
    for name in ("offload_parameters", "offload_optimizer"):
        for model, reason in absent.items():
            if model in getattr(config.memory, name):
                yield BrokenRule(f"memory.{name}", f"{reason}; remove {model} from the list")


def config_warnings(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that works, but not as its name suggests."""
    if config.model.master_dtype == "bfloat16":
        yield (
            'model.master_dtype = "bfloat16" rounds parameters, gradients and AdamW\'s moments to 8 bits at every step: most'
            " of an update smaller than 2**-8 of a weight is lost, and the second moment never decays."
            ' Use "float32" to learn.'
        )
