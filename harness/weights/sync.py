"""WeightSync: all weights of the trainer's ranks brought to the engine under their checkpoint names."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.runtime import MIB
from harness.trainer.model import named_tensors, tied_names
from harness.weights.loader import EngineLoader
from harness.weights.model_files import copy_all_but_weights
from harness.weights.presync_checks import check_complete, check_coverage, check_finite, check_shards
from harness.weights.sent_model import SentModel
from harness.weights.traced.model_state import WEIGHTS_IN_8_BITS, reset_scales_of_kv_cache
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.transports import Transport, make_transport


class WeightSync:
    """Bring the weights of one model to the engine of this rank's group, again and again."""

    def __init__(
        self,
        engine: RolloutEngine,
        sent: SentModel,
        *,
        transport: str | Transport = "bucket",
        folder: Path | str = ".",
        bucket_size_mib: int = 512,
        check: bool = True,
        offloaded: bool = False,
    ) -> None:
        """Plan what is sent. A collective call of all ranks, as every method is.

        transport: one of weights/transports.py by name, or another one. folder: where `disk` writes; all hosts must see
        it. bucket_size_mib: size limit of one update call. check: refuse weights that cannot arrive, before the engine
        is touched. offloaded: the model's memory is given up between syncs. Raise WeightsRefused for shards that do not
        fit together.
        """
        self.engine = engine
        self.sent = sent
        self.folder = Path(folder).resolve()
        self.check = check
        self.weights = TrainerWeights(sent.converter, bucket_size_mib * MIB)
        check_shards(self.weights.tensors)
        check_complete(self.weights.layout, self.weights.tensors)
        self.loader = EngineLoader(engine, self.weights.groups)
        self._covered = False
        names, own = {view.name for view in self.weights.layout}, sent.checkpoint_names
        self._sends_whole_checkpoint = all(all_gather(bool(own) and (names | sent.draft_layer.copies).issuperset(own)))
        self.unfilled: list[str] = []
        """Sentences on parameters of the engine that neither this sync nor the model's own checkpoint fills."""
        if isinstance(transport, str):
            transport = make_transport(transport, engine, self.folder, offloaded=offloaded)
        self.transport = transport

    @torch.no_grad()
    def update_engine(self) -> None:
        """Send all weights; the engine forgets the prefixes that it computed with the old ones.

        With `check`, raise WeightsRefused before the engine is touched: if a shard is missing, if a value is not
        finite, or if the engine's own loader, traced at the first sync, would not take every tensor whole.
        """
        self.weights.refresh()
        if self.check:
            self._refuse_what_cannot_arrive()
        self.restore_scales()
        self.transport.send(self.weights)

    def restore_scales(self) -> None:
        """Give an engine in FP8 the scales of its KV cache, which no checkpoint of ours has (no-op for other
        engines).
        """
        if self.engine.can_ask and any(view.dtype in WEIGHTS_IN_8_BITS for view in self.weights.layout):
            with self.engine.weight_update():
                self.engine.ask(reset_scales_of_kv_cache)

    def _refuse_what_cannot_arrive(self) -> None:
        check_shards(self.weights.tensors)
        check_finite(self.weights.tensors, self.weights.layout)
        if self.engine.can_ask and not self._covered:
            self.loader.trace_once()
            model = self.sent.model
            self.unfilled = check_coverage(
                self.weights.groups,
                self.loader.coverage,
                whole_checkpoint=self._sends_whole_checkpoint,
                tied=tied_names(model),
                buffers=[name for name, each in named_tensors(model) if not isinstance(each, nn.Parameter)],
            )
            self._covered = True

    def close(self) -> None:
        """Give back what the transport keeps between syncs. May be repeated."""
        self.transport.close()

    def save(self, folder: Path, source: Path) -> None:
        """Write the weights, as the last sync sent them, as a checkpoint folder that the engine loads; rank 0 writes.

        source: the folder whose config.json and tokenizer belong to the model. If it is a hub id, only weights are
        written. Its index of shards is left out, because a loader that finds it does not look at the one file.
        """
        self._save(self.weights, folder, source)

    def save_model(self, folder: Path, source: Path) -> None:
        """Write the trainer's own weights, in the engine's dtype and not quantized, as a checkpoint folder that
        transformers loads.

        Otherwise as `save`.
        """
        unquantized = TrainerWeights(self.sent.unquantized or self.sent.converter, self.weights.bucket_bytes)
        self._save(unquantized, folder, source)

    def _save(self, weights: TrainerWeights, folder: Path, source: Path) -> None:
        weights.save(folder)
        if dist.get_rank() == 0 and source.is_dir():
            copy_all_but_weights(source, folder)
