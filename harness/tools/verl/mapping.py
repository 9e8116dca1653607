"""From verl's keys to the harness's, section by section. Facts of verl's code are named by release where they changed."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from harness.config.layers import ConfigError, shown
from harness.config.rules import DERIVED_ENGINE_ARGUMENTS
from harness.config.schema import KlEstimator, LossAggregation
from harness.tools.verl.draft import Draft, full
from harness.tools.verl.overrides import RELEASES

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
KL_ESTIMATORS = {name: name for name in get_args(KlEstimator)}
KL_ESTIMATORS |= {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "inverse-square-root": "inverse_sqrt"}
AGGREGATIONS = get_args(LossAggregation)
TRACKERS = ("tensorboard", "wandb")


def translate_all(draft: Draft, environment: Mapping[str, str] = os.environ) -> None:
    """Set every harness key that has a counterpart in verl. Raise ConfigError for what verl itself refuses."""
    parallel(draft)
    model(draft, environment)
    engine(draft)
    task(draft, environment)
    rollout(draft)
    algorithm(draft)
    batches(draft)
    optimizers(draft)
    memory(draft)
    life(draft, environment)


def since(draft: Draft, release: str) -> bool:
    """Return whether the release is at least this one."""
    return RELEASES.index(draft.verl.release) >= RELEASES.index(release)


def world_size(draft: Draft) -> int:
    """Return the number of GPUs of the job."""
    return number(draft, "trainer.nnodes") * number(draft, "trainer.n_gpus_per_node")


def number(draft: Draft, key: str) -> int:
    """Return a key that must be a whole number. Raise ConfigError."""
    value = draft.get(key)
    if type(value) is not int:
        raise ConfigError(f"{full(key)} must be an integer, got {shown(value)}.")
    return value


def real(draft: Draft, key: str, otherwise: float | None = None) -> float:
    """Return a key that must be a number. Raise ConfigError."""
    value = draft.get(key, otherwise)
    if type(value) not in (int, float):
        raise ConfigError(f"{full(key)} must be a number, got {shown(value)}.")
    return float(value)


def parallel(draft: Draft) -> None:
    """parallel: engines of tp x pp ranks on all GPUs."""
    nodes, gpus = number(draft, "trainer.nnodes"), number(draft, "trainer.n_gpus_per_node")
    key, stages = "@rollout.tensor_model_parallel_size", "@rollout.pipeline_model_parallel_size"
    tp, pp = number(draft, key), draft.get(stages) or 1
    if tp < 1 or nodes * gpus % (tp * pp):
        what = f"{full(key)} x pipeline stages = {tp * pp}"
        raise ConfigError(f"{what} must divide trainer.nnodes x trainer.n_gpus_per_node = {nodes * gpus}.")
    sources = ("trainer.nnodes", "trainer.n_gpus_per_node")
    draft.put("parallel.dp", nodes * gpus // (tp * pp), *sources, note=f"{nodes * gpus} GPUs / (tp x pp)")
    draft.put("parallel.tp", tp, key)
    if pp > 1:
        draft.put("parallel.pp", pp, stages)
        if tp > 1 and tp * pp > gpus:
            draft.put("parallel.rank_order", "dp,pp,tp", note="stages span hosts")


def model(draft: Draft, environment: Mapping[str, str]) -> None:
    """model: where all three models start, their dtypes, packing."""
    path = draft.get("@model.path")
    draft.put("model.name", expanded(str(path), environment), "@model.path")
    draft.put("model.dtype", dtype(draft, "@rollout.dtype", "bfloat16"), "@rollout.dtype")
    master = "@actor.fsdp_config.model_dtype"
    draft.put("model.master_dtype", dtype(draft, master, "float32"), master)
    draft.put("model.packed", bool(draft.get("@model.use_remove_padding")), "@model.use_remove_padding")
    same = "model.packed is one key for all models; padding changes memory and time, not numbers"
    draft.irrelevant(same, "critic.model.use_remove_padding", "@actor.use_remove_padding")
    attention = "@model.override_config.attn_implementation"
    if draft.get(attention) in ("eager", "sdpa"):
        draft.put("model.attention", draft.get(attention), attention)
    elif draft.given(attention):
        draft.irrelevant("another kernel of the same attention; model.attention chooses here", attention)
    if draft.given("critic.model.path") and draft.get("critic.model.path") != path:
        draft.unsupported("a critic that starts from another model; here from the actor's", "critic.model.path")
    draft.irrelevant("the critic starts from model.name", "critic.model.path")


def dtype(draft: Draft, key: str, otherwise: str) -> str:
    """Return a dtype of verl's as the harness names it."""
    value = draft.get(key, otherwise)
    if value not in DTYPES:
        draft.unsupported(f"a dtype that the trainer does not compute in; taken: {otherwise}", key)
    return DTYPES.get(value, otherwise)


def engine(draft: Draft) -> None:
    """engine, weights: SGLang's arguments, how it starts and takes weights."""
    name = draft.get("@rollout.name")
    if name == "sglang":
        draft.put("engine.implementation", "harness", "@rollout.name", note="SGLang behind an SPMD wrapper")
    else:
        other = f"the engine is SGLang here: not the log-probs, memory and failures of {name}"
        draft.unsupported(other, "@rollout.name")
    draft.put("engine.defaults", "sglang", note="verl leaves the rest to SGLang")
    share = "@rollout.gpu_memory_utilization"
    draft.put("engine.args.mem_fraction_static", draft.get(share), share)
    if since(draft, "0.6"):
        draft.put("engine.args.disable_cuda_graph", bool(draft.get("@rollout.enforce_eager")), "@rollout.enforce_eager")
        if draft.get("@rollout.max_num_seqs") is not None:
            draft.put("engine.args.max_running_requests", draft.get("@rollout.max_num_seqs"), "@rollout.max_num_seqs")
    else:
        draft.irrelevant(
            "before 0.6, verl does not hand it to SGLang", "@rollout.enforce_eager", "@rollout.max_num_seqs"
        )
    experts, tp = draft.get("@rollout.expert_parallel_size") or 1, draft.entries["parallel.tp"].value
    if (own := math.gcd(experts, tp)) != experts:
        among = f"experts over {experts} ranks; here over {own} of the {tp} of one engine"
        draft.unsupported(among, "@rollout.expert_parallel_size")
    if own > 1:
        draft.put("engine.args.ep_size", own, "@rollout.expert_parallel_size")
    derived = {name: key for key, names in DERIVED_ENGINE_ARGUMENTS.items() for name in names.split()}
    prefix = "actor_rollout_ref.rollout.engine_kwargs.sglang."
    for argument, value in draft.verl.after(prefix).items():
        if argument in derived:
            draft.unsupported(f"the harness derives {argument} from {derived[argument]}", prefix + argument)
        elif value is None:
            draft.irrelevant("null: SGLang's own default", prefix + argument)
        else:
            draft.put(f"engine.args.{argument}", value, prefix + argument)
    dummy = str(draft.get("@rollout.load_format")).startswith("dummy")
    draft.put("engine.initial_weights", "dummy" if dummy else "checkpoint", "@rollout.load_format")
    sizes = ("@rollout.checkpoint_engine.update_weights_bucket_megabytes", "@rollout.update_weights_bucket_megabytes")
    for key in sizes:
        if draft.get(key) is not None:
            draft.put("weights.bucket_size_mib", draft.get(key), key)
            break


def task(draft: Draft, environment: Mapping[str, str]) -> None:
    """task, validation: prompts and the reward."""
    draft.put("task.source", files(draft, "data.train_files", environment), "data.train_files")
    if (rows := draft.get("data.train_max_samples", -1)) > 0:
        draft.put("task.rows", rows, "data.train_max_samples", note="the first")
    draft.put("task.max_prompt_tokens", draft.get("data.max_prompt_length"), "data.max_prompt_length")
    long_prompts(draft)
    switches = ("reward_model.enable", "reward.reward_model.enable")
    if not any(map(draft.get, switches)):
        own = re.compile(r"(reward\.)?reward_model\.(?!enable$|reward_manager$|reward_kwargs|sandbox_fusion)")
        draft.irrelevant("there is no reward model: its enable is not true", *filter(own.match, draft.verl.given))
    long_responses = re.compile(r"reward(_model)?\.(reward_kwargs\.(overlong_\w+|max_resp_len)|overlong_buffer)\b")
    penalty = list(filter(long_responses.match, draft.verl.given))
    if not any(draft.get(key) for key in penalty if key.endswith(".enable")):
        managers = (
            key for key in ("reward_model.reward_manager", "reward.reward_manager.name") if draft.get(key) == "dapo"
        )
        draft.irrelevant("no penalty for long responses: its enable is not true", *penalty, *managers)
    paths = ("custom_reward_function.path", "reward.custom_reward_function.path")
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    path = next((draft.get(key) for key in paths if draft.get(key)), None)
    if path:
        name = next((draft.get(key) for key in names if draft.get(key)), "compute_score")
        draft.put("task.reward", f"{expanded(path, environment)}:{name}", *paths, *names)
    else:
        draft.irrelevant("no path: verl's own rewards", *paths, *names)
        draft.put("task.reward", "data_source", note="verl's own: the row's data_source picks")
    validation(draft, environment)


def validation(draft: Draft, environment: Mapping[str, str]) -> None:
    """Map validation. verl's last is after the last step, where test_freq is above 0, and in 0.2 in any case."""
    every, before = max(0, number(draft, "trainer.test_freq")), bool(draft.get("trainer.val_before_train", True))
    if not (every or before) and since(draft, "0.3"):
        none = "nothing is validated: trainer.test_freq and trainer.val_before_train say so"
        own = re.compile(r"data\.val_(files|max_samples)|trainer\.(test_freq|val_before_train)|.*\.val_kwargs\..*")
        draft.irrelevant(none, *filter(own.fullmatch, draft.verl.given))
        return
    draft.put("validation.source", files(draft, "data.val_files", environment), "data.val_files")
    if (rows := draft.get("data.val_max_samples", -1)) > 0:
        draft.put("validation.rows", rows, "data.val_max_samples", note="the first")
    note = "" if every or not since(draft, "0.3") else "none between; here also after the last step"
    draft.put("validation.every", every, "trainer.test_freq", note=note)
    draft.put("validation.before_train", before, "trainer.val_before_train")
    sampled = bool(draft.get("@rollout.val_kwargs.do_sample", False))
    temperature = float(draft.get("@rollout.val_kwargs.temperature", 0.0) or 0.0) if sampled else 0.0
    sources = ("@rollout.val_kwargs.temperature", "@rollout.val_kwargs.do_sample")
    draft.put("validation.temperature", temperature, *sources)
    if not sampled:
        draft.irrelevant("greedy: do_sample is false", "@rollout.val_kwargs.top_p", "@rollout.val_kwargs.top_k")


def long_prompts(draft: Draft) -> None:
    """task.long_prompts: what becomes of a prompt that is too long."""
    filtered = draft.get("data.filter_overlong_prompts", True)  # 0.2 has no such key, and filters
    sources = ("data.filter_overlong_prompts", "data.truncation")
    draft.put("task.long_prompts", "filter" if filtered else "error", *sources)
    if not filtered and draft.get("data.truncation", "error") != "error":
        draft.unsupported("prompts that are too long are cut; here they are an error", "data.truncation")


def files(draft: Draft, key: str, environment: Mapping[str, str]) -> list[str]:
    """Return the paths of a key that has one or a list, ~ expanded."""
    value = draft.get(key)
    paths = value if isinstance(value, list) else [value]
    if any(str(path).startswith("hdfs:") for path in paths):
        draft.unsupported("files on HDFS, which is not read here; give a local copy", key)
    return list(dict.fromkeys(expanded(str(path), environment) for path in paths))


def expanded(path: str, environment: Mapping[str, str]) -> str:
    """Return a path with the home folder in place of a leading ~."""
    home = environment.get("HOME", "")
    return str(Path(home, path[2:])) if path.startswith("~/") and home else path


def rollout(draft: Draft) -> None:
    """rollout: how many prompts and responses, and how they are sampled."""
    draft.put("rollout.prompts_per_step", number(draft, "data.train_batch_size"), "data.train_batch_size")
    draft.put("rollout.responses_per_prompt", number(draft, "@rollout.n"), "@rollout.n")
    longest = draft.get("@rollout.response_length") if draft.given("@rollout.response_length") else None
    length = longest or draft.get("data.max_response_length")
    draft.put("rollout.max_response_tokens", length, "data.max_response_length", "@rollout.response_length")
    draft.irrelevant("task.max_prompt_tokens, from data.max_prompt_length", "@rollout.prompt_length")
    for name in ("temperature", "top_p"):
        draft.put(f"rollout.{name}", real(draft, f"@rollout.{name}"), f"@rollout.{name}")
    draft.put("rollout.top_k", draft.get("@rollout.top_k") or -1, "@rollout.top_k")
    for name in ("stop", "stop_token_ids"):  # in no config of verl's; 0.3 to 0.6 hand it to SGLang
        if (value := draft.get(f"@rollout.{name}")) is not None:
            draft.put(f"rollout.{name}", value if isinstance(value, list) else [value], f"@rollout.{name}")
    draft.put("rollout.ignore_eos", bool(draft.get("@rollout.ignore_eos", False)), "@rollout.ignore_eos")
    staged = since(draft, "0.6") or bool(draft.get("@rollout.multi_stage_wake_up", False))
    note = "" if draft.given("@rollout.multi_stage_wake_up") else "weights, then KV cache" if staged else "both at once"
    draft.put("memory.resume", "staged" if staged else "all", "@rollout.multi_stage_wake_up", note=note)


def algorithm(draft: Draft) -> None:
    """algorithm: advantages, KL, importance sampling, the critic's head start."""
    estimator = draft.get("algorithm.adv_estimator")
    if estimator not in ESTIMATORS:
        draft.unsupported(
            f"advantages by {estimator}; there are gae, grpo and rloo; taken: grpo", "algorithm.adv_estimator"
        )
    draft.put("algorithm.advantage", ESTIMATORS.get(estimator, "grpo"), "algorithm.adv_estimator")
    for name in ("gamma", "lam"):
        draft.put(f"algorithm.{name}", real(draft, f"algorithm.{name}"), f"algorithm.{name}")
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    draft.put("algorithm.normalize_by_std", bool(draft.get(by_std, True)), by_std)
    kl(draft)
    first = number(draft, "trainer.critic_warmup")
    alone = max(0, first - 1)
    if alone and not has_critic(draft):
        nothing = f"verl updates the actor from step {first} on, and {estimator} has no critic to update before"
        draft.unsupported(nothing, "trainer.critic_warmup")
    else:
        note = f"verl updates the actor from step {first} on" if alone else ""
        draft.put("algorithm.critic_warmup", alone, "trainer.critic_warmup", note=note)
    importance_sampling(draft)


def has_critic(draft: Draft) -> bool:
    """Return whether the harness trains a critic."""
    return bool(draft.get("algorithm.adv_estimator") == "gae")


def kl(draft: Draft) -> None:
    """algorithm.kl_*: in the reward, in the loss, or nowhere. 0.2 and 0.3 have it in the reward unless it is in the loss."""
    in_loss = bool(draft.get("@actor.use_kl_loss"))
    in_reward = bool(draft.get("algorithm.use_kl_in_reward", not in_loss))
    placed = ("@actor.use_kl_loss", "algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        draft.unsupported("the KL in the reward beside the KL in the loss; here in one of them: the loss", placed[1])
    placement = "loss" if in_loss else "reward" if in_reward else "none"
    draft.put("algorithm.kl_placement", placement, *placed)
    of_loss = ("@actor.kl_loss_type", "@actor.kl_loss_coef")
    of_reward = ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef")
    control = tuple(f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon"))
    for place, keys in (("loss", of_loss), ("reward", (*of_reward, *control))):
        if place != placement:
            draft.irrelevant(f"no KL in the {place}: {' and '.join(map(full, placed))} say so", *keys)
    if placement == "none":
        return
    kind, coefficient = of_loss if placement == "loss" else of_reward
    if draft.get(kind) not in KL_ESTIMATORS:
        draft.unsupported(f"the KL by {draft.get(kind)}; taken: auto", kind)
    draft.put("algorithm.kl_estimator", KL_ESTIMATORS.get(draft.get(kind), "auto"), kind)
    draft.put("algorithm.kl_coefficient", real(draft, coefficient), coefficient)
    if placement == "reward" and draft.get(control[0]) == "adaptive":
        draft.put("algorithm.kl_target", real(draft, control[1], 0.1), *control[:2])
        draft.put("algorithm.kl_horizon", draft.get(control[2], 10000), control[2])
    elif placement == "reward":
        draft.put("algorithm.kl_target", 0.0, control[0])
        draft.irrelevant("the coefficient is fixed: algorithm.kl_ctrl.type", *control[1:])


def importance_sampling(draft: Draft) -> None:
    """algorithm.importance_cap: tis_imp_ratio_cap (0.5), rollout_is_threshold (0.6 and newer)."""
    level, cap = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"
    older = ("@actor.tis_imp_ratio_cap", "algorithm.rollout_is", "algorithm.rollout_is_threshold")
    if draft.get(level) == "token" and not isinstance(draft.get(cap), int | float):
        draft.unsupported("weights bounded on both sides; here from above", level, cap)
    elif draft.get(level) == "token":
        draft.put("algorithm.importance_cap", real(draft, cap), level, cap)
        return
    elif draft.get(level):
        draft.unsupported("weights of whole sequences between engine and trainer; here of tokens", level)
    draft.irrelevant(f"{level} is off", cap)
    value = draft.get(older[0]) or (draft.get(older[2]) if draft.get(older[1]) in (True, "token") else None)
    if value and float(value) > 0:
        draft.put("algorithm.importance_cap", float(value), *older)
    elif any(map(draft.given, older)):
        draft.put("algorithm.importance_cap", 0.0, *older)


def batches(draft: Draft) -> None:
    """Minibatches and microbatches. verl counts prompts in a minibatch; before 0.4 the critic's counts sequences."""
    responses, ranks = number(draft, "@rollout.n"), world_size(draft)
    for section, prefix in sections(draft):
        key, own = f"{prefix}.ppo_mini_batch_size", responses
        if section == "critic" and not since(draft, "0.4"):
            own = 1
        size = number(draft, key) * own
        draft.put(f"{section}.minibatch_size", size, key, note=f"x {own} responses" if own > 1 else "")
        dynamic, budget = f"{prefix}.use_dynamic_bsz", f"{prefix}.ppo_max_token_len_per_gpu"
        per_rank, over_ranks = f"{prefix}.ppo_micro_batch_size_per_gpu", f"{prefix}.ppo_micro_batch_size"
        if draft.get(dynamic):
            tokens, note = token_budget(draft, prefix, draft.get(budget) or 16384)
            draft.put(f"{section}.tokens_per_microbatch", tokens, dynamic, budget, note=note)
            draft.irrelevant(f"{full(dynamic)} is true", per_rank, over_ranks)
            continue
        draft.put(f"{section}.tokens_per_microbatch", 0, dynamic)
        draft.irrelevant(f"{full(dynamic)} is false", budget)
        if draft.get(over_ranks) is not None:
            micro = max(1, number(draft, over_ranks) // ranks)
            draft.put(f"{section}.microbatch_size", micro, over_ranks, note=f"over {ranks} GPUs")
        elif draft.get(per_rank) is not None:
            draft.put(f"{section}.microbatch_size", number(draft, per_rank), per_rank)
        else:
            draft.put(f"{section}.microbatch_size", 1, note=f"verl refuses to start without {full(per_rank)}; taken: 1")
            draft.unsupported("verl refuses to start without it; taken: 1", per_rank)


def token_budget(draft: Draft, prefix: str, budget: int) -> tuple[int, str]:
    """Return the tokens of one rank's microbatch, and a note. verl's ranks may share a sequence; here each takes it whole."""
    ulysses = "ulysses_sequence_parallel_size"
    names = (ulysses, f"fsdp_config.{ulysses}", "megatron.context_parallel_size", "veomni.ulysses_parallel_size")
    ranks = max(draft.get(f"{prefix}.{name}") or 1 for name in names)
    longest = number(draft, "data.max_prompt_length") + draft.entries["rollout.max_response_tokens"].value
    if budget < longest <= budget * ranks:
        return longest, f"one sequence, which verl splits over {ranks} ranks"
    return budget, ""


def sections(draft: Draft) -> list[tuple[str, str]]:
    """Return the harness's sections of models that learn, and verl's."""
    return [("actor", "@actor"), *([("critic", "critic")] if has_critic(draft) else [])]


def optimizers(draft: Draft) -> None:
    """actor, critic: losses and optimizers."""
    if not has_critic(draft):
        estimator = draft.get("algorithm.adv_estimator")
        draft.irrelevant(f"{estimator} has no critic", *(key for key in draft.verl.given if key.startswith("critic.")))
    for section, prefix in sections(draft):
        optimizer(draft, section, prefix)
        draft.put(f"{section}.ppo_epochs", number(draft, f"{prefix}.ppo_epochs"), f"{prefix}.ppo_epochs")
        aggregation(draft, section, prefix)
        recompute = ("@" if section == "actor" else "critic.") + "model.enable_gradient_checkpointing"
        draft.put(f"{section}.gradient_checkpointing", bool(draft.get(recompute)), recompute)
    # clip_ratio counts only where the two others are null, which they are before 0.4 alone.
    for name in ("low", "high"):
        key = f"@actor.clip_ratio_{name}"
        own = draft.get(key)
        sources = (key,) if own is not None else ("@actor.clip_ratio",)
        draft.put(f"actor.clip_{name}", own if own is not None else draft.get("@actor.clip_ratio"), *sources)
    if full("@actor.clip_ratio") not in draft.mapped:
        draft.irrelevant(
            "verl reads clip_ratio_low and clip_ratio_high, which have defaults of their own", "@actor.clip_ratio"
        )
    draft.put("actor.dual_clip", real(draft, "@actor.clip_ratio_c", 0.0), "@actor.clip_ratio_c")
    draft.put("actor.entropy_coefficient", real(draft, "@actor.entropy_coeff"), "@actor.entropy_coeff")
    if has_critic(draft):
        draft.put("critic.value_clip", real(draft, "critic.cliprange_value"), "critic.cliprange_value")


def aggregation(draft: Draft, section: str, prefix: str) -> None:
    """loss_aggregation: of 0.3 and older, the mean over tokens."""
    key = f"{prefix}.loss_agg_mode"
    value = draft.get(key, "token-mean")
    if value not in AGGREGATIONS:
        draft.unsupported("another mean of the token losses; taken: token-mean", key)
    draft.put(f"{section}.loss_aggregation", value if value in AGGREGATIONS else "token-mean", key)


def optimizer(draft: Draft, section: str, prefix: str) -> None:
    """AdamW, its schedule, gradient clipping. verl's schedules move once a PPO step, the harness's once an optimizer step."""
    optim = f"{prefix}.optim"
    draft.put(f"{section}.learning_rate", real(draft, f"{optim}.lr"), f"{optim}.lr")
    draft.put(f"{section}.weight_decay", real(draft, f"{optim}.weight_decay", 0.01), f"{optim}.weight_decay")
    betas = draft.get(f"{optim}.betas") or [0.9, 0.999]
    draft.put(f"{section}.betas", [float(beta) for beta in betas], f"{optim}.betas")
    megatron = draft.verl.trainer == "megatron"
    clip = f"{optim}.clip_grad" if megatron else f"{prefix}.grad_clip"
    draft.put(f"{section}.max_grad_norm", real(draft, clip, 1.0), clip)
    draft.irrelevant(f"verl reads {full(clip)}", f"{prefix}.grad_clip" if megatron else f"{optim}.clip_grad")
    styles = (f"{optim}.warmup_style", f"{optim}.lr_decay_style" if megatron else f"{optim}.lr_scheduler_type")
    style = next((draft.get(key) for key in styles if draft.get(key)), "constant")
    if style not in SCHEDULES:
        draft.unsupported(f"the schedule {style}; taken: constant", *styles)
    schedule, is_warm = SCHEDULES.get(style, "constant"), warmup(draft, section, prefix)
    if schedule == "constant":
        schedule = "constant_with_warmup" if is_warm else schedule
        flat = ("min_lr", "min_lr_ratio", "num_cycles")
        draft.irrelevant("the schedule is constant, without decay", *(f"{optim}.{name}" for name in flat))
    draft.put(f"{section}.schedule", schedule, *styles)


def warmup(draft: Draft, section: str, prefix: str) -> bool:
    """Set the warm-up, and return whether there is any. verl counts PPO steps, of which each has one learning rate."""
    steps_key, ratio_key = f"{prefix}.optim.lr_warmup_steps", f"{prefix}.optim.lr_warmup_steps_ratio"
    steps, ratio = draft.get(steps_key), float(draft.get(ratio_key) or 0.0)
    steps = -1 if steps is None else steps
    if steps > 0 or (steps == 0 and not since(draft, "0.8") and draft.verl.trainer == "fsdp"):
        draft.irrelevant("lr_warmup_steps comes first", ratio_key)
        source = steps_key
    else:
        draft.irrelevant("not above 0: lr_warmup_steps_ratio counts", steps_key)
        total, source = draft.get("trainer.total_training_steps"), ratio_key
        if total is None:
            draft.put(f"{section}.warmup_ratio", ratio, ratio_key)
            return ratio > 0
        steps = int(ratio * total)
    sequences = number(draft, "data.train_batch_size") * number(draft, "@rollout.n")
    each = sequences // draft.entries[f"{section}.minibatch_size"].value * number(draft, f"{prefix}.ppo_epochs")
    note = f"{steps} PPO steps x {each} optimizer steps" if steps else ""
    draft.put(f"{section}.warmup_steps", steps * each, source, note=note)
    return steps > 0


def memory(draft: Draft) -> None:
    """memory: what waits in host memory, of FSDP's and of Megatron's tables, under their names in all releases."""
    tables = {
        "actor": ("@actor.fsdp_config", "@actor.megatron"),
        "critic": ("critic.model.fsdp_config", "critic.fsdp", "critic.megatron"),
        "reference": ("@ref.fsdp_config", "@ref.megatron"),
    }
    if not has_critic(draft):
        del tables["critic"]
    if draft.entries["algorithm.kl_placement"].value == "none":
        draft.irrelevant("no KL, so no reference", *(key for key in draft.verl.given if key.startswith(full("@ref."))))
        del tables["reference"]
    for name, own in {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}.items():
        models, sources = [], []
        for part, prefixes in tables.items():
            if part == "reference" and name != "parameters":
                continue
            keys = [f"{prefix}.{each}" for prefix in prefixes for each in (f"{own}_offload", "offload_policy")]
            sources += keys
            if any(draft.get(key) for key in keys):
                models.append(part)
        draft.put(f"memory.offload_{name}", models, *sources)


def life(draft: Draft, environment: Mapping[str, str]) -> None:
    """run, checkpoint, trackers: how long, and what is kept."""
    steps = draft.get("trainer.total_training_steps")
    if steps is not None:
        draft.put("run.steps", steps, "trainer.total_training_steps")
        both = "trainer.total_training_steps counts; verl would also end with the last epoch"
        draft.irrelevant(both, "trainer.total_epochs")
    else:
        draft.put("run.epochs", number(draft, "trainer.total_epochs"), "trainer.total_epochs")
        draft.irrelevant("null: trainer.total_epochs counts", "trainer.total_training_steps")
    every = max(0, number(draft, "trainer.save_freq"))
    draft.put("checkpoint.every", every, "trainer.save_freq")
    only_last = "trainer.remove_previous_ckpt_in_save"
    keep = 1 if draft.get(only_last) else draft.get("trainer.max_actor_ckpt_to_keep") or 0
    draft.put("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep", only_last)
    critics = "trainer.max_critic_ckpt_to_keep"
    if draft.get(critics) == draft.get("trainer.max_actor_ckpt_to_keep"):
        draft.irrelevant("actor and critic are in one checkpoint", critics)
    folder, mode = "trainer.default_local_dir", "trainer.resume_mode"
    if draft.given(folder) or every:
        draft.put("checkpoint.folder", expanded(str(draft.get(folder) or "."), environment), folder)
    if draft.get(mode) in ("auto", "disable"):
        draft.irrelevant(f"{mode} is {draft.get(mode)}", "trainer.resume_from_path")
    if draft.get(mode) not in ("auto", "disable"):
        draft.unsupported("a checkpoint of verl, which this trainer cannot read; here from the model", mode)
    elif draft.given(folder) or every:
        draft.put("checkpoint.resume", "latest" if draft.get(mode) == "auto" else "", mode)
    else:
        draft.irrelevant("nothing is saved, so there is nothing to resume", mode)
    loggers = draft.get("trainer.logger")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    draft.put("trackers.names", [name for name in TRACKERS if name in loggers], "trainer.logger")
    others = [name for name in loggers if name not in (*TRACKERS, "console", "file")]
    if others:
        draft.unsupported(
            f"metrics sent to {', '.join(map(str, others))}; here to {' and '.join(TRACKERS)}", "trainer.logger"
        )
    draft.put("trackers.project", str(draft.get("trainer.project_name")), "trainer.project_name")
    draft.put("trackers.experiment", str(draft.get("trainer.experiment_name")), "trainer.experiment_name")
