"""What no type says: values out of range, and combinations that cannot work."""

import difflib
import json
from collections.abc import Mapping
from typing import Any, Literal

from harness.config.faults import check_faults
from harness.config.layers import ConfigError
from harness.config.schema import Config, Run
from harness.runtime.phases import PHASES
from harness.task.architectures import ARCHITECTURES, is_tiny

GREEDY_BELOW = 1e-6
"""Temperature below which SGLang samples greedily and reports log-probs at temperature 1."""

RESERVED_ENGINE_ARGUMENTS = {
    "model_path": "model.name",
    "dtype": "model.dtype",
    "device": "engine.device",
    "tp_size": "parallel.tp",
    "pp_size": "parallel.pp",
    "nnodes": "torchrun's --nnodes",
    "node_rank": "torchrun's --nnodes",
    "dist_init_addr": "engine.base_port",
    "nccl_port": "engine.base_port",
    "port": "engine.base_port",
    "base_gpu_id": "CUDA_VISIBLE_DEVICES",
    "gpu_id_step": "CUDA_VISIBLE_DEVICES",
    "random_seed": "run.seed",
    "load_format": "engine.initial_weights",
}


QUANTIZES = (
    "SGLang quantizes the weights as it loads them and keeps parameters of other shapes, which no later load fits, so that"
    " no weight sync can reach such an engine"
)
EXPECTS_QUANTIZED = "such an engine takes quantized tensors with their scales, and the trainer has neither"
QUANTIZED_ON_LOAD = (
    "fp8", "mxfp8", "w8a8_fp8", "bitsandbytes", "nvfp4_online", "quark_int4fp8_moe", "modelopt", "modelopt_fp8", "modelopt_fp4",
)  # fmt: skip
"""What SGLang does itself to a checkpoint that is not quantized; its other methods expect one that is."""
WITHOUT_DRAFT_MODEL = ("NGRAM", "UNO")
"""Ways of speculative decoding in SGLang that load no second model."""


def check(config: Config) -> None:
    """Raise ConfigError, one sentence, for the first value or combination that cannot work."""
    _check_ranges(config)
    _check_batches(config)
    _check_algorithm(config)
    _check_engine(config)
    _check_updates(config)
    _check_memory(config)
    _check_inject(config)
    if config.engine.device != "auto":
        check_transport(config, config.engine.device)


def warnings(config: Config) -> list[str]:
    """A sentence for each setting that runs and does not do what its name promises."""
    found = []
    if config.model.master_dtype == "bfloat16":
        found.append(
            'model.master_dtype = "bfloat16": parameters, gradients and AdamW\'s moments are rounded to 8 bits at every'
            " step, so that most of an update below about 2**-8 of a weight is lost, and the second moment never decays;"
            ' use "float32" to learn.'
        )
    algorithm = config.algorithm
    if algorithm.kl_placement == "loss" and algorithm.estimator in ("k1", "abs"):
        what = "has an expected gradient of zero" if algorithm.estimator == "k1" else "has not the gradient of the KL"
        found.append(
            f'algorithm.kl_estimator = "{algorithm.estimator}" with kl_placement = "loss" {what}, and holds nothing near the'
            ' reference; use "k3" (the default), or "k2", "k1+" or "k3+", whose gradient is that of the KL.'
        )
    return found


def check_transport(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Raise ConfigError where weights cannot travel, on that device, the way the config asks for.

    Apart from `check`, since engine.device = "auto" is known only once a rank runs.
    """
    transport, colocate = config.weights.transport, config.parallel.colocate
    _require(
        colocate or device == "cuda",
        "parallel.colocate",
        colocate,
        "on the CPU there are no GPUs to separate; use true",
    )
    if device == "cuda":
        _require(
            transport != "distributed" or not colocate,
            "weights.transport",
            transport,
            "NCCL refuses two ranks on one GPU, and an engine rank is on its trainer rank's; use"
            " parallel.colocate = false, or another transport",
        )
        _require(
            transport in ("auto", "distributed", "disk") or colocate,
            "weights.transport",
            transport,
            "with parallel.colocate = false the engine does not see the trainer's GPU, and opens no handle of its"
            ' memory; use "distributed" or "disk"',
        )


def _require(condition: bool, key: str, value: object, remedy: str) -> None:
    if not condition:
        shown = (
            f'"{value}"' if isinstance(value, str) else json.dumps(value) if isinstance(value, list | bool) else value
        )
        raise ConfigError(f"{key} = {shown} cannot work: {remedy}.")


def _check_ranges(config: Config) -> None:
    run, rollout, task, weights = config.run, config.rollout, config.task, config.weights
    for axis in ("dp", "tp", "pp"):
        size = getattr(config.parallel, axis)
        _require(size >= 1, f"parallel.{axis}", size, "it must be at least 1")
    _require(run.steps >= 1, "run.steps", run.steps, "it must be at least 1")
    _require(run.seed >= 0, "run.seed", run.seed, "it must be 0 or more")
    _require(run.timeout_seconds > 0, "run.timeout_seconds", run.timeout_seconds, "it must be above 0")
    _require(
        ":" not in run.dir, "run.dir", run.dir, "SGLang takes no colon in the name of a model's folder; leave it out"
    )
    _check_timeouts(run)
    _require(
        rollout.temperature >= GREEDY_BELOW,
        "rollout.temperature",
        rollout.temperature,
        f"it must be at least {GREEDY_BELOW:g}; below it SGLang is greedy, and greedy responses teach nothing",
    )
    _require(0 < rollout.top_p <= 1, "rollout.top_p", rollout.top_p, "it must be above 0 and at most 1")
    _require(
        rollout.top_k == -1 or rollout.top_k >= 2,
        "rollout.top_k",
        rollout.top_k,
        "it must be -1 (all tokens) or at least 2; 1 is greedy: it teaches nothing, and SGLang's log-probs then leave the"
        " temperature out",
    )
    for name in ("prompts_per_step", "responses_per_prompt", "max_response_tokens"):
        value = getattr(rollout, name)
        _require(value >= 1, f"rollout.{name}", value, "it must be at least 1")
    _require(task.rows >= 0, "task.rows", task.rows, "it must be 0 (all rows) or more")
    _require(task.max_prompt_tokens >= 1, "task.max_prompt_tokens", task.max_prompt_tokens, "it must be at least 1")
    _require("{question}" in task.template, "task.template", task.template, "it must contain {question}")
    _require(weights.bucket_size_mib >= 1, "weights.bucket_size_mib", weights.bucket_size_mib, "it must be at least 1")
    for section in ("actor", "critic"):
        values = getattr(config, section)
        for name in ("minibatch_size", "microbatch_size", "ppo_epochs"):
            value = getattr(values, name)
            _require(value >= 1, f"{section}.{name}", value, "it must be at least 1")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(values, name)
            _require(value > 0, f"{section}.{name}", value, "it must be above 0")
        decay = values.weight_decay
        _require(decay >= 0, f"{section}.weight_decay", decay, "it must be 0 or more")


def _check_timeouts(run: Run) -> None:
    seconds = run.heartbeat_timeout
    _require(seconds >= 3, "run.heartbeat_timeout", seconds, "hosts beat once a second; it must be at least 3")
    for phase, value in run.phase_timeouts.items():
        nearest = difflib.get_close_matches(phase, PHASES, n=1)
        hint = f"the nearest is {nearest[0]}" if nearest else f"the phases are {', '.join(PHASES)}"
        _require(phase in PHASES, f"run.phase_timeouts.{phase}", value, f"there is no such phase; {hint}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(
            is_number and value > 0, f"run.phase_timeouts.{phase}", value, "it must be a number of seconds above 0"
        )


def _check_inject(config: Config) -> None:
    parallel = config.parallel
    try:
        check_faults(
            config.run.inject, parallel.dp * parallel.tp * parallel.pp, config.run.steps, config.weights.transport
        )
    except ValueError as error:
        text, remedy = error.args
        raise ConfigError(f'run.inject = "{text}" cannot work: {remedy}.') from error
    for text in config.run.inject:
        algorithm = config.algorithm
        _require(
            algorithm.has_critic or "@update_critic" not in text,
            "run.inject",
            text,
            f'algorithm.advantage = "{algorithm.advantage}" has no critic',
        )


def _check_batches(config: Config) -> None:
    """Every rank must hold the same number of sequences: FSDP's collectives run once for each."""
    parallel, rollout = config.parallel, config.rollout
    prompts, responses = rollout.prompts_per_step, rollout.responses_per_prompt
    _require(
        prompts % parallel.dp == 0,
        "rollout.prompts_per_step",
        prompts,
        f"it must be a multiple of parallel.dp = {parallel.dp}",
    )
    ranks = parallel.tp * parallel.pp
    _require(
        prompts // parallel.dp * responses % ranks == 0,
        "rollout.prompts_per_step",
        prompts,
        f"each engine's {prompts // parallel.dp * responses} responses must be a multiple of its"
        f" parallel.tp x parallel.pp = {ranks} ranks",
    )
    world_size = parallel.dp * ranks
    sequences = prompts * responses
    trained = [("actor", config.actor)] + ([("critic", config.critic)] if config.algorithm.has_critic else [])
    for section, values in trained:
        size = values.minibatch_size
        key = f"{section}.minibatch_size"
        _require(size % world_size == 0, key, size, f"it must be a multiple of the {world_size} ranks")
        _require(
            sequences % size == 0,
            key,
            size,
            f"it must divide the step's {sequences} sequences"
            " (rollout.prompts_per_step x rollout.responses_per_prompt)",
        )


def _check_algorithm(config: Config) -> None:
    algorithm, actor, critic = config.algorithm, config.actor, config.critic
    _require(0 <= algorithm.gamma <= 1, "algorithm.gamma", algorithm.gamma, "it must be between 0 and 1")
    _require(0 <= algorithm.lam <= 1, "algorithm.lam", algorithm.lam, "it must be between 0 and 1")
    coefficient = algorithm.kl_coefficient
    _require(coefficient >= 0, "algorithm.kl_coefficient", coefficient, "it must be 0 or more")
    _require(algorithm.kl_target >= 0, "algorithm.kl_target", algorithm.kl_target, "it must be 0 (fixed) or more")
    _require(algorithm.kl_horizon >= 1, "algorithm.kl_horizon", algorithm.kl_horizon, "it must be at least 1")
    _require(
        algorithm.kl_target == 0 or algorithm.kl_placement == "reward",
        "algorithm.kl_target",
        algorithm.kl_target,
        'only algorithm.kl_placement = "reward" adapts; set it, or algorithm.kl_target = 0',
    )
    _require(
        algorithm.has_critic or config.rollout.responses_per_prompt >= 2,
        "rollout.responses_per_prompt",
        config.rollout.responses_per_prompt,
        f'algorithm.advantage = "{algorithm.advantage}" compares the responses of one prompt and needs at least 2',
    )
    for name in ("clip_low", "clip_high"):
        value = getattr(actor, name)
        _require(value > 0, f"actor.{name}", value, "it must be above 0")
    _require(actor.clip_low < 1, "actor.clip_low", actor.clip_low, "it must be below 1")
    dual_clip_works = actor.dual_clip == 0 or actor.dual_clip > 1
    _require(dual_clip_works, "actor.dual_clip", actor.dual_clip, "it must be 0 (off) or above 1")
    entropy = actor.entropy_coefficient
    _require(entropy >= 0, "actor.entropy_coefficient", entropy, "it must be 0 or more")
    _require(critic.value_clip >= 0, "critic.value_clip", critic.value_clip, "it must be 0 (off) or more")


def _check_engine(config: Config) -> None:
    preferred = config.engine.args.get("preferred_sampling_params")
    _require(
        not preferred,
        "engine.args.preferred_sampling_params",
        preferred,
        "SGLang adds them to each request, and penalties and biases in them change log-probs that the trainer computes"
        " without; set what [rollout] has, and leave it out",
    )
    for argument, instead in RESERVED_ENGINE_ARGUMENTS.items():
        if argument in config.engine.args:
            raise ConfigError(
                f"engine.args.{argument} = {config.engine.args[argument]!r} cannot be set there:"
                f" the harness derives it from {instead}."
            )
    if config.model.overrides and not is_tiny(config.model.name):
        raise ConfigError(
            f'model.overrides.{next(iter(config.model.overrides))} has no use with model.name = "{config.model.name}":'
            f" only the tiny models ({', '.join(ARCHITECTURES)}) are made on the spot."
        )
    _require(
        config.model.dtype == "bfloat16" or config.model.master_dtype == "float32",
        "model.master_dtype",
        config.model.master_dtype,
        'model.dtype = "float32" would compute with weights that are rounded already; use "float32"',
    )
    _require(
        config.model.weights == "checkpoint" or config.engine.initial_weights == "dummy",
        "engine.initial_weights",
        config.engine.initial_weights,
        'model.weights = "random" saves no checkpoint; use engine.initial_weights = "dummy"',
    )
    _require(
        1024 <= config.engine.base_port <= 60000,
        "engine.base_port",
        config.engine.base_port,
        "it must be between 1024 and 60000",
    )
    _require(
        config.engine.implementation == "harness" or config.parallel.pp == 1,
        "engine.implementation",
        config.engine.implementation,
        'sglang\'s own VerlEngine has no pipeline parallelism; use parallel.pp = 1 or engine.implementation = "harness"',
    )
    _require(
        config.engine.implementation == "harness" or config.weights.transport in ("auto", "tensor"),
        "weights.transport",
        config.weights.transport,
        'sglang\'s own VerlEngine takes named tensors only; use weights.transport = "tensor"',
    )
    _require(
        config.engine.implementation == "harness" or config.parallel.colocate,
        "parallel.colocate",
        config.parallel.colocate,
        "sglang's own VerlEngine runs on its trainer's GPU; use true, or engine.implementation = \"harness\"",
    )
    _require(
        config.weights.transport != "distributed" or config.parallel.pp == 1,
        "weights.transport",
        config.weights.transport,
        "sglang gives every pipeline stage the same ranks of an update group; use parallel.pp = 1 or another transport",
    )


def _check_updates(config: Config) -> None:
    """An engine that no sync can reach: quantized, or with a draft model beside the one that is trained."""
    arguments = config.engine.args
    for argument in ("quantization", "torchao_config"):
        method = arguments.get(argument)
        if method:
            online = method in QUANTIZED_ON_LOAD or argument == "torchao_config"
            reason = QUANTIZES if online else EXPECTS_QUANTIZED
            _require(False, f"engine.args.{argument}", method, f"{reason}; leave it out")
    draft = str(arguments.get("speculative_algorithm") or "").upper()
    if not draft or draft in WITHOUT_DRAFT_MODEL:
        return
    why = (
        f"engine.args.speculative_algorithm = {draft} runs a draft model, and SGLang then calls a custom weight loader for"
        " the draft and for the target, but a scheduler has one weight stream"
    )
    transport, verify = config.weights.transport, config.weights.verify
    _require(transport != "stream", "weights.transport", transport, f'{why}; use "bucket", "tensor" or "disk"')
    _require(verify == "off", "weights.verify", verify, f'{why}, so that nothing can be compared; use "off"')


def check_unquantized(fields: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for a model whose config.json says that its checkpoint is quantized. fields: of that file."""
    found = fields.get("quantization_config")
    if isinstance(found, Mapping):
        method = found.get("quant_method", "unknown")
        raise ConfigError(
            f'model.name = "{name}" is quantized ({method}, quantization_config in its config.json): {EXPECTS_QUANTIZED};'
            " give a checkpoint that is not."
        )


def _check_memory(config: Config) -> None:
    """Offload only what there is."""
    absent = {}
    if not config.algorithm.has_critic:
        absent["critic"] = f'algorithm.advantage = "{config.algorithm.advantage}" has no critic'
    if config.algorithm.kl_placement == "none":
        absent["reference"] = 'algorithm.kl_placement = "none" has no reference'
    for name in ("offload_parameters", "offload_gradients", "offload_optimizer"):
        models = getattr(config.memory, name)
        for model, reason in absent.items():
            _require(model not in models, f"memory.{name}", list(models), f"{reason}; leave {model} out")
