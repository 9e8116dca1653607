"""WeightSync: all weights of the trainer's ranks brought to the engine under their checkpoint names."""

from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.runtime.units import MIB
from harness.trainer.model import named_tensors, tied_names
from harness.weights.converter import CheckpointConverter, Converter
from harness.weights.draft_layer import NO_DRAFT_LAYER, DraftLayer
from harness.weights.loader import EngineLoader
from harness.weights.model_files import copy_all_but_weights
from harness.weights.presync_checks import check_complete, check_coverage, check_finite, check_shards
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.transports import Transport, make_transport
from harness.weights.worker.model_state import WEIGHTS_IN_8_BITS, reset_scales_of_kv_cache


class WeightSync:
    """Bring the weights of one model to the engine of this rank's group, again and again."""

    def __init__(
        self,
        engine: RolloutEngine,
        model: nn.Module,
        *,
        transport: str | Transport = "bucket",
        folder: Path | str = ".",
        bucket_size_mib: int = 512,
        check: bool = True,
        dtype: torch.dtype | None = None,
        offloaded: bool = False,
        converter: Converter | None = None,
        checkpoint_names: Collection[str] = (),
        draft_layer: DraftLayer = NO_DRAFT_LAYER,
    ) -> None:
        """Plan what is sent. A collective call of all ranks, as every method is.

        transport: one of weights/transports.py by name, or another one. folder: where `disk` writes; all hosts must see it.
        bucket_size_mib: size limit of one update call. check: refuse weights that cannot arrive, before the engine is
        touched. dtype: the engine's, to which parameters are cast on their way; None sends them as the model has them.
        offloaded: the model's memory is given up between syncs. converter: what is sent, in place of the model's tensors
        and the draft layer's under their checkpoint names. checkpoint_names: of the tensors in the model's own checkpoint, if
        they are known. draft_layer: of the checkpoint, sent with the model's tensors.

        Raise NotAViewError for an architecture that needs another converter, WeightsRefused for shards that do not fit
        together.
        """
        self.engine = engine
        self.model = model
        self.dtype = dtype
        self.folder = Path(folder).resolve()
        self.check = check
        self.draft_layer = draft_layer
        sent_by = converter or draft_layer.after(CheckpointConverter(model, dtype))
        self.weights = TrainerWeights(sent_by, bucket_size_mib * MIB)
        check_shards(self.weights.tensors)
        check_complete(self.weights.layout, self.weights.tensors)
        self.loader = EngineLoader(engine, self.weights.groups)
        self._covered = False
        sent = {view.name for view in self.weights.layout} | draft_layer.copies
        self._sends_whole_checkpoint = all(all_gather(bool(checkpoint_names) and sent.issuperset(checkpoint_names)))
        self.unfilled: list[str] = []
        """Sentences on parameters of the engine that neither this sync nor the model's own checkpoint fills."""
        if isinstance(transport, str):
            transport = make_transport(transport, engine, self.folder, offloaded=offloaded)
        self.transport = transport

    @torch.no_grad()
    def update_engine(self) -> None:
        """Send all weights; the engine forgets the prefixes that it computed with the old ones.

        With `check`, raise WeightsRefused before the engine is touched: if a shard is missing, if a value is not finite,
        or if the engine's own loader, traced at the first sync, would not take every tensor whole.
        """
        self.weights.refresh()
        if self.check:
            self._refuse_what_cannot_arrive()
        self.restore_scales()
        self.transport.send(self.weights)

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that what is sent is made of: the model's, and those of the draft's layer."""
        return dict(named_tensors(self.model)) | dict(self.draft_layer.tensors)

    def restore_scales(self) -> None:
        """Give an engine in FP8 the scales of its KV cache, which no checkpoint of ours has (no-op for other engines)."""
        if self.engine.can_ask and any(view.dtype in WEIGHTS_IN_8_BITS for view in self.weights.layout):
            with self.engine.weight_update():
                self.engine.ask(reset_scales_of_kv_cache)

    def _refuse_what_cannot_arrive(self) -> None:
        check_shards(self.weights.tensors)
        check_finite(self.weights.tensors, self.weights.layout)
        if self.engine.can_ask and not self._covered:
            self.loader.trace_once()
            self.unfilled = check_coverage(
                self.weights.groups,
                self.loader.coverage,
                whole_checkpoint=self._sends_whole_checkpoint,
                tied=tied_names(self.model),
                buffers=[name for name, each in named_tensors(self.model) if not isinstance(each, nn.Parameter)],
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
        """Write the trainer's own weights, in `dtype` and not quantized, as a checkpoint folder that transformers loads.

        Otherwise as `save`.
        """
        unquantized = self.draft_layer.after(CheckpointConverter(self.model, self.dtype))
        plain = TrainerWeights(unquantized, self.weights.bucket_bytes)
        self._save(plain, folder, source)

    def _save(self, weights: TrainerWeights, folder: Path, source: Path) -> None:
        weights.save(folder)
        if dist.get_rank() == 0 and source.is_dir():
            copy_all_but_weights(source, folder)
