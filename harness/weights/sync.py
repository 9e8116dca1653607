"""One sync: all weights of the trainer's ranks brought to the engine, in checkpoint names, by one of the transports."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from harness.config import schema
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.units import MIB
from harness.trainer.model import named_tensors
from harness.weights.gather import gather, plan_buckets
from harness.weights.groups import fusing_groups
from harness.weights.names import checkpoint_layout
from harness.weights.presync_checks import check_complete, check_coverage, check_finite, check_shards
from harness.weights.pull.link import PullLink
from harness.weights.transports import (
    DiskTransport,
    DistributedTransport,
    PullTransport,
    TensorTransport,
    Transport,
    default_transport,
)
from harness.weights.update_group import UpdateGroup


class WeightSync:
    """Brings the weights of one model to the engine of this rank's group. Planned once: names and shapes do not change."""

    def __init__(
        self,
        engine: VerlEngine,
        model: nn.Module,
        config: schema.Weights,
        folder: Path,
        dtype: torch.dtype | None = None,
        offloaded: bool = False,
    ) -> None:
        """Plan the buckets and choose the transport; a collective call of all ranks.

        folder: the run directory, for checkpoints on disk. dtype: the engine's, to which parameters are cast on their way;
        None: they are sent as the model has them. offloaded: the model's memory goes between syncs, so that no scheduler may
        hold it open. Raise NotAViewError for an architecture that the sync cannot name,
        WeightsRefused for shards that do not fit together.
        """
        self.engine = engine
        self.config = config
        self.folder = Path(config.folder).resolve() if config.folder else Path(folder)
        self.offloaded = offloaded
        self.live = dict(named_tensors(model))
        self.layout = checkpoint_layout(model, self.live, dtype)
        check_shards(self.live)
        check_complete(self.layout, self.live)
        limit = config.bucket_size_mib * MIB
        self.buckets = plan_buckets(self.layout, self.live, limit)
        self.link = PullLink(
            engine=engine, live=self.live, groups=fusing_groups(self.layout, self.live), staging_limit=limit
        )
        self._checked = False
        self.transport_name = default_transport(engine.api) if config.transport == "auto" else config.transport
        self.transport = self._make_transport()

    def _make_transport(self) -> Transport:
        if self.transport_name == "pull":
            return PullTransport(self.engine, self.link)
        if self.transport_name in ("tensor", "bucket"):
            return TensorTransport(self.engine, flattened=self.transport_name == "bucket")
        if self.transport_name == "distributed":
            return DistributedTransport(self.engine, UpdateGroup(self.engine))
        # The target serves as source: of an empty folder no config or tokenizer is copied, and the engine has its own.
        return DiskTransport(self.engine, self.folder, lambda target: self.save(target, target, dist.get_rank()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for bucket in self.buckets for entry in bucket.entries)

    @torch.no_grad()
    def push(self) -> None:
        """Send all weights; a collective call of all ranks. The prefix cache is flushed with the last bucket.

        Unless verification is off, what cannot arrive is refused first (WeightsRefused): at the first push the engine's
        own loader is traced with every tensor, and at each push every shard must be there and every value finite.
        """
        if self.config.verify != "off":
            check_shards(self.live)
            check_finite(self.live)
            if not self._checked and self.engine.api.custom_weight_loader:
                self.link.trace()
                check_coverage(self.link.groups, self.link.coverage)
                self._checked = True
        self.transport.push(self.buckets, lambda bucket: gather(bucket, self.live))
        if self.offloaded:
            self.link.release()

    def close(self) -> None:
        self.transport.close()
        self.link.release()

    @torch.no_grad()
    def save(self, folder: Path, source: Path, rank: int) -> None:
        """Write the trainer's weights as a checkpoint folder; a collective call, rank 0 writes.

        source: the folder whose config.json and tokenizer belong to the model; of a hub id, only weights are written. Its
        index of shards is left out: it would hide the one file from a loader.
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
                if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
                    (folder / file.name).write_bytes(file.read_bytes())
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
