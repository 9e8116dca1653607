"""One sync: every bucket gathered over the trainer's ranks and handed to the engine, in checkpoint names."""

from pathlib import Path

import torch
from torch import nn

from harness.config import schema
from harness.rollout.verl_engine import VerlEngine
from harness.trainer.model import named_tensors
from harness.weights.gather import gather, plan_buckets
from harness.weights.names import checkpoint_layout

MIB = 1 << 20


class WeightSync:
    """From one trained model to the engine of this rank's group. Planned once: names and shapes do not change."""

    def __init__(self, engine: VerlEngine, model: nn.Module, config: schema.Weights) -> None:
        """Raises NotAViewError for an architecture that the sync cannot name."""
        self.engine = engine
        self.live = dict(named_tensors(model))
        self.layout = checkpoint_layout(model, self.live)
        self.buckets = plan_buckets(self.layout, config.bucket_megabytes * MIB)
        self.load_format = "flattened_bucket" if config.transport == "bucket" else None

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoint tensors."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @torch.no_grad()
    def push(self) -> None:
        """Send all weights; a collective call of all ranks. The prefix cache is flushed with the last bucket."""
        with self.engine.weight_update():
            for index, bucket in enumerate(self.buckets):
                last = index + 1 == len(self.buckets)
                tensors = gather(bucket, self.live)
                self.engine.update_weights_from_tensor(tensors, load_format=self.load_format, flush_cache=last)

    @torch.no_grad()
    def save(self, folder: Path, source: Path, rank: int) -> None:
        """Write the trainer's weights as a checkpoint folder; a collective call, rank 0 writes.

        source: the folder whose config.json and tokenizer belong to the model; where it is a hub id, only weights are
        written. Its index of shards is left out: it would hide the one file from a loader.
        """
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            gathered = gather(bucket, self.live)
            if rank == 0:
                tensors |= {name: tensor.cpu().clone() for name, tensor in gathered}
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for file in source.iterdir() if source.is_dir() else ():
                if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
                    (folder / file.name).write_bytes(file.read_bytes())
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
