"""TrainerWeights: the weights of one sync, in whichever form a transport takes them."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from harness.trainer.rows import RowShards
from harness.weights import gather
from harness.weights.converter import Converter
from harness.weights.fusing import FusingGroup, fusing_groups
from harness.weights.gather import Bucket, plan_buckets


class TrainerWeights:
    """What the trainer's ranks send: as gathered buckets, as this rank's tensors, or as a checkpoint folder.

    The plans are made when they are first needed: a pull never needs buckets.
    """

    def __init__(self, converter: Converter, bucket_bytes: int) -> None:
        self.converter = converter
        self.bucket_bytes = bucket_bytes
        """Size limit of one bucket."""
        self.layout = converter.layout()
        """The checkpoint tensors, each a view of one of `tensors`."""
        self.tensors = converter.tensors()
        """The tensors to send, by name: DTensors sharded by rows, or plain tensors."""

    def refresh(self) -> None:
        """Take the tensors as they are now. A collective call of all ranks."""
        self.tensors = self.converter.tensors()

    @cached_property
    def groups(self) -> tuple[FusingGroup, ...]:
        """The checkpoint tensors by what the engine may fuse."""
        return fusing_groups(self.layout)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The checkpoint tensors in buckets, one for each call of the engine."""
        return self.buckets_of(self.tensors)

    def buckets_of(self, names: Collection[str]) -> tuple[Bucket, ...]:
        """Return buckets of these tensors alone, of those that are sent. What fuses stays together."""
        shards = {name: RowShards.of(tensor) for name, tensor in self.tensors.items()}
        wanted = [tuple(view for view in group.views if view.of in names) for group in self.groups]
        return plan_buckets([FusingGroup(views=views) for views in wanted if views], shards, self.bucket_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoint tensors."""
        return sum(view.nbytes for view in self.layout)

    def gather(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Return the bucket's tensors, full and contiguous, under their checkpoint names.

        A collective call of all ranks.
        """
        return bucket.named_tensors(self.gather_buffer(bucket))

    def gather_buffer(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's buffer, in which its views lie. A collective call of all ranks."""
        return gather.gather(bucket, self.tensors)

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write all weights into the folder as one safetensors file. A collective call of all ranks; rank 0 writes."""
        from safetensors.torch import save_file

        writes = dist.get_rank() == 0
        saved: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            gathered = self.gather(bucket)
            if writes:
                saved |= {name: tensor.cpu().clone() for name, tensor in gathered}
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
