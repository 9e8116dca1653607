"""Range and cross-field validation of a config: what the types of its fields do not say."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from harness.config.fault_spec import check_fault
from harness.config.layers import ConfigError, nearest, shown
from harness.config.schema import Config
from harness.runtime.phases import PHASES
from harness.task.architectures import ARCHITECTURES, is_tiny

Rule = tuple[bool, str, str]
"""Whether it is kept, the key, and what to say: "must ...", or why it cannot work and what to use."""

RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "parallel.dp parallel.tp parallel.pp run.steps rollout.prompts_per_step rollout.responses_per_prompt"
        " rollout.max_response_tokens task.max_prompt_tokens weights.bucket_size_mib algorithm.kl_horizon"
        " actor.minibatch_size actor.microbatch_size actor.ppo_epochs"
        " critic.minibatch_size critic.microbatch_size critic.ppo_epochs",
    ),
    (
        "above 0",
        lambda value: value > 0,
        "run.timeout_seconds actor.learning_rate actor.max_grad_norm actor.clip_low actor.clip_high"
        " critic.learning_rate critic.max_grad_norm",
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        "run.seed task.rows actor.weight_decay actor.entropy_coefficient critic.weight_decay critic.value_clip"
        " algorithm.kl_coefficient algorithm.kl_target",
    ),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "algorithm.gamma algorithm.lam"),
    ("below 1", lambda value: value < 1, "actor.clip_low"),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, "rollout.top_p"),
    ("between 1024 and 60000", lambda value: 1024 <= value <= 60000, "engine.base_port"),
)

GREEDY_BELOW = 1e-6
"""Temperature below which SGLang samples greedily and reports log-probs at temperature 1."""

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
"""What the harness derives arguments of sglang.Engine from, and these arguments."""

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
    for rules in (_ranges, _batches, _algorithm, _engine, _updates, _memory, _faults):
        _require(config, rules(config))
    if config.engine.device != "auto":
        check_transport(config, config.engine.device)


def check_transport(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Raise ConfigError where weights cannot travel, on that device, the way the config asks for.

    Apart from `check`, since engine.device = "auto" is known only once a rank runs.
    """
    _require(config, _transport(config, device))


def check_unquantized(fields: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for a model whose config.json says that its checkpoint is quantized. fields: of that file."""
    found = fields.get("quantization_config")
    if isinstance(found, Mapping):
        method = found.get("quant_method", "unknown")
        raise ConfigError(
            f'model.name = "{name}" is quantized ({method}, quantization_config in its config.json): {EXPECTS_QUANTIZED};'
            " give a checkpoint that is not."
        )


def warnings(config: Config) -> list[str]:
    """Return a sentence for each setting that runs and does not do what its name promises."""
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
            f'algorithm.kl_estimator = "{algorithm.estimator}" with kl_placement = "loss" {what}, and does not hold the policy'
            ' near the reference; use "k3" (the default), or "k2", "k1+" or "k3+", whose gradient is that of the KL.'
        )
    return found


def _require(config: Config, rules: Iterator[Rule]) -> None:
    for kept, key, text in rules:
        if not kept:
            value: Any = config
            section, name, *inner = key.split(".", 2)
            value = getattr(getattr(config, section), name)
            value = shown(value[inner[0]] if inner else value)
            raise ConfigError(
                f"{key} {text}, got {value}." if text.startswith("must ") else f"{key} = {value} cannot work: {text}."
            )


def _ranges(config: Config) -> Iterator[Rule]:
    for words, is_in, keys in RANGES:
        for key in keys.split():
            section, name = key.split(".")
            yield is_in(getattr(getattr(config, section), name)), key, f"must be {words}"
    run, rollout = config.run, config.rollout
    yield (
        ":" not in run.dir,
        "run.dir",
        "must have no colon, which SGLang does not take in the name of a model's folder",
    )
    yield (
        run.heartbeat_timeout >= 3,
        "run.heartbeat_timeout",
        "must be at least 3 (hosts send heartbeats once a second)",
    )
    for phase, seconds in run.phase_timeouts.items():
        key = f"run.phase_timeouts.{phase}"
        hint = nearest(phase, PHASES, f"the phases are {', '.join(PHASES)}")
        yield phase in PHASES, key, f"there is no phase {phase}; {hint}"
        yield type(seconds) in (int, float) and seconds > 0, key, "must be a number of seconds above 0"
    greedy = "greedy responses teach nothing"
    yield rollout.temperature >= GREEDY_BELOW, "rollout.temperature", f"must be at least {GREEDY_BELOW:g} ({greedy})"
    yield (
        rollout.top_k == -1 or rollout.top_k >= 2,
        "rollout.top_k",
        f"must be -1 (all tokens) or at least 2 ({greedy}, and SGLang's log-probs then leave the temperature out)",
    )
    yield "{question}" in config.task.template, "task.template", "must contain {question}"
    dual_clip = config.actor.dual_clip
    yield dual_clip == 0 or dual_clip > 1, "actor.dual_clip", "must be 0 (off) or above 1"


def _batches(config: Config) -> Iterator[Rule]:
    """Every rank must have the same number of sequences: FSDP's collectives run once for each."""
    parallel, key = config.parallel, "rollout.prompts_per_step"
    prompts, responses = config.rollout.prompts_per_step, config.rollout.responses_per_prompt
    yield prompts % parallel.dp == 0, key, f"must be a multiple of parallel.dp = {parallel.dp}"
    ranks, each = parallel.tp * parallel.pp, prompts // parallel.dp * responses
    engine = f"each engine's {each} responses must be a multiple of its parallel.tp x parallel.pp = {ranks} ranks"
    yield each % ranks == 0, key, engine
    for section in ("actor", "critic") if config.algorithm.has_critic else ("actor",):
        key, size = f"{section}.minibatch_size", getattr(config, section).minibatch_size
        yield size % (parallel.dp * ranks) == 0, key, f"must be a multiple of the {parallel.dp * ranks} ranks"
        product = "rollout.prompts_per_step x rollout.responses_per_prompt"
        yield (
            prompts * responses % size == 0,
            key,
            f"must divide the step's {prompts * responses} sequences ({product})",
        )


def _algorithm(config: Config) -> Iterator[Rule]:
    algorithm = config.algorithm
    yield (
        algorithm.kl_target == 0 or algorithm.kl_placement == "reward",
        "algorithm.kl_target",
        'only algorithm.kl_placement = "reward" adapts; set it, or algorithm.kl_target = 0',
    )
    yield (
        algorithm.has_critic or config.rollout.responses_per_prompt >= 2,
        "rollout.responses_per_prompt",
        f'must be at least 2 for algorithm.advantage = "{algorithm.advantage}", which compares the responses of one prompt',
    )


def _engine(config: Config) -> Iterator[Rule]:
    arguments, transport = config.engine.args, config.weights.transport
    yield (
        not arguments.get("preferred_sampling_params"),
        "engine.args.preferred_sampling_params",
        "SGLang adds them to each request, and penalties and biases in them change log-probs that the trainer computes"
        " without; set what [rollout] has, and leave it out",
    )
    for key, names in DERIVED_ENGINE_ARGUMENTS.items():
        for name in names.split():
            yield name not in arguments, f"engine.args.{name}", f"the harness derives it from {key}; set that"
    if config.model.overrides and not is_tiny(config.model.name):
        tiny = ", ".join(ARCHITECTURES)
        key = f"model.overrides.{next(iter(config.model.overrides))}"
        yield False, key, f'only the tiny models ({tiny}) have overrides, and model.name = "{config.model.name}"'
    yield (
        config.model.dtype == "bfloat16" or config.model.master_dtype == "float32",
        "model.master_dtype",
        'model.dtype = "float32" would compute with weights that are rounded already; use "float32"',
    )
    yield (
        config.model.weights == "checkpoint" or config.engine.initial_weights == "dummy",
        "engine.initial_weights",
        'model.weights = "random" saves no checkpoint; use engine.initial_weights = "dummy"',
    )
    if config.engine.implementation == "sglang":
        own = "sglang's own VerlEngine"
        instead = 'or engine.implementation = "harness"'
        yield (
            config.parallel.pp == 1,
            "engine.implementation",
            f"{own} has no pipeline parallelism; use parallel.pp = 1 {instead}",
        )
        takes = f'{own} takes named tensors only; use weights.transport = "tensor"'
        yield transport in ("auto", "tensor"), "weights.transport", takes
        yield config.parallel.colocate, "parallel.colocate", f"{own} runs on its trainer's GPU; use true, {instead}"
    yield (
        transport != "distributed" or config.parallel.pp == 1,
        "weights.transport",
        "sglang gives every pipeline stage the same ranks of an update group; use parallel.pp = 1 or another transport",
    )


def _updates(config: Config) -> Iterator[Rule]:
    """Refuse an engine that no sync can reach: quantized, or with a draft model beside the one that is trained."""
    arguments = config.engine.args
    for argument in ("quantization", "torchao_config"):
        method = arguments.get(argument)
        online = method in QUANTIZED_ON_LOAD or argument == "torchao_config"
        reason = QUANTIZES if online else EXPECTS_QUANTIZED
        yield not method, f"engine.args.{argument}", f"{reason}; leave it out"
    draft = str(arguments.get("speculative_algorithm") or "").upper()
    if not draft or draft in WITHOUT_DRAFT_MODEL:
        return
    why = (
        f"engine.args.speculative_algorithm = {draft} runs a draft model, and SGLang then calls a custom weight loader for"
        " the draft and for the target, but a scheduler has one weight stream"
    )
    yield (
        config.weights.transport != "stream",
        "weights.transport",
        f'{why}; use "bucket", "tensor" or "disk"',
    )
    yield config.weights.verify == "off", "weights.verify", f'{why}, so that nothing can be compared; use "off"'


def _memory(config: Config) -> Iterator[Rule]:
    """Offload only what there is."""
    algorithm = config.algorithm
    absent = {}
    if not algorithm.has_critic:
        absent["critic"] = f'algorithm.advantage = "{algorithm.advantage}" has no critic'
    if algorithm.kl_placement == "none":
        absent["reference"] = 'algorithm.kl_placement = "none" has no reference'
    for name in ("offload_parameters", "offload_gradients", "offload_optimizer"):
        for model, reason in absent.items():
            yield model not in getattr(config.memory, name), f"memory.{name}", f"{reason}; leave {model} out"


def _faults(config: Config) -> Iterator[Rule]:
    for text in config.run.inject:
        try:
            check_fault(text, config)
        except ValueError as error:
            raise ConfigError(f'run.inject = "{text}" cannot work: {error}.') from error
    yield from ()


def _transport(config: Config, device: Literal["cpu", "cuda"]) -> Iterator[Rule]:
    transport, colocate = config.weights.transport, config.parallel.colocate
    yield colocate or device == "cuda", "parallel.colocate", "on the CPU there are no GPUs to separate; use true"
    if device == "cpu":
        return
    yield (
        transport != "distributed" or not colocate,
        "weights.transport",
        "NCCL refuses two ranks on one GPU, and an engine rank is on its trainer rank's; use parallel.colocate = false, or"
        " another transport",
    )
    yield (
        transport in ("auto", "distributed", "disk") or colocate,
        "weights.transport",
        "with parallel.colocate = false the engine does not see the trainer's GPU, and opens no handle of its memory; use"
        ' "distributed" or "disk"',
    )
