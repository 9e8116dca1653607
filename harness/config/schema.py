"""What a run is: one keyword-only dataclass a section, every field with its unit and its meaning.

Nothing here imports torch: `--help`, `--dry-run` and every configuration error must be instant.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
TransportName = Literal["pull", "tensor", "bucket", "distributed", "disk"]
TINY_MODELS = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight")
"""model.name of the models that tools/tiny_models.py makes on the spot."""
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt"]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(kw_only=True, slots=True)
class Run:
    """How long the run is, what it is seeded with, where it writes."""

    dir: str = ""
    """Run directory; empty means runs/<date>-<time>."""
    steps: int = 3
    """PPO steps. Never one: failures of the second step are real, and common."""
    epochs: int = 0
    """Above 0: passes over the prompts, in place of run.steps, which the resolved config then has. What is left of a pass, less than a step, is left out."""
    seed: int = 0
    """Seeds the model, the data order and the engine's sampling."""
    timeout_seconds: float = 600.0
    """How long a collective, the engine's start, and any phase not in run.phase_timeouts may take before the run fails."""
    phase_timeouts: dict[str, float] = field(default_factory=dict)
    """Seconds that a phase may take, by its name, such as sync = 60; past it the run ends with 124."""
    heartbeat_timeout: float = 10.0
    """How long a host may be silent before it counts as gone. Hosts beat once a second."""
    inject: tuple[str, ...] = ()
    """Faults on purpose, KIND@PHASE[:rank][:step] each, such as kill@sync:1:2; of rank 0, and of the first step, where not said. Kinds: exception, kill, stop, hang, slow, oom, full-disk at any phase; nan-gradient, nan-weight, wrong-shape, dropped-bucket, lost-message where they have something to act on. Also --inject, as often as wanted."""


@dataclass(kw_only=True, slots=True)
class Parallel:
    """The mesh: dp engines, each of tp x pp ranks. Their product is the world size."""

    dp: int = 1
    """Number of engines."""
    tp: int = 2
    """Tensor-parallel ranks of one engine."""
    pp: int = 1
    """Pipeline-parallel stages of one engine."""
    colocate: bool = True
    """true: an engine rank runs on its trainer rank's GPU. false: on a GPU of its own; each host then needs two visible GPUs a rank, of which trainers use the first half."""
    rank_order: Literal["dp,tp,pp", "dp,pp,tp"] = "dp,tp,pp"
    """How ranks fill the mesh, slowest axis first. SGLang fills hosts in dp,pp,tp order: needed where tp > 1 and pp > 1 span hosts."""


@dataclass(kw_only=True, slots=True)
class Network:
    """How the hosts of a job reach each other."""

    interface: str = ""
    """Interface for what goes between hosts, by name, or by a network that an address of it is in (10.0.0.0/8); empty: GLOO_SOCKET_IFNAME where that is set, else the one that routes to MASTER_ADDR."""


@dataclass(kw_only=True, slots=True)
class Model:
    """Which model actor, critic and reference start from."""

    name: str = "qwen2"
    """A tiny model made on the spot (qwen2, qwen3, llama, qwen3_moe, deepseek_v3, moonlight), a local folder, or a hub id."""
    dtype: Dtype = "float32"
    """Dtype of the engine's weights, and in which the trainer computes."""
    master_dtype: Dtype = "float32"
    """Dtype of the parameters that actor and critic update, of their gradients and of AdamW's moments. bfloat16, with dtype = bfloat16 only, halves their memory and rounds most of an update away where the learning rate is below about 1e-4."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers config that replace those of a tiny model, such as num_hidden_layers = 4."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """The trainer's attention, as transformers names it. auto: sdpa, or eager where the architecture has no sdpa or caps attention logits, which sdpa leaves out. flash_attention_2 needs the package flash-attn, a GPU and dtype = bfloat16."""
    packed: bool = False
    """Remove padding: the trainer concatenates a microbatch's sequences in one row, and each attends to itself alone. Same results; no computation on padding."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """checkpoint: the engine loads the saved model. random: nothing is saved or loaded, each rank fills its own shards, and the first sync brings the engine its weights."""


@dataclass(kw_only=True, slots=True)
class Engine:
    """One SGLang engine for each (tp, pp) group."""

    implementation: Literal["harness", "sglang"] = "harness"
    """harness: our SPMD wrapper of sglang.Engine. sglang: the VerlEngine that sglang ships itself, up to 0.4.7.post1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, else SGLang's CPU mode. Trainer and engine share it."""
    initial_weights: Literal["dummy", "checkpoint"] = "dummy"
    """dummy: the engine starts on meaningless weights, so that whatever the first sync does not bring shows. checkpoint: on the model's own."""
    defaults: Literal["harness", "sglang"] = "harness"
    """Of arguments that engine.args does not name. harness: on a GPU no CUDA graphs, attention_backend triton, sampling_backend pytorch, which start on any GPU in seconds. sglang: SGLang's own, as it serves."""
    base_port: int = 30000
    """First port of the block of ports that each engine of a host leases."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments for sglang.Engine, as this sglang names them, such as mem_fraction_static = 0.5."""


@dataclass(kw_only=True, slots=True)
class Task:
    """Prompts, and the rule that scores a response."""

    source: tuple[str, ...] = ("arithmetic",)
    """One or several: arithmetic (word problems made by the harness), a folder of jsonl or parquet files, such a file, or a hub id. Rows are verl's (prompt as messages, reward_model.ground_truth, data_source), or have question and answer."""
    split: str = "train"
    """Which file stem (folder) or split (hub id) to read; a file has none."""
    rows: int = 0
    """How many rows to use, from the first of all sources; 0 means all."""
    template: str = "Question: {question}\nAnswer: "
    """The prompt of a row with a question, which replaces {question}; messages go through the tokenizer's chat template."""
    max_prompt_tokens: int = 256
    """Longest prompt; see long_prompts."""
    long_prompts: Literal["filter", "error"] = "filter"
    """filter: leave out prompts longer than max_prompt_tokens. error: fail, naming the row."""
    reward: str = "gsm8k"
    """gsm8k: 1 if the number after #### is right, however it is written. gsm8k_strict: as verl reads it. math: 1 if math-verify finds the ground truth. digits: the share of the response's characters that are digits. data_source: gsm8k_strict or math, by the row. module:function, or FILE.py:function: your own, called as verl calls it, with data_source, solution_str, ground_truth and extra_info."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """What the engines generate in one step."""

    prompts_per_step: int = 8
    """Prompts over all engines."""
    responses_per_prompt: int = 2
    """Responses sampled for each prompt; GRPO compares within them."""
    max_response_tokens: int = 16
    """Longest response."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs use it too. Must be at least 1e-6, below which SGLang is greedy: greedy responses teach nothing."""
    top_p: float = 1.0
    """Nucleus sampling."""
    top_k: int = -1
    """Sample among the k likeliest tokens, at least 2; -1 means all."""
    ignore_eos: bool = False
    """Go on to max_response_tokens even after the end token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, which keeps them. The engine then loads the tokenizer, and looks for each among as many last tokens as it has of its own, and one more: spelled in more tokens it goes unseen."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, which keeps them, beside the end token."""
    truncated: Literal["train", "mask"] = "train"
    """Responses that max_response_tokens cut off. train: like any other. mask: they count in advantages, but no token of theirs in a loss."""
    aborted: Literal["error", "mask", "train"] = "error"
    """Responses that SGLang aborted, or that have no token. error: the run fails with SGLang's reason. mask: as though they had no token; they count as a reward alone, and are compared with no other. train: like any other, as far as they came."""
    save: str = ""
    """Folder into which each rank writes each step's responses, log-probs and scores. Also --save-rollouts."""
    load: str = ""
    """Folder that such a run has written: the learner runs on what it holds, without an engine. Also --load-rollouts."""
    only: bool = False
    """The engine alone, on the model's own checkpoint: generate, score and save, with nothing to learn. Also --rollouts-only."""

    @property
    def has_both(self) -> bool:
        """Whether the run has an engine and a learner."""
        return not (self.load or self.only)


@dataclass(kw_only=True, slots=True)
class Validation:
    """Prompts that are not trained on, scored by the task's reward: for rewards of 0 and 1 the mean is the accuracy."""

    source: tuple[str, ...] = ()
    """As task.source; empty: no validation. With one, it is also done after the last update."""
    split: str = "test"
    """As task.split."""
    rows: int = 0
    """How many rows to use, from the first; 0 means all."""
    before_train: bool = False
    """Also before the first update."""
    every: int = 0
    """Updates between validations; 0: none between."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""

    def is_due(self, index: int, steps: int) -> bool:
        """Return whether to validate after `index` updates of `steps`."""
        between = self.before_train if index == 0 else bool(self.every) and index % self.every == 0
        return bool(self.source) and (between or index == steps)


@dataclass(kw_only=True, slots=True)
class Algorithm:
    """From rewards to advantages."""

    advantage: Literal["gae", "grpo", "rloo"] = "gae"
    """gae needs a critic; grpo and rloo compare the responses of one prompt: with their mean, or each with the mean of the others."""
    gamma: float = 1.0
    """Discount of GAE."""
    lam: float = 0.95
    """Lambda of GAE."""
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation."""
    kl_placement: Literal["none", "reward", "loss"] = "reward"
    """Where the KL to the frozen reference counts: subtracted from each token's reward, a term of the loss, or nowhere."""
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3", "k1+", "k3+"] = "auto"
    """Estimator of the KL at each token, after http://joschu.net/blog/kl-approx.html. k1+ and k3+ have the values of k1 and k3, and the gradient of k2, which in expectation is that of the KL. auto: k1 in the reward, k3 in the loss, as in verl."""
    kl_coefficient: float = 0.001
    """Weight of the KL."""
    kl_target: float = 0.0
    """Above 0, kl_coefficient adapts to hold the KL here (kl_placement = "reward" only)."""
    kl_horizon: int = 10000
    """How many sequences the adaptation of kl_coefficient takes."""
    critic_warmup: int = 0
    """PPO steps, from the first, in which the critic alone learns."""
    importance_cap: float = 0.0
    """Above 0: weigh each token's policy loss by p_trainer / p_engine of its sampling, at most this (truncated importance sampling)."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a value model."""
        return self.advantage == "gae"

    @property
    def estimator(self) -> KlEstimator:
        """kl_estimator, or what auto means for kl_placement."""
        if self.kl_estimator == "auto":
            return "k3" if self.kl_placement == "loss" else "k1"
        return self.kl_estimator


@dataclass(kw_only=True, slots=True)
class Updates:
    """Optimizer steps of one model."""

    learning_rate: float
    """AdamW's: after warm-up, and before any decay."""
    schedule: Schedule = "constant"
    """Of the learning rate over the model's optimizer steps of the run, as transformers names it."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises from 0, at the first, to learning_rate."""
    warmup_ratio: float = 0.0
    """In place of warmup_steps: their share of the model's optimizer steps of the run, rounded down."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: float = 0.0
    """AdamW's."""
    minibatch_size: int = 8
    """Sequences of one optimizer step, over all ranks, drawn from those of all ranks: the same at any world size."""
    microbatch_size: int = 4
    """Sequences of one forward and backward, on one rank."""
    tokens_per_microbatch: int = 0
    """Above 0, in place of microbatch_size: the most tokens of one forward and backward, on one rank, padding included unless model.packed. Sequences then go to the ranks that have fewest tokens; so too for log-probs (actor's, also for the reference) and values."""
    ppo_epochs: int = 1
    """Passes over a step's sequences."""
    loss_aggregation: LossAggregation = "token-mean"
    """How token losses become one number, over all ranks."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


@dataclass(kw_only=True, slots=True)
class ActorConfig(Updates):
    """Updates of the policy."""

    learning_rate: float = 1e-5
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low."""
    dual_clip: float = 3.0
    """Bound of the loss for negative advantages (arXiv 1912.09729); 0 turns it off."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(kw_only=True, slots=True)
class CriticConfig(Updates):
    """Updates of the value model; used when algorithm.advantage is gae."""

    learning_rate: float = 1e-4
    value_clip: float = 0.5
    """New values are clipped to this distance from the old ones; 0 turns it off."""


@dataclass(kw_only=True, slots=True)
class Weights:
    """How the actor's weights reach the engines, and how far to trust that they did."""

    transport: Literal["auto", TransportName] = "auto"
    """bucket: SGLang's own update call with one flattened buffer (0.5.6 and newer). tensor: the same call with a list of named tensors. pull: each scheduler copies exactly its own shards out of the trainers' memory; nothing is gathered (0.4.8 and newer). distributed: broadcast from each engine's first rank (0.4.9 and newer). disk: through a checkpoint folder. auto: bucket where this sglang has it, else tensor; with parallel.colocate = false, distributed."""
    bucket_size_mib: int = 512
    """Bytes of one call, or for pull of the buffer for what comes from other hosts, in MiB. The largest tensor, and tensors that fuse on arrival, stay whole even beyond it."""
    folder: str = ""
    """disk, and verify = full: where checkpoints are written. All hosts must see it; empty means the run directory."""
    verify: Literal["off", "log_probs", "bytes", "full"] = "log_probs"
    """off: trust. log_probs: the engine's against the trainer's, at every step. bytes: also read back what the engine holds after each sync. full: also change every tensor first, start from sentinel, and compare with a reload from disk."""


@dataclass(kw_only=True, slots=True)
class Memory:
    """How trainer and engine share a GPU."""

    resume: Literal["staged", "all"] = "staged"
    """staged: the engine's weights before the sync, its KV cache after the trainer's copies are freed. all: both before the sync, as a comparison."""
    offload_parameters: tuple[Literal["actor", "critic", "reference"], ...] = ()
    """Whose parameters wait in host memory while they are not used."""
    offload_gradients: tuple[Literal["actor", "critic"], ...] = ()
    """Whose gradients are added up in host memory."""
    offload_optimizer: tuple[Literal["actor", "critic"], ...] = ()
    """Whose optimizer states wait in host memory between updates."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """What a later run resumes from."""

    every: int = 0
    """Steps between two checkpoints; there is one after the last step too, and one when SIGTERM ends the run. 0: none."""
    folder: str = ""
    """Where the folders step-N are made; all hosts must see it. Empty: checkpoints/ in the run directory."""
    keep: int = 0
    """How many of the newest to keep; 0: all."""
    resume: str = ""
    """A folder step-N, or "latest": the newest in checkpoint.folder; while that has none, the run starts at its first step. The run writes to a directory of its own."""


@dataclass(kw_only=True, slots=True)
class Trackers:
    """Where the rows of metrics.jsonl go too. Rank 0 alone writes."""

    names: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Their packages, tensorboard and wandb, are optional: extra trackers of setup.cfg. wandb is offline where there is no login."""
    project: str = ""
    """wandb's project; empty: WANDB_PROJECT."""
    experiment: str = ""
    """Name of wandb's run; empty: that of the run directory."""


@dataclass(kw_only=True, slots=True)
class Config:
    """One run."""

    run: Run = field(default_factory=Run)
    parallel: Parallel = field(default_factory=Parallel)
    network: Network = field(default_factory=Network)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    task: Task = field(default_factory=Task)
    rollout: Rollout = field(default_factory=Rollout)
    validation: Validation = field(default_factory=Validation)
    algorithm: Algorithm = field(default_factory=Algorithm)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    weights: Weights = field(default_factory=Weights)
    memory: Memory = field(default_factory=Memory)
    trackers: Trackers = field(default_factory=Trackers)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def optimizer_steps(self, role: Literal["actor", "critic"]) -> int:
        """Return how many optimizer steps that model takes in run.steps PPO steps."""
        updates, steps = getattr(self, role), self.run.steps - self.algorithm.critic_warmup * (role == "actor")
        sequences = self.rollout.prompts_per_step * self.rollout.responses_per_prompt
        return max(0, steps) * (sequences // updates.minibatch_size) * updates.ppo_epochs
