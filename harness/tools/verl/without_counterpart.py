"""Keys of verl that set nothing here: those that need no counterpart, and those whose effect is missing.

Patterns are matched against whole keys, the first that fits counts.
"""

from typing import Any

_ANY = r"(actor_rollout_ref\.(actor|ref|rollout|model)|critic|reward_model)"
_ROLLOUT, _ACTOR = r"actor_rollout_ref\.rollout\.", r"actor_rollout_ref\.actor\."
_LEARNER = r"(actor_rollout_ref\.actor|critic)\."
_MODEL = r"(actor_rollout_ref|critic|reward_model)\.model"

IRRELEVANT: dict[str, str] = {
    r"hydra\..*": "where hydra writes its own files; the run directory is run.dir",
    r"ray_(init|kwargs)\..*": "there is no Ray here",
    r"trainer\.ray_wait_register_center_timeout": "there is no Ray here",
    r"actor_rollout_ref\.hybrid_engine": "trainer and engine share the ranks here too (parallel.colocate)",
    r"actor_rollout_ref\.(rollout|ref)\.(log_prob_micro_batch_size(_per_gpu)?|log_prob_use_dynamic_bsz"
    r"|log_prob_max_token_len_per_gpu)|actor_rollout_ref\.actor\.ppo_infer_\w+": "log-probs are computed in the actor's microbatches: memory and time, not numbers",
    r"critic\.(forward|ppo_infer)_(micro_batch_size(_per_gpu)?|max_token_len_per_gpu)": "values are computed in the critic's"
    " microbatches: memory and time, not numbers",
    r".*(profiler|profile|nsight)[\w-]*\..*|global_profiler\..*|trainer\.profile_\w+|.*\.profile_\w+": "verl's profilers;"
    " every run here measures its phases and writes a trace",
    r"trainer\.(default_hdfs_dir|del_local_ckpt_after_load)": "no copies of checkpoints are kept elsewhere",
    r"trainer\.(log_val_generations|val_generations_to_log_to_wandb|rollout_data_dir|validation_data_dir)": "samples of"
    " responses are in the run's events; rollout.save writes all of a run",
    r"trainer\.balance_batch": "which rank computes which sequence changes no number",
    r"trainer\.(use_legacy_worker_impl|use_v1|esi_redundant_time)": "how verl's own processes are organised",
    r"trainer\.device": "engine.device says it; auto takes a GPU where there is one",
    r"data\.(val_batch_size|dataloader_num_workers|filter_overlong_prompts_workers|use_shm|return_raw_input_ids"
    r"|return_raw_chat|return_full_prompt|return_multi_modal_inputs|image_key|video_key|audio_key|image_patch_size"
    r"|validation_shuffle|trust_remote_code|cache_dir)": "how verl loads its data: time and memory, not prompts",
    _MODEL + r"\.(use_shm|external_lib|use_liger|use_fused_kernels|fused_kernel_options\..*|enable_activation_offload"
    r"|tiled_mlp\..*|tokenizer_path|input_tokenizer)": "how the trainer computes: speed and memory, not the algorithm",
    _ANY
    + r"\.(use_torch_compile|use_fused_kernels|entropy_\w+|calculate_\w+|pad_to_length\w*|use_prefix_grouper|nccl_timeout"
    r"|rollout_n|load_weight|checkpoint\..*|ulysses_sequence_parallel_size)": "how the trainer"
    " computes and stores: speed and memory, not the algorithm",
    _ANY + r"\.(data_loader_seed|shuffle)": "minibatches are drawn by run.seed, from the sequences of all ranks",
    r"actor_rollout_ref\.nccl_timeout": "run.timeout_seconds and run.phase_timeouts",
    r".*\.strategy|.*\bfsdp(_config)?\.strategy": "the trainer is FSDP2 here",
    r".*\bfsdp(_config)?\.(wrap_policy\..*|min_num_params|fsdp_size|forward_prefetch|reshard_after_forward|use_orig_params"
    r"|use_torch_compile|ulysses_sequence_parallel_size|entropy_\w+|seed|full_determinism|dtype|forward_only"
    r"|pad_to_length\w*)": "how FSDP lays parameters out: speed and memory, not the algorithm",
    r".*\.megatron(_config)?\..*|.*\.override_(ddp|transformer|mcore)\w*\..*": "how Megatron lays the trainer out; FSDP2 here",
    r".*\.(veomni|torchtitan|automodel|mindspeed|engine)\..*": "how another trainer is laid out; FSDP2 here",
    r".*\.override_optimizer_config\.(optimizer_cpu_offload|\w*offload_fraction|overlap_cpu_optimizer_d2h_h2d"
    r"|use_precision_aware_optimizer)": "how Megatron's optimizer uses host memory; memory.offload_optimizer here",
    r"actor_rollout_ref\.ref\.fsdp_config\.(model_dtype|optimizer_offload|grad_offload)": "the reference is kept in"
    " model.dtype, in which it computes, and has no optimizer",
    _LEARNER + r"optim\.(total_training_steps|optimizer_impl|zero_indexed_step"
    r"|use_checkpoint_opt_param_scheduler)": "verl sets it itself, or it is the same here",
    _ROLLOUT + r"(mode|chat_scheduler|disable_log_stats|max_num_batched_tokens|enable_chunked_prefill"
    r"|enable_prefix_caching|max_model_len|layered_summon|skip_tokenizer_init|logprobs_mode|scheduling_policy"
    r"|moe_load_balance_metrics_interval|calculate_log_probs|agent\.num_workers|agent\.default_agent_loop|trace\..*"
    r"|prometheus\..*|cudagraph_capture_sizes|full_determinism|seed|n_gpus_per_node|limit_images"
    r"|sglang_engine_mode|server\..*)": "how verl drives its engine, or an argument of vLLM: not what is generated",
    _ROLLOUT
    + r"(engine_kwargs\.(vllm|trtllm)\..*|moe_tensor_parallel_size)": "an argument of another engine; SGLang's are"
    " engine_kwargs.sglang",
    _ROLLOUT + r"multi_turn\.(?!enable$).*": "of rollouts of several turns, which there are none of here",
    _ROLLOUT + r"use_fire_sampling": "off in every release that verl runs it in",
}
"""Pattern -> why no counterpart is needed."""

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    r"trainer\.val_only": ((False,), "true: no training at all; here one PPO step at least"),
    r"trainer\.v1\.trainer_mode": (("sync",), "generation and training at once; here in turn"),
    r"trainer\.v1\..*": ((), "settings of trainers that generate and train at once, or of a sampler; here in turn"),
    r"data\.shuffle": ((True,), "false: prompts in the order of the file; here shuffled by run.seed"),
    r"data\.seed": ((None,), "another order of prompts; here run.seed decides"),
    r"data\.prompt_key": (("prompt",), "the column of the prompt is another; here prompt, in verl's schema"),
    r"data\.reward_fn_key": (("data_source",), "the column that picks the reward is another; here data_source"),
    r"data\.(custom_cls|sampler|datagen)\..*|data\.tokenizer|data\.tool_config_path|data\.function_tool_path": (
        (None, ""),
        "prompts made or chosen by a class of the user's, or tools; here rows as they are",
    ),
    r"data\.apply_chat_template_kwargs(\..*)?|data\.mm_processor_kwargs(\..*)?": (
        ({},),
        "arguments of the chat template, so other prompts, such as without thinking",
    ),
    r"data\.gen_batch_size": ((None,), "more prompts generated than trained on"),
    r"data\.continuous_token\.enable": ((False,), "prompts of several turns, token by token"),
    _MODEL + r"\.(lora_rank|lora\.rank)": ((0, None), "LoRA: a low-rank update is trained; here all parameters"),
    _MODEL + r"\.(lora_\w+|lora\..*|target_(modules|parameters)|exclude_modules)": (
        (None, 16, "all-linear"),
        "LoRA: a low-rank update is trained; here all parameters",
    ),
    _MODEL + r"\.mtp\.enable\w*": ((False,), "multi-token prediction heads trained or used"),
    _MODEL + r"\.mtp\..*": ((), "multi-token prediction heads trained or used"),
    _MODEL + r"\.trust_remote_code": (
        (False,),
        "true: code of the model's own folder; here transformers' classes only",
    ),
    _MODEL + r"\.(custom_chat_template|hf_config_path)": (
        (None,),
        "another chat template or config than the model's folder has",
    ),
    _MODEL + r"\.override_config(\..*)?": (({},), "fields of the model's config replaced, such as its dropout"),
    r"actor_rollout_ref\.model\.freeze_\w+|actor_rollout_ref\.actor\.freeze_\w+": (
        (False,),
        "frozen parts of the model",
    ),
    r"actor_rollout_ref\.ref\.model(\..*)?": ((None,), "a reference that is another model; here the actor's start"),
    _ACTOR + r"policy_loss\.loss_mode": (("vanilla", "ppo"), "another policy loss; here PPO's, clipped"),
    _ACTOR + r"(policy_loss\..*|tau_pos|tau_neg)": ((), "constants of other policy losses"),
    _LEARNER + r"loss_scale_factor": ((None,), "a constant in place of the longest response's length"),
    _LEARNER + r"optim\.min_lr(_ratio)?": ((None, 0.0, 0), "a floor under the decaying learning rate"),
    _LEARNER + r"optim\.num_cycles": ((0.5,), "another number of cosine waves"),
    _LEARNER + r"optim\.optimizer": (("AdamW", "adam"), "another optimizer; here AdamW"),
    _LEARNER + r"optim\.override_optimizer_config(\..*)?": ((None, {}), "other fields of the optimizer"),
    r".*\.mixed_precision\.param_dtype": (("bf16", "bfloat16"), "another dtype to compute in; here model.dtype"),
    r".*\.mixed_precision\.(reduce|buffer)_dtype": (
        ("fp32", "float32"),
        "gradients added up in another dtype; here float32",
    ),
    r".*\.qat\.enable": ((False,), "training with quantized weights"),
    r".*\.qat\..*": ((), "settings of training with quantized weights"),
    r".*router_replay\.mode": (("disabled",), "experts chosen by the rollout are replayed in training"),
    _ROLLOUT + r"enable_rollout_routing_replay": ((False,), "experts chosen by the rollout are replayed"),
    _ROLLOUT + r"do_sample": ((True,), "false: greedy responses in training; here sampled"),
    _ROLLOUT + r"(free_cache_engine|enable_sleep_mode)": (
        (True,),
        "false: the engine keeps its memory while the trainer updates; here it releases weights and KV cache",
    ),
    _ROLLOUT + r"multi_turn\.enable": ((False,), "several turns with tools; here one response"),
    _ROLLOUT + r"agent\..*": ((None,), "an agent's loop makes the responses; here the engine alone"),
    _ROLLOUT + r"data_parallel_size": ((1,), "attention of one engine split over the batch; here dp engines"),
    _ROLLOUT + r"(quantization\w*|qat)": ((None,), "a quantized engine, which takes no weights from here"),
    _ROLLOUT + r"(over_sample_rate|nnodes)": ((0,), "more responses than are used, or an engine on hosts of its own"),
    _ROLLOUT + r"(disaggregation|skip)\.enabled?": (
        (False,),
        "prefill and decode on engines of their own, or rollouts read from files",
    ),
    _ROLLOUT + r"(skip_rollout)": ((False,), "rollouts read from files; here rollout.load"),
    _ROLLOUT + r"(disaggregation\..*|skip\..*|skip_dump_dir)": ((), "settings of what is off here"),
    _ROLLOUT + r"checkpoint_engine\.backend": (
        ("naive", None),
        "weights travel in another way than SGLang's update call; see weights.transport",
    ),
    _ROLLOUT + r"checkpoint_engine\..*": ((None, {}), "settings of another way for the weights"),
    _ROLLOUT + r"(presence_penalty|frequency_penalty|min_p)": ((0, 0.0), "a penalty in sampling"),
    _ROLLOUT + r"repetition_penalty": ((1, 1.0), "a penalty in sampling"),
    _ROLLOUT + r"val_kwargs\.n": ((1,), "several responses to each prompt of the validation; here one"),
    _ROLLOUT + r"val_kwargs\.top_p": ((1, 1.0), "nucleus sampling in the validation"),
    _ROLLOUT + r"val_kwargs\.top_k": ((-1, 0), "the k likeliest tokens in the validation"),
    r"algorithm\.use_pf_ppo": ((False,), "samples reweighted by their reward (PF-PPO)"),
    r"algorithm\.pf_ppo\..*": (("pow", 2.0), "constants of PF-PPO"),
    r"algorithm\.gdpo_\w+": ((None,), "constants of GDPO"),
    _ACTOR + r"use_rollout_log_probs": ((False,), "the engine's log-probs in place of the trainer's"),
    r"algorithm\.filter_groups\.enable": ((False,), "prompts whose responses all score alike are left out (DAPO)"),
    r"algorithm\.filter_groups\..*": ((None, 0, 1), "constants of that filter"),
    r"algorithm\.rollout_correction\.(rollout_rs\w*|rollout_token_veto_threshold)": (
        (None,),
        "sequences rejected by their ratio",
    ),
    r"algorithm\.rollout_correction\.(bypass_mode|rollout_is_batch_normalize|use_policy_gradient)": (
        (False,),
        "log-probs of the engine in place of the trainer's, or normalized weights",
    ),
    r"algorithm\.rollout_correction\.loss_type": (("ppo_clip",), "another loss with the engine's log-probs"),
    r"reward_model\.enable|reward\.reward_model\.enable": ((False, None), "rewards from a model; here from a rule"),
    r"reward_model\.(enable_resource_pool|launch_reward_fn_async|use_reward_loop)|reward\.reward_model\.enable_resource_pool": (
        (False, None),
        "where and when rewards are computed",
    ),
    r"(reward_model|reward|reward\.reward_model)\.(reward_manager|num_workers|nnodes|n_gpus_per_node)": (
        ("naive", "batch", "prime", None, 0, 1, 8),
        "another way to score, such as DAPO's penalty for long responses",
    ),
    r"reward(_manager|\.reward_manager)\.(name|source)": (
        ("naive", "batch", "prime", "register"),
        "another way to score, such as DAPO's penalty for long responses",
    ),
    r"(reward_model|reward)\.(reward_kwargs|overlong_buffer)(\..*)?": ((False,), "a penalty for long responses"),
    r"reward(_model|_manager|\.reward_model|\.reward_manager)?\..*": (
        (None,),
        "settings of rewards from a model or a service",
    ),
    r"(reward_model\.|reward\.)?sandbox_fusion\..*": ((None,), "rewards from a service that runs code"),
    r"distillation\.enabled": ((False,), "a teacher's distribution in the loss"),
    r"distillation\..*|transfer_queue\..*|skip\..*": ((False, None), "settings of what there is none of here"),
    r"critic\.enable": ((None,), "a critic, or none, whatever the estimator; here GAE has one"),
    r"algorithm\.kl_ctrl\..*": ((), "constants of an adaptive coefficient"),
    r"trainer\.max_critic_ckpt_to_keep": ((None,), "another number of the critic's checkpoints; here both are in one"),
    r"trainer\.resume_from_path": ((False, None), "a checkpoint of verl, which this trainer cannot read"),
    r"global_step|global_steps": ((), "a step to begin with"),
}
"""Pattern -> values that change nothing, and what others would change."""
