"""What a run is: one dataclass for each section of the config, and below each field what it means.

`launch/ppo.py --help` prints these texts. Their first sentences also stand alone there, in the list of common keys.
Nothing here imports torch, so that --help, --dry-run and every mistake in a config are answered at once.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from harness.config.precision import QUANTIZED, Dtype, Precision, RolloutPrecision

TransportName = Literal["pull", "tensor", "bucket", "distributed", "disk"]
TINY_MODELS = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight")
"""model.name of the models that task/tiny_models.py makes on the spot."""
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt"]
DUAL_CLIP = 3.0
"""The policy's loss is at most this times the advantage's size where the advantage is negative (arXiv 1912.09729; verl:
clip_ratio_c)."""

ENGINE_MODELS = ("tokenizer_path", "speculative_draft_model_path")
"""Entries of engine.args that name a model's folder, or a hub id."""
READ, WRITTEN = {"path": "read"}, {"path": "written"}
"""Marks of keys that name files: what a run reads, and folders that it writes to. `named_paths` lists them, and
harness/tools/preflight.py checks each before a run."""


@dataclass(kw_only=True, slots=True)
class Run:
    """How long the run is, its seed, its directory, and when it gives up."""

    dir: str = field(default="", metadata=WRITTEN)
    """Directory that the run writes to. It must not hold another run. Empty: runs/<date>-<time>."""
    steps: int = 3
    """Number of PPO steps. Use at least 2: many failures appear only in the second step."""
    epochs: int = 0
    """Number of passes over the prompts; above 0, it sets run.steps. A last part of a pass that is shorter than a step
    is dropped."""
    seed: int = 0
    """Seed of the model's random weights, of the order of the prompts and of the engine's sampling."""
    timeout_seconds: float = 600.0
    """Seconds that a collective, the engine's start or any phase may take before the run ends with exit code 124."""
    phase_timeouts: dict[str, float] = field(default_factory=dict)
    """Seconds that one phase may take, by its name, such as sync = 60. Replaces run.timeout_seconds for this phase."""
    heartbeat_timeout: float = 10.0
    """Seconds without a heartbeat after which a host counts as lost. Hosts send one every second."""
    inject: tuple[str, ...] = ()
    """Faults to inject, each written KIND@PHASE[:RANK][:STEP], such as kill@sync:1:2. Without RANK it is rank 0,
    without STEP the first time that the phase runs. Kinds for any phase: exception, kill, stop, hang, slow, oom,
    full-disk. Kinds for phases that have something to break: nan-gradient, nan-weight, wrong-shape, dropped-bucket,
    lost-message."""


@dataclass(kw_only=True, slots=True)
class Parallel:
    """The mesh. dp engines of tp x pp ranks each; dp x tp x pp is the number of ranks.

    FSDP2 shards over all of them.
    """

    dp: int = 1
    """Number of engines."""
    tp: int = 2
    """Tensor-parallel ranks of each engine."""
    pp: int = 1
    """Pipeline-parallel stages of each engine."""
    colocate: bool = True
    """Whether an engine rank shares the GPU of its trainer rank. With false each engine rank has a GPU to itself: a
    host then needs two visible GPUs for each rank, and trainers use the first half of them."""
    rank_order: Literal["dp,tp,pp", "dp,pp,tp"] = "dp,tp,pp"
    """How ranks fill the mesh, slowest axis first. Use dp,pp,tp where tp > 1 and pp > 1 and an engine spans hosts:
    SGLang fills hosts in that order."""


@dataclass(kw_only=True, slots=True)
class Network:
    """How the hosts of a run reach each other."""

    interface: str = ""
    """Network interface for traffic between hosts, by name (eth0) or by the network of its address (10.0.0.0/8).
    Empty: GLOO_SOCKET_IFNAME if it is set, else the interface that routes to MASTER_ADDR."""


@dataclass(kw_only=True, slots=True)
class Model:
    """The model that actor, critic and reference start from."""

    name: str = field(default="qwen2", metadata=READ)
    """A local folder, a hub id (OWNER/NAME), or a tiny random model: qwen2, qwen3, llama, qwen3_moe, deepseek_v3 or
    moonlight."""
    dtype: Dtype = "float32"
    """Dtype of the engine's weights, and the one that the trainer computes in. float16 rounds an eighth as much as
    bfloat16, but holds nothing above 65504, and loses what is below 6e-8. Actor and critic therefore multiply their
    losses by 65536 before the backward pass, and divide the gradient by it in float32. Where a gradient is not finite,
    the scale is divided by 4 and the pass run again; at a scale of 1, or with a loss that is not finite, the run fails.
    Resuming keeps the scale."""
    master_dtype: Dtype = "float32"
    """Dtype of the parameters that actor and critic update, of their gradients and of AdamW's moments. bfloat16 (only
    with dtype = bfloat16) halves their memory, but rounds most of an update away for learning rates below about
    1e-4. float16 is refused: AdamW's second moments, which are squares of gradients, would be 0 in it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of a tiny model's config to replace, such as num_hidden_layers = 4. Only for tiny models."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """The trainer's attention, by its name in transformers. auto: sdpa, or eager for models that sdpa computes wrongly
    or not at all. flash_attention_2 needs the package flash-attn, a GPU and dtype = bfloat16 or float16."""
    packed: bool = False
    """Whether the trainer concatenates the sequences of a microbatch in one row instead of padding them. Results are
    the same; nothing is computed on padding."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """Where the first weights come from. checkpoint: the trainer and the engine load the saved model. random: nothing
    is saved or loaded; each rank fills its own shards, and the first sync brings the engine its weights."""
    rollout_precision: RolloutPrecision = "same"
    """Precision of the engine's weights. same: model.dtype. fp8_block: as DeepSeek-V3 is served, the matrices of
    decoder layers in e4m3 with one scale for each 128 x 128 block, quantized anew at each sync. The engine then loads a
    quantized copy of the model, which is written to the run directory. Needs dtype = bfloat16 and sizes of whole
    blocks."""

    @property
    def precision(self) -> Precision:
        """In what the weights are kept, sent and computed with."""
        quantized = QUANTIZED.get(self.rollout_precision)
        return Precision(stored=self.master_dtype, computed=self.dtype, quantized=quantized)


@dataclass(kw_only=True, slots=True)
class Engine:
    """The SGLang engines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engine. auto: CUDA if there is a GPU, else the CPU, with SGLang's CPU mode."""
    initial_weights: Literal["dummy", "checkpoint"] = "dummy"
    """What the engine starts with. dummy: meaningless weights, so that a tensor which the first sync does not bring is
    noticed. checkpoint: the model's own weights."""
    preset: Literal["reproducible", "sglang"] = "reproducible"
    """Arguments for what engine.args does not set. reproducible: on a GPU no CUDA graphs, attention_backend = triton
    and sampling_backend = pytorch, which obeys a seed; they start on any GPU in seconds. sglang: SGLang's own, as in
    production. On a CPU both are the same."""
    start: Literal["auto", "spawn"] = "auto"
    """How the engine's processes start. auto: forked from a process that has imported SGLang meanwhile; with CUDA,
    started early; where neither is possible, spawned. spawn: SGLang's own start, a new Python that imports everything
    anew."""
    base_port: int = 30000
    """First port to try. Each engine of a host takes a block of ports from here on."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of sglang.Engine, by their names in the installed sglang, such as mem_fraction_static = 0.5."""


@dataclass(kw_only=True, slots=True)
class Task:
    """Prompts, and the reward that scores a response."""

    source: tuple[str, ...] = field(default=("arithmetic",), metadata=READ)
    """Where the prompts come from: a jsonl or parquet file, a folder of them, a hub id, or arithmetic (word problems
    made on the spot); several are read one after the other. A row has question and answer, or verl's fields: prompt (a
    list of messages), reward_model.ground_truth and data_source."""
    split: str = "train"
    """Which split to read: the name of a file in a folder, without its ending, or a split of a hub's data set."""
    rows: int = 0
    """Number of rows to use, from the first one on. 0: all."""
    rows_seed: int = -1
    """If at least 0: draw `rows` rows from all of them by NumPy's default_rng with this seed, as verl does with
    data.seed."""
    template: str = "Question: {question}\nAnswer: "
    """Prompt for a row that has a question, which replaces {question}. Messages use the tokenizer's chat template."""
    max_prompt_tokens: int = 256
    """Longest prompt, in tokens. task.long_prompts says what happens to longer ones."""
    long_prompts: Literal["filter", "error"] = "filter"
    """What to do with prompts longer than max_prompt_tokens. filter: leave them out. error: fail, naming the row."""
    reward: str = field(default="gsm8k", metadata=READ)
    """How a response is scored. gsm8k: 1 if the number after #### is right, however it is written. gsm8k_strict: the
    same, read as verl reads it. math: 1 if math-verify finds the ground truth. math_strict: 1 if the last \\boxed{} has
    it, compared as verl compares it. digits: the share of characters that are digits. data_source: gsm8k_strict or
    math_strict, as the row says. MODULE:FUNCTION or FILE.py:FUNCTION: your own, called as verl calls it, with
    data_source, solution_str, ground_truth and extra_info."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """What the engines generate in each step."""

    prompts_per_step: int = 8
    """Number of prompts in a step, over all engines."""
    responses_per_prompt: int = 2
    """Number of responses to each prompt. GRPO and RLOO compare them with each other."""
    max_response_tokens: int = 16
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, at least 1e-6. The trainer's log-probs use it too. Below 1e-6 SGLang samples greedily, and
    greedy responses teach nothing."""
    top_p: float = 1.0
    """Nucleus sampling: sample among the likeliest tokens that together have this probability."""
    top_k: int = -1
    """Sample among this many likeliest tokens, at least 2. -1: all."""
    ignore_eos: bool = False
    """Whether to generate up to max_response_tokens even after the end token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the response keeps them. SGLang searches only the last tokens, one more than the
    string has when it is tokenized alone, so a string that is tokenized differently may be missed."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the end token; the response keeps them."""
    truncated: Literal["train", "mask"] = "train"
    """What to do with responses that max_response_tokens cut off. train: train on them. mask: use their reward for the
    advantages, but leave them out of the losses."""
    aborted: Literal["error", "mask", "train"] = "error"
    """What to do with responses that SGLang aborted, or that are empty. error: fail with SGLang's reason. mask: count
    their reward in the metrics only. train: train on what there is of them."""
    routing: Literal["off", "record", "replay"] = "off"
    """What to do with the experts that each token took in the engine, for a mixture of experts. record: compare them
    with the trainer's own choice in the metrics routing/, and save them with rollout.save. replay: the actor's
    log-probs and updates also take the engine's experts, with the weights that the trainer's routers give them."""
    save: str = field(default="", metadata=WRITTEN)
    """Folder in which to save each step's responses, log-probs and scores."""
    load: str = field(default="", metadata=READ)
    """Folder that a run with rollout.save wrote: the trainer learns from it, without an engine."""
    only: bool = False
    """Whether to run the engine alone: generate, score and save, on the model's own checkpoint."""

    @property
    def has_both(self) -> bool:
        """Whether the run has an engine and a learner."""
        return not (self.load or self.only)

    @property
    def sampling(self) -> dict[str, float]:
        """How a rollout samples, as SGLang names it."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(kw_only=True, slots=True)
class Validation:
    """Prompts that are only scored, never trained on. For rewards of 0 and 1 the mean is the accuracy."""

    source: tuple[str, ...] = field(default=(), metadata=READ)
    """Where the prompts come from, as for task.source. Empty: no validation. Otherwise there is one after the last
    step."""
    split: str = "test"
    """Which split to read, as for task.split."""
    rows: int = 0
    """Number of rows to use, from the first one on. 0: all."""
    rows_seed: int = -1
    """Draw the rows, as for task.rows_seed."""
    before_train: bool = False
    """Whether to validate before the first step too."""
    every: int = 0
    """Number of steps between validations. 0: only after the last step."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""

    def is_due(self, index: int, steps: int) -> bool:
        """Return whether to validate after `index` updates of `steps`."""
        between = self.before_train if index == 0 else bool(self.every) and index % self.every == 0
        return bool(self.source) and (between or index == steps)


@dataclass(kw_only=True, slots=True)
class Algorithm:
    """How rewards become advantages."""

    advantage: Literal["gae", "grpo", "rloo"] = "gae"
    """Estimator of the advantages. gae uses a critic. grpo compares a response with the mean of all responses to its
    prompt, rloo with the mean of the others."""
    gamma: float = 1.0
    """Discount factor of GAE."""
    lam: float = 0.95
    """Lambda of GAE."""
    normalize_by_std: bool = True
    """Whether GRPO divides by the standard deviation of the responses to a prompt."""
    kl_placement: Literal["none", "reward", "loss"] = "reward"
    """Where the KL to the frozen reference model counts. reward: its estimate k1 is subtracted from the reward of each
    token. loss: its estimate k3 is added to the actor's loss (http://joschu.net/blog/kl-approx.html; as verl's
    defaults). none: there is no reference model."""
    kl_coefficient: float = 0.001
    """Weight of the KL."""
    critic_warmup: int = 0
    """Number of steps at the start in which only the critic learns."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a value model."""
        return self.advantage == "gae"


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """The policy's loss and its optimizer steps.

    The critic takes its steps in the same way, at its own learning rate.
    """

    learning_rate: float = 1e-5
    """Learning rate of AdamW, after the warm-up and before any decay."""
    schedule: Schedule = "constant"
    """Schedule of the learning rate over all optimizer steps of the model, by its name in transformers."""
    warmup_steps: int = 0
    """Number of optimizer steps in which the learning rate rises from 0 to learning_rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW. torch's own default is 0.01."""
    minibatch_size: int = 8
    """Number of sequences in one optimizer step, over all ranks. It means the same on any number of ranks."""
    microbatch_size: int = 4
    """Number of sequences in one forward and backward pass, on one rank."""
    tokens_per_microbatch: int = 0
    """Largest number of tokens in one forward and backward pass, on one rank, padding included unless model.packed.
    Above 0, it replaces microbatch_size, and sequences go to the ranks that have fewest tokens; log-probs and values
    too."""
    ppo_epochs: int = 1
    """Number of passes over the sequences of a step."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass, which saves memory and costs time."""
    clip_low: float = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """Upper side of that range."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The value model, which only algorithm.advantage = gae has. All that is not here is as in [actor]."""

    learning_rate: float = 1e-4
    """Learning rate of AdamW, after actor.warmup_steps and before any decay."""
    value_clip: float = 0.5
    """New values are clipped to this distance from the old ones. 0: off."""


@dataclass(kw_only=True, slots=True)
class Weights:
    """How the actor's weights reach the engines, and how that is verified."""

    transport: Literal["auto", TransportName] = "auto"
    """How the weights travel. auto: bucket; with parallel.colocate = false, distributed. bucket: SGLang's update call
    with one flattened buffer. tensor: the same call with a list of named tensors. pull: each scheduler copies its own
    shards from the trainers' memory, and nothing is gathered. distributed: a broadcast from the first rank of each
    engine. disk: through a checkpoint folder."""
    bucket_size_mib: int = 512
    """Size limit of one update call, in MiB; for pull, of the receive buffer for shards of other hosts. A tensor, or
    tensors that SGLang fuses, are never split, even beyond it."""
    folder: str = field(default="", metadata=WRITTEN)
    """Where checkpoints for disk are written. All hosts must share it. Empty: the run directory."""
    verify: bool = True
    """Whether to prove that each sync arrived. Before the first step engine and trainer are compared on the model's own
    checkpoint and, once, with changed weights. What a sync is to fill is overwritten before it; after it, and after the
    rollout, fingerprints of all that the engine holds are compared with the trainer's, and so are log-probs."""


@dataclass(kw_only=True, slots=True)
class Memory:
    """How trainer and engine share a GPU."""

    resume: Literal["staged", "all"] = "staged"
    """When the engine takes its memory back. staged: its weights before the sync, its KV cache once the trainer's
    copies are freed. all: both before the sync, which needs more memory."""
    offload_parameters: tuple[Literal["actor", "critic", "reference"], ...] = ()
    """Models whose parameters wait in host memory while they are not used."""
    offload_optimizer: tuple[Literal["actor", "critic"], ...] = ()
    """Models whose optimizer states wait in host memory between updates."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """What a later run can resume from."""

    every: int = 0
    """Number of steps between two checkpoints. 0: none. Otherwise one is also saved after the last step, and when
    SIGTERM ends the run."""
    folder: str = field(default="", metadata=WRITTEN)
    """Where the checkpoints, folders step-N, are made. All hosts must share it. Empty: checkpoints/ in the run
    directory."""
    keep: int = 0
    """Number of checkpoints to keep, the newest. 0: all."""
    resume: str = field(default="", metadata=READ)
    """The checkpoint to resume from: a folder step-N, or latest, the newest in checkpoint.folder. With latest and no
    checkpoint yet, the run starts from the beginning. It writes to a new run directory in any case."""


@dataclass(kw_only=True, slots=True)
class Trackers:
    """Where else the rows of metrics.jsonl go. Only rank 0 writes."""

    names: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers to write to. Their packages are optional (pip install tensorboard wandb). Without a login wandb is
    offline."""
    project: str = ""
    """Project in wandb. Empty: WANDB_PROJECT."""
    experiment: str = ""
    """Name of the run in wandb. Empty: the name of the run directory."""


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
        steps = self.run.steps - self.algorithm.critic_warmup * (role == "actor")
        sequences = self.rollout.prompts_per_step * self.rollout.responses_per_prompt
        return max(0, steps) * (sequences // self.actor.minibatch_size) * self.actor.ppo_epochs


def named_paths(
    config: Config, use: Literal["read", "written"], sections: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each key that names what a run reads, or a folder that it writes to, with a value; a list has several.

    sections: those of the config that the job uses; None: all. A value that is read may be another name than a path,
    such as a hub id.
    """
    for section in fields(config):
        values = getattr(config, section.name)
        for each in fields(values) if sections is None or section.name in sections else ():
            given = getattr(values, each.name) if each.metadata.get("path") == use else ()
            for value in (given,) if isinstance(given, str) else given:
                if value:
                    yield f"{section.name}.{each.name}", value
    if use == "read" and (sections is None or "engine" in sections):
        names = {f"engine.args.{name}": config.engine.args.get(name) for name in ENGINE_MODELS}
        yield from ((key, given) for key, given in names.items() if given and isinstance(given, str))
