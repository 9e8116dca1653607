"""One sync: every bucket gathered over the trainer's ranks and handed to the engine, in checkpoint names."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from harness.config import schema
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.units import MIB
from harness.trainer.model import named_tensors
from harness.weights.gather import gather, plan_buckets
from harness.weights.names import checkpoint_layout
from harness.weights.presync_checks import check_complete, check_coverage, check_finite, check_shards
from harness.weights.stream.weight_link import WeightLink
from harness.weights.transports import (
    DiskTransport,
    DistributedTransport,
    StreamTransport,
    TensorTransport,
    Transport,
    default_transport,
)
from harness.weights.update_group import UpdateGroup
from harness.weights.worker.reader import LoadCoverage


class WeightSync:
    """Brings the weights of one model to the engine of this rank's group. Planned once: names and shapes do not change."""

    def __init__(
        self,
        engine: VerlEngine,
        model: nn.Module,
        config: schema.Weights,
        folder: Path,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Plan the buckets and choose the transport; a collective call of all ranks.

        folder: the run directory, for checkpoints on disk. dtype: the engine's, to which parameters are cast on their way;
        None: they are sent as the model has them. Raise NotAViewError for an architecture that the sync cannot name,
        WeightsRefused for shards that do not fit together.
        """
        self.engine = engine
        self.config = config
        self.live = dict(named_tensors(model))
        self.layout = checkpoint_layout(model, self.live, dtype)
        check_shards(self.live)
        check_complete(self.layout, self.live)
        self.buckets = plan_buckets(self.layout, self.live, config.bucket_size_mib * MIB)
        self._link: WeightLink | None = None
        self.coverage: tuple[LoadCoverage, ...] = ()
        """What the loader of each scheduler makes of the buckets, as traced when a link was last opened."""
        self._checked = False
        self.transport_name = default_transport(engine.api) if config.transport == "auto" else config.transport
        self.transport = self._make_transport(Path(config.folder).resolve() if config.folder else Path(folder))

    def _make_transport(self, folder: Path) -> Transport:
        if self.transport_name == "stream":
            return StreamTransport(self.engine, self.live, self.link)
        if self.transport_name in ("tensor", "bucket"):
            return TensorTransport(self.engine, flattened=self.transport_name == "bucket")
        if self.transport_name == "distributed":
            return DistributedTransport(self.engine, UpdateGroup(self.engine))
        # The target serves as source: of an empty folder no config or tokenizer is copied, and the engine has its own.
        return DiskTransport(self.engine, folder, lambda target: self.save(target, target, dist.get_rank()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for bucket in self.buckets for entry in bucket.entries)

    def link(self) -> WeightLink:
        """Return the slots beside the schedulers; the first call, a collective one of all ranks, opens them."""
        if self._link is None or self._link.broken:
            self.close_link()
            layout, largest = (bucket.entries for bucket in self.buckets), max(each.nbytes for each in self.buckets)
            self._link = WeightLink.open(self.engine, tuple(layout), largest)
            self.coverage = self._link.coverage
        return self._link

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
                check_coverage([bucket.entries for bucket in self.buckets], self.link().coverage)
                self._checked = True
                self._close_idle_link()
        self.transport.push(self.buckets, lambda bucket: gather(bucket, self.live))

    def trace_again(self) -> None:
        """Have every scheduler find anew what its loader fills: sets `coverage`. A collective call."""
        self.close_link()
        self.link()
        self._close_idle_link()

    def _close_idle_link(self) -> None:
        if self.transport_name != "stream":
            self.close_link()  # it keeps two buckets

    def parts(self) -> dict[str, float]:
        """Return the seconds of the last push's parts on this rank, as WeightLink.seconds names them; stream only."""
        return dict(self._link.seconds) if self._link else {}

    def close_link(self) -> None:
        """Give the slots back; a later link() opens new ones. A collective call."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def close(self) -> None:
        self.transport.close()
        self.close_link()

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
                if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
                    (folder / file.name).write_bytes(file.read_bytes())
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
