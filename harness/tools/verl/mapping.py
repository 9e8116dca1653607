"""From verl's keys to the harness's, for all that takes a computation or a choice; counterparts.toml has the rest.

Each function sets the keys of one section. Facts about verl's code name the release in which they changed.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError, shown
from harness.config.rules import DERIVED_ENGINE_ARGUMENTS
from harness.config.schema import DUAL_CLIP
from harness.tools.verl.draft import Draft, counterparts, full, of_type

MASTER_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
DTYPES = MASTER_DTYPES | {"float16": "float16", "fp16": "float16", "half": "float16"}
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
KL_IN_REWARD, KL_IN_LOSS = ("kl", "k1"), ("low_var_kl", "k3")
"""verl's names of the estimators that there are here."""
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "inverse-square-root": "inverse_sqrt"}
TRACKERS = ("tensorboard", "wandb")


def translate_all(draft: Draft, environment: Mapping[str, str] = os.environ) -> None:
    """Set every harness key that has a counterpart in verl. Raise ConfigError for what verl itself refuses."""
    same(draft)
    parallel(draft)
    model(draft, environment)
    engine(draft)
    task(draft, environment)
    validation(draft, environment)
    rollout(draft)
    algorithm(draft)
    kl(draft)
    importance_weights(draft)
    updates(draft, "@.actor")
    microbatches(draft)
    critic_as_actor(draft)
    losses(draft)
    memory(draft)
    length_of_run(draft)
    checkpoints(draft, environment)
    trackers(draft)


def same(draft: Draft) -> None:
    """Copy the keys whose values mean the same in verl and here."""
    for key, source in counterparts()["same"].items():
        draft.put(key, draft.get(source), source)
    if has_critic(draft):
        for key, source in counterparts()["same_for_critic"].items():
            draft.put(key, draft.get(source), source)
    else:
        draft.ignore(f"{draft.get('algorithm.adv_estimator')} has no critic", "critic.*")
    if has_critic(draft) and draft.get("critic.cliprange_value") == 0:
        draft.lose("values clamped to the old ones; here 0 turns the clipping off", "critic.cliprange_value")
    wanted = draft.get("critic.enable")
    if wanted is not None and bool(wanted) != has_critic(draft):
        draft.lose("a critic for another estimator than GAE, or GAE without a critic", "critic.enable")


def has_critic(draft: Draft) -> bool:
    """Return whether the harness trains a critic."""
    return bool(draft.get("algorithm.adv_estimator") == "gae")


def choose(draft: Draft, key: str, source: str, choices: Mapping[Any, str], otherwise: str) -> None:
    """Set a harness key to the choice that verl's value names; report a value that has no counterpart."""
    value = str(draft.get(source, otherwise))
    if value not in choices:
        draft.lose(f"{value}, which is not available here; {otherwise} is used", source)
    draft.put(key, choices.get(value, otherwise), source)


def only(draft: Draft, key: str, values: Collection[object], otherwise: str) -> None:
    """Say that an override asks for what there is here, one of `values`, or for what is missing."""
    if draft.given(key) and draft.get(key) not in values:
        draft.lose(otherwise, key)
    else:
        draft.ignore("the only choice here", key)


def parallel(draft: Draft) -> None:
    """Set [parallel]: engines of tp x pp ranks on all GPUs."""
    nodes, gpus = draft.integer("trainer.nnodes", least=1), draft.integer("trainer.n_gpus_per_node", least=1)
    key, stages = "@.rollout.tensor_model_parallel_size", "@.rollout.pipeline_model_parallel_size"
    tp, pp = draft.integer(key, least=1), draft.integer_or(1, stages, least=1)
    if nodes * gpus % (tp * pp):
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
    """Set [model]: where all three models start, and their dtypes."""
    path = draft.get("@.model.path")
    draft.put("model.name", with_home(str(path), environment), "@.model.path")
    choose(draft, "model.dtype", "@.rollout.dtype", DTYPES, "bfloat16")
    choose(draft, "model.master_dtype", "@.actor.fsdp_config.model_dtype", MASTER_DTYPES, "float32")
    trainer_dtypes(draft)
    if draft.get("@.rollout.quantization") == "fp8":  # in DeepSeek's blocks, which verl quantizes at each sync too
        draft.put("model.rollout_precision", "fp8_block", "@.rollout.quantization")
    attention = "@.model.override_config.attn_implementation"
    if draft.get(attention) in ("eager", "sdpa"):
        draft.put("model.attention", draft.get(attention), attention)
    if draft.given("critic.model.path") and draft.get("critic.model.path") != path:
        draft.lose("a critic that starts from another model; here from the actor's", "critic.model.path")
    draft.ignore("the critic starts from model.name", "critic.model.path")


def trainer_dtypes(draft: Draft) -> None:
    """Report a trainer that computes in another dtype than the engine: here both compute in model.dtype."""
    tables = (
        "@.actor.fsdp_config",
        "@.ref.fsdp_config",
        "critic.model.fsdp_config",
        "critic.fsdp",
        "critic.fsdp_config",
    )
    keys = [f"{table}.{name}" for table in tables for name in ("dtype", "mixed_precision.param_dtype")]
    keys += [f"{table}.dtype" for table in ("@.actor.megatron", "@.ref.megatron", "critic.megatron")]
    for key in filter(draft.given, keys):
        value = str(draft.get(key))
        if DTYPES.get(value) == draft.entries["model.dtype"].value:
            draft.ignore("the trainer computes in model.dtype", key)
        else:
            draft.lose(f"a trainer that computes in {value}; here in model.dtype, as the engine does", key)


def engine(draft: Draft) -> None:
    """Set [engine] and [weights]: SGLang's arguments, how it starts and takes weights."""
    name = draft.get("@.rollout.name")
    if name == "sglang":
        draft.ignore("the engine is always SGLang here", "@.rollout.name")
    else:
        draft.lose(f"the engine here is SGLang: log-probs, memory and failures of {name} differ", "@.rollout.name")
    draft.put("engine.preset", "sglang", note="verl leaves the rest to SGLang")
    eager, most = "@.rollout.enforce_eager", "@.rollout.max_num_seqs"
    if not draft.since("0.6"):
        draft.ignore("verl hands it to SGLang since 0.6", eager, most)
    else:
        draft.put("engine.args.disable_cuda_graph", bool(draft.get(eager)), eager)
        if draft.get(most) is not None:
            draft.put("engine.args.max_running_requests", draft.get(most), most)
    expert_parallel(draft)
    fp8 = "model.rollout_precision" in draft.entries  # dummy weights would make scales of its KV cache random
    dummy = str(draft.get("@.rollout.load_format")).startswith("dummy") and not fp8
    draft.put(
        "engine.initial_weights",
        "dummy" if dummy else "checkpoint",
        "@.rollout.load_format",
        note="block-FP8 starts from the checkpoint" if fp8 else "",
    )
    sizes = ("@.rollout.checkpoint_engine.update_weights_bucket_megabytes", "@.rollout.update_weights_bucket_megabytes")
    for key in sizes:
        if draft.get(key) is not None:
            draft.put("weights.bucket_size_mib", draft.get(key), key)
            break
    derived = {name: key for key, names in DERIVED_ENGINE_ARGUMENTS.items() for name in names.split()}
    prefix = full("@.rollout.engine_kwargs.sglang.")
    for argument, value in draft.verl.after(prefix).items():
        if argument in derived:
            draft.lose(f"the harness sets {argument} from {derived[argument]}", prefix + argument)
        elif "." in argument:
            draft.lose("a table; SGLang takes it as a text in JSON", prefix + argument)
        elif value is None:
            draft.ignore("null: SGLang's own default", prefix + argument)
        else:
            draft.put(f"engine.args.{argument}", value, prefix + argument)


def expert_parallel(draft: Draft) -> None:
    """Set engine.args.ep_size, which must divide tp here; verl may spread experts over several engines."""
    key = "@.rollout.expert_parallel_size"
    experts, tp = draft.integer_or(1, key, least=1), draft.entries["parallel.tp"].value
    possible = math.gcd(experts, tp)
    if possible != experts:
        draft.lose(f"experts over {experts} ranks; here over {possible} of the {tp} of one engine", key)
    if possible > 1:
        draft.put("engine.args.ep_size", possible, key)


def task(draft: Draft, environment: Mapping[str, str]) -> None:
    """Set [task]: prompts and the reward."""
    draft.put("task.source", files(draft, "data.train_files", environment), "data.train_files")
    some_rows(draft, "task", "data.train_max_samples")
    filtered = draft.get("data.filter_overlong_prompts", True)  # 0.2 has no such key, and filters
    sources = ("data.filter_overlong_prompts", "data.truncation")
    draft.put("task.long_prompts", "filter" if filtered else "error", *sources)
    if not filtered and draft.get("data.truncation", "error") != "error":
        draft.lose("prompts that are too long are cut; here they are an error", "data.truncation")
    reward(draft, environment)


def reward(draft: Draft, environment: Mapping[str, str]) -> None:
    """Set task.reward. Reward models, and penalties for long responses, are off unless their enable is true."""
    if not any(map(draft.get, ("reward_model.enable", "reward.reward_model.enable"))):
        of_model = re.compile(r"(reward\.)?reward_model\.(?!enable$|reward_manager$|reward_kwargs|sandbox_fusion)")
        draft.ignore("there is no reward model: its enable is not true", *filter(of_model.match, draft.verl.given))
    of_length = re.compile(r"reward(_model)?\.(reward_kwargs\.(overlong_\w+|max_resp_len)|overlong_buffer)\b")
    penalty = list(filter(of_length.match, draft.verl.given))
    if not any(draft.get(key) for key in penalty if key.endswith(".enable")):
        managers = ("reward_model.reward_manager", "reward.reward_manager.name")
        dapo = [key for key in managers if draft.get(key) == "dapo"]  # scores as "naive" does, but for the penalty
        draft.ignore("there is no penalty for long responses: its enable is not true", *penalty, *dapo)
    paths = ("custom_reward_function.path", "reward.custom_reward_function.path")
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    path = next((str(draft.get(key)) for key in paths if draft.get(key)), None)
    if path:
        name = next((draft.get(key) for key in names if draft.get(key)), "compute_score")
        draft.put("task.reward", f"{with_home(path, environment)}:{name}", *paths, *names)
    else:
        draft.ignore("no path: verl's own rewards", *paths, *names)
        draft.put("task.reward", "data_source", note="as in verl, the row's data_source picks it")


def validation(draft: Draft, environment: Mapping[str, str]) -> None:
    """Set [validation]. verl validates after the last step if test_freq is above 0, and in 0.2 in any case."""
    every, before = max(0, draft.integer("trainer.test_freq")), bool(draft.get("trainer.val_before_train", True))
    if not (every or before) and draft.since("0.3"):
        off = "nothing is validated: trainer.test_freq and trainer.val_before_train say so"
        keys = ("data.val_files", "data.val_max_samples", "trainer.test_freq", "trainer.val_before_train")
        draft.ignore(off, *keys, "@.rollout.val_kwargs.*")
        return
    draft.put("validation.source", files(draft, "data.val_files", environment), "data.val_files")
    some_rows(draft, "validation", "data.val_max_samples")
    note = "" if every or not draft.since("0.3") else "none between; here also after the last step"
    draft.put("validation.every", every, "trainer.test_freq", note=note)
    draft.put("validation.before_train", before, "trainer.val_before_train")
    validation_sampling(draft)


def validation_sampling(draft: Draft) -> None:
    """Set validation.temperature.

    do_sample = false means greedy only where verl's engine workers generate. Its agent loop, which is all there is
    since 0.7 and generates for mode = async before, reads temperature, top_p and top_k and not do_sample
    (verl/experimental/agent_loop/agent_loop.py; verl/workers/rollout/chat_scheduler.py in 0.4).
    """
    sampled, temperature = "@.rollout.val_kwargs.do_sample", "@.rollout.val_kwargs.temperature"
    others = ("@.rollout.val_kwargs.top_p", "@.rollout.val_kwargs.top_k")
    by_agent_loop = draft.since("0.7") or (draft.since("0.4") and draft.get("@.rollout.mode") == "async")
    if by_agent_loop:
        draft.put("validation.temperature", draft.get(temperature) or 0.0, temperature)
        draft.ignore("verl's agent loop does not read it", sampled)
        why = "greedy: val_kwargs.temperature is 0"
    else:
        value = draft.get(temperature) if draft.get(sampled, False) else 0.0
        draft.put("validation.temperature", value or 0.0, temperature, sampled)
        why = "greedy: do_sample is false"
    if not draft.entries["validation.temperature"].value:
        draft.ignore(why, *others)


def some_rows(draft: Draft, section: str, key: str) -> None:
    """Set how many rows to use. verl takes the first ones only if data.shuffle is false."""
    if (rows := draft.integer(key, -1)) <= 0:
        return
    draft.put(f"{section}.rows", rows, key)
    if draft.get("data.shuffle"):
        seed = draft.get("data.seed")
        note = "verl draws other rows each time" if seed is None else "verl's data.seed draws the same rows"
        draft.put(f"{section}.rows_seed", seed or 0, key, note=note)


def files(draft: Draft, key: str, environment: Mapping[str, str]) -> list[str]:
    """Return the paths of a key that has one path or a list of them."""
    value = draft.get(key)
    paths = value if isinstance(value, list) else [value]
    if any(str(path).startswith("hdfs:") for path in paths):
        draft.lose("files on HDFS, which cannot be read here; give a local copy", key)
    return list(dict.fromkeys(with_home(str(path), environment) for path in paths))


def with_home(path: str, environment: Mapping[str, str]) -> str:
    """Return a path with the home folder in place of a leading ~."""
    home = environment.get("HOME", "")
    return str(Path(home, path[2:])) if path.startswith("~/") and home else path


def rollout(draft: Draft) -> None:
    """Set [rollout]: how long responses are and how they are sampled, and memory.resume."""
    own_length, length = "@.rollout.response_length", draft.integer("data.max_response_length", least=1)
    if draft.given(own_length):
        length = draft.integer_or(length, own_length, least=1)
    draft.put("rollout.max_response_tokens", length, "data.max_response_length", own_length)
    draft.put("rollout.top_k", draft.integer_or(0, "@.rollout.top_k") or -1, "@.rollout.top_k")
    needed = draft.integer("data.max_prompt_length") + length + 1
    longest = draft.integer_or(needed, "@.rollout.max_model_len")
    if longest < needed and draft.since("0.6"):  # SGLang's server in verl, from then on
        cut = f"responses that end where prompt and response have {longest} tokens; here each may have its full length"
        draft.lose(cut, "@.rollout.max_model_len")
    else:
        draft.ignore("long enough for every prompt with its response", "@.rollout.max_model_len")
    for name in ("stop", "stop_token_ids"):  # in no config of verl; 0.3 to 0.6 hand them to SGLang
        if (value := draft.get(f"@.rollout.{name}")) is not None:
            draft.put(f"rollout.{name}", value if isinstance(value, list) else [value], f"@.rollout.{name}")
    own = draft.integer("data.max_prompt_length")
    shorter = draft.integer_or(own, "@.rollout.prompt_length")
    if draft.given("@.rollout.prompt_length") and shorter < own:
        draft.lose(f"prompts that are cut to {shorter} tokens", "@.rollout.prompt_length")
    wake_up = "@.rollout.multi_stage_wake_up"
    staged = draft.since("0.6") or bool(draft.get(wake_up, False))
    note = "" if draft.given(wake_up) else "weights, then KV cache" if staged else "both at once"
    draft.put("memory.resume", "staged" if staged else "all", wake_up, note=note)


def algorithm(draft: Draft) -> None:
    """Set the advantage, and the steps in which only the critic learns."""
    choose(draft, "algorithm.advantage", "algorithm.adv_estimator", ESTIMATORS, "grpo")
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    draft.put("algorithm.normalize_by_std", draft.get(by_std, True), by_std)
    # verl updates the actor if critic_warmup <= step, and its steps count from 1: N leaves N - 1 steps to the critic.
    first = draft.integer("trainer.critic_warmup")
    alone = max(0, first - 1)
    if alone and not has_critic(draft):
        nothing = f"verl updates the actor from step {first} on, and there is no critic to update before"
        draft.lose(nothing, "trainer.critic_warmup")
    else:
        note = f"verl updates the actor from step {first} on" if alone else ""
        draft.put("algorithm.critic_warmup", alone, "trainer.critic_warmup", note=note)


def kl(draft: Draft) -> None:
    """Set algorithm.kl_*: the KL is in the reward, in the loss, or nowhere. 0.2 and 0.3: in the reward if not in the
    loss.
    """
    placed = ("@.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    in_loss = bool(draft.get(placed[0]))
    in_reward = bool(draft.get(placed[1], not in_loss))
    if in_loss and in_reward:
        draft.lose("the KL in the reward as well as in the loss; here it is in the loss", placed[1])
    placement = "loss" if in_loss else "reward" if in_reward else "none"
    draft.put("algorithm.kl_placement", placement, *placed)
    off = f"no KL in the {{}}: {full(placed[0])} and {placed[1]} say so"
    if placement != "loss":
        draft.ignore(off.format("loss"), "@.actor.kl_loss_type", "@.actor.kl_loss_coef")
    if placement != "reward":
        draft.ignore(off.format("reward"), "algorithm.kl_penalty", "algorithm.kl_ctrl.*")
    if placement == "loss":
        other = "another estimator of the KL in the loss; here it is k3 (low_var_kl)"
        only(draft, "@.actor.kl_loss_type", KL_IN_LOSS, other)
        draft.put("algorithm.kl_coefficient", draft.get("@.actor.kl_loss_coef"), "@.actor.kl_loss_coef")
    elif placement == "reward":
        other = "another estimator of the KL in the reward; here it is k1 (kl)"
        only(draft, "algorithm.kl_penalty", KL_IN_REWARD, other)
        draft.put("algorithm.kl_coefficient", draft.get("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_ctrl.kl_coef")
        adaptive = [f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon")]
        if draft.get(adaptive[0]) == "adaptive":
            draft.lose("a KL coefficient that adapts; here it stays as it is", *adaptive)
        else:
            draft.ignore("the coefficient is fixed", *adaptive)


def importance_weights(draft: Draft) -> None:
    """Ignore the bounds of importance weights where there are none; counterparts.toml reports the weights
    themselves.
    """
    for key in ("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"):
        if not draft.get(key):
            draft.ignore(f"there are no importance weights: {key} is off", f"{key}_*")


def updates(draft: Draft, prefix: str) -> None:
    """Set how [actor] is updated, from the keys of verl's actor, or from the critic's to compare (see
    critic_as_actor).
    """
    minibatches(draft, prefix)
    optimizer(draft, prefix)
    learning_rate_schedule(draft, prefix)


def critic_as_actor(draft: Draft) -> None:
    """Report settings that make verl update the critic otherwise than the actor: here [actor] counts for both.

    Where only verl's own defaults differ, nothing is reported.
    """
    if not has_critic(draft):
        return
    critics = Draft(verl=draft.verl, reasons=draft.reasons, of_command=draft.of_command)
    updates(critics, "critic")
    for key, entry in critics.entries.items():
        value, sources = draft.entries[key].value, critics.sources(key)
        both = (*sources, *draft.sources(key))
        if entry.value == value:
            draft.ignore(f"{key} counts for actor and critic", *sources)
        elif any(draft.given(source) and not draft.verl.is_default(full(source)) for source in both):
            said = list(filter(draft.given, sources)) or both
            own = f"verl's critic has {shown(entry.value)} as {key}"
            draft.lose(f"{own}; here actor and critic have {shown(value)}", *said)


def minibatches(draft: Draft, prefix: str) -> None:
    """Set minibatches and passes. verl counts a minibatch in prompts; the critic's in sequences before 0.4."""
    key, responses = f"{prefix}.ppo_mini_batch_size", draft.integer("@.rollout.n", least=1)
    number = "@.rollout.n"
    if prefix == "critic" and not draft.since("0.8"):  # 0.4 to 0.7 multiply by rollout_n, by default rollout.n
        number = "critic.rollout_n"
        responses = draft.integer(number, least=1) if draft.since("0.4") else 1
    note = f"x {responses} responses" if responses > 1 else ""
    draft.put("actor.minibatch_size", draft.integer(key, least=1) * responses, key, number, note=note)
    draft.put("actor.ppo_epochs", draft.get(f"{prefix}.ppo_epochs"), f"{prefix}.ppo_epochs")


def microbatches(draft: Draft) -> None:
    """Set the actor's microbatches, which are the critic's too."""
    dynamic, budget = "@.actor.use_dynamic_bsz", "@.actor.ppo_max_token_len_per_gpu"
    per_rank, over_ranks = "@.actor.ppo_micro_batch_size_per_gpu", "@.actor.ppo_micro_batch_size"
    if draft.get(dynamic):
        tokens, note = token_budget(draft, draft.integer_or(16384, budget, least=1))
        draft.put("actor.tokens_per_microbatch", tokens, dynamic, budget, note=note)
        draft.ignore(f"{full(dynamic)} is true", per_rank, over_ranks)
        return
    draft.put("actor.tokens_per_microbatch", 0, dynamic)
    draft.ignore(f"{full(dynamic)} is false", budget)
    ranks = draft.integer("trainer.nnodes") * draft.integer("trainer.n_gpus_per_node")
    if draft.get(over_ranks) is not None:
        size = max(1, draft.integer(over_ranks, least=1) // ranks)
        draft.put("actor.microbatch_size", size, over_ranks, note=f"over {ranks} GPUs")
    elif draft.get(per_rank) is not None:
        draft.put("actor.microbatch_size", draft.integer(per_rank, least=1), per_rank)
    else:
        draft.put("actor.microbatch_size", 1, note=f"verl refuses to start without {full(per_rank)}")
        draft.lose("verl refuses to start without it; 1 is used", per_rank)


def token_budget(draft: Draft, budget: int) -> tuple[int, str]:
    """Return the tokens of one rank's microbatch, and a note.

    In verl, ranks may share a sequence; here one rank takes it.
    """
    ulysses = "ulysses_sequence_parallel_size"
    names = (ulysses, f"fsdp_config.{ulysses}", "megatron.context_parallel_size", "veomni.ulysses_parallel_size")
    ranks = max(draft.integer_or(1, f"@.actor.{name}", least=1) for name in names)
    longest = draft.integer("data.max_prompt_length") + draft.entries["rollout.max_response_tokens"].value
    if budget < longest <= budget * ranks:
        return longest, f"one sequence, which verl splits over {ranks} ranks"
    return budget, ""


def optimizer(draft: Draft, prefix: str) -> None:
    """Set AdamW and gradient clipping."""
    optim = f"{prefix}.optim"
    draft.put("actor.weight_decay", draft.get(f"{optim}.weight_decay", 0.01), f"{optim}.weight_decay")
    draft.put("actor.betas", betas(draft, f"{optim}.betas"), f"{optim}.betas")
    clip, other_clip = f"{prefix}.grad_clip", f"{optim}.clip_grad"
    if draft.verl.trainer == "megatron" or has_engine_workers(draft):
        clip, other_clip = other_clip, clip
    draft.put("actor.max_grad_norm", draft.get(clip, 1.0), clip)
    draft.ignore(f"verl reads {full(clip)}", other_clip)


def learning_rate_schedule(draft: Draft, prefix: str) -> None:
    """Set the schedule of the learning rate, and its warm-up."""
    optim, megatron = f"{prefix}.optim", draft.verl.trainer == "megatron"
    styles = (f"{optim}.warmup_style", f"{optim}.lr_decay_style" if megatron else f"{optim}.lr_scheduler_type")
    style = next((str(draft.get(key)) for key in styles if draft.get(key)), "constant")
    if style not in SCHEDULES:
        draft.lose(f"the schedule {style}; constant is used", *styles)
    schedule, is_warm = SCHEDULES.get(style, "constant"), warmup(draft, prefix)
    if schedule == "constant":
        schedule = "constant_with_warmup" if is_warm else schedule
        draft.ignore("a constant schedule has no decay", f"{optim}.min_lr*", f"{optim}.num_cycles")
    draft.put("actor.schedule", schedule, *styles)


def betas(draft: Draft, key: str) -> list[float]:
    """Return AdamW's betas. Raise ConfigError unless they are two numbers."""
    found = draft.get(key) or [0.9, 0.999]
    if not isinstance(found, list) or len(found) != 2:
        raise ConfigError(f"{full(key)} must be two numbers, as [0.9,0.999], got {shown(found)}.")
    return [float(of_type(float, beta, key)) for beta in found]


def has_engine_workers(draft: Draft) -> bool:
    """Return whether verl trains by workers/engine/: since 0.8 always, and since 0.6 if a command asks for it."""
    return draft.since("0.8") or (draft.since("0.6") and draft.get("trainer.use_legacy_worker_impl") == "disable")


def warmup(draft: Draft, prefix: str) -> bool:
    """Set the warm-up, and return whether there is one.

    verl counts it in PPO steps, each of which has one learning rate; the harness counts optimizer steps.
    """
    steps_key, ratio_key = f"{prefix}.optim.lr_warmup_steps", f"{prefix}.optim.lr_warmup_steps_ratio"
    steps, ratio = draft.integer_or(-1, steps_key), draft.number_or(0.0, ratio_key)
    # FSDP's older workers take 0 as "no warm-up", the engine as "not given".
    if steps > 0 or (steps == 0 and not has_engine_workers(draft) and draft.verl.trainer == "fsdp"):
        draft.ignore("lr_warmup_steps comes first", ratio_key)
        source = steps_key
    else:
        draft.ignore("not above 0: lr_warmup_steps_ratio counts", steps_key)
        total, source = "trainer.total_training_steps", ratio_key
        if ratio and draft.get(total) is None:
            draft.lose(f"a warm-up as a share of all steps; give {total} or lr_warmup_steps", ratio_key)
        steps = int(ratio * draft.integer_or(0, total))
    sequences = draft.integer("data.train_batch_size") * draft.integer("@.rollout.n")
    each = sequences // draft.entries["actor.minibatch_size"].value * draft.entries["actor.ppo_epochs"].value
    note = f"{steps} PPO steps x {each} optimizer steps" if steps else ""
    draft.put("actor.warmup_steps", steps * each, source, note=note)
    return steps > 0


def losses(draft: Draft) -> None:
    """Set the clipping of the policy loss, and report other losses than those here.

    clip_ratio counts only if clip_ratio_low and clip_ratio_high are null, as they are before 0.4.
    """
    for name in ("low", "high"):
        key = f"@.actor.clip_ratio_{name}"
        source = key if draft.get(key) is not None else "@.actor.clip_ratio"
        draft.put(f"actor.clip_{name}", draft.get(source), source)
    if full("@.actor.clip_ratio") not in draft.mapped:
        draft.ignore("verl reads clip_ratio_low and clip_ratio_high, which have defaults", "@.actor.clip_ratio")
    only(draft, "@.actor.clip_ratio_c", (DUAL_CLIP,), f"another bound of the dual clip; here it is {DUAL_CLIP:g}")
    other = "another mean of the loss; here it is over all tokens of a minibatch (token-mean)"
    for key in ("@.actor.loss_agg_mode", "critic.loss_agg_mode"):
        only(draft, key, ("token-mean",), other)


def memory(draft: Draft) -> None:
    """Set memory.offload_*, from the tables of FSDP and of Megatron under their names in all releases."""
    tables = {
        "actor": ("@.actor.fsdp_config", "@.actor.megatron"),
        "critic": ("critic.model.fsdp_config", "critic.fsdp", "critic.megatron"),
        "reference": ("@.ref.fsdp_config", "@.ref.megatron"),
    }
    if not has_critic(draft):
        del tables["critic"]
    if draft.entries["algorithm.kl_placement"].value == "none":
        draft.ignore("no KL, so there is no reference", "@.ref.*")
        del tables["reference"]
    for name, in_verl in {"parameters": "param", "optimizer": "optimizer"}.items():
        offloaded, sources = [], []
        for role, prefixes in tables.items():
            if role == "reference" and name != "parameters":
                continue
            keys = [f"{prefix}.{key}" for prefix in prefixes for key in (f"{in_verl}_offload", "offload_policy")]
            sources += keys
            if any(draft.get(key) for key in keys):
                offloaded.append(role)
        draft.put(f"memory.offload_{name}", offloaded, *sources)


def length_of_run(draft: Draft) -> None:
    """Set run.steps or run.epochs."""
    steps = draft.get("trainer.total_training_steps")
    if steps is not None:
        draft.put("run.steps", steps, "trainer.total_training_steps")
        if draft.given("trainer.total_epochs"):
            draft.lose("an end after this many epochs, if that comes before the last step", "trainer.total_epochs")
    else:
        draft.put("run.epochs", draft.get("trainer.total_epochs"), "trainer.total_epochs")
        draft.ignore("null: trainer.total_epochs counts", "trainer.total_training_steps")


def checkpoints(draft: Draft, environment: Mapping[str, str]) -> None:
    """Set [checkpoint]. verl's own checkpoints cannot be read here."""
    every = max(0, draft.integer("trainer.save_freq"))
    draft.put("checkpoint.every", every, "trainer.save_freq")
    only_last, most = "trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep"
    draft.put("checkpoint.keep", 1 if draft.get(only_last) else draft.get(most) or 0, most, only_last)
    if draft.get("trainer.max_critic_ckpt_to_keep") == draft.get(most):
        draft.ignore("actor and critic are in one checkpoint", "trainer.max_critic_ckpt_to_keep")
    for key in filter(re.compile(r".*\.checkpoint\.(save_|load_)?contents").fullmatch, draft.verl.given):
        value = draft.get(key)
        if isinstance(value, list) and not all(name in value for name in ("model", "optimizer", "extra")):
            draft.lose("a resumed run without the optimizer, the schedule or the model; here with all of them", key)
    folder, mode = "trainer.default_local_dir", "trainer.resume_mode"
    saves = draft.given(folder) or every > 0
    if saves:
        draft.put("checkpoint.folder", with_home(str(draft.get(folder) or "."), environment), folder)
    if draft.get(mode) not in ("auto", "disable"):
        draft.lose("a checkpoint of verl, which this trainer cannot read; training starts from the model", mode)
        return
    draft.ignore(f"{mode} is {draft.get(mode)}", "trainer.resume_from_path")
    if saves:
        draft.put("checkpoint.resume", "latest" if draft.get(mode) == "auto" else "", mode)
    else:
        draft.ignore("nothing is saved, so there is nothing to resume", mode)


def trackers(draft: Draft) -> None:
    """Set trackers.names. The console and metrics.jsonl are always written."""
    loggers = draft.get("trainer.logger")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    draft.put("trackers.names", [name for name in TRACKERS if name in loggers], "trainer.logger")
    others = [str(name) for name in loggers if name not in (*TRACKERS, "console", "file")]
    if others:
        draft.lose(f"metrics sent to {', '.join(others)}; here to {' and '.join(TRACKERS)}", "trainer.logger")
