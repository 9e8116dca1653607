"""The layer for multi-token prediction (MTP) of a checkpoint, which SGLang serves as its draft model.

Transformers' classes have no such layer, so no trainer holds it and nothing here trains it. It is read from the model's
folder and sent with the trained weights at every sync, as it is. So it is never lost: not in dummy weights, in released
memory, or in a checkpoint of the run. Its embedding and head are the target's own, so they follow the training; the
layer itself does not, and the more the target changes, the fewer of its drafts are accepted.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig

from harness.config.draft_rules import sends_mtp_layer
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.trainer.rows import RowShards
from harness.weights.converter import Converter
from harness.weights.names import files_in_checkpoint
from harness.weights.tensor_view import TensorView

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""The end of names under which published checkpoints repeat the embedding and the head. SGLang's loader ignores
them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLayer:
    """The MTP layers of a checkpoint, as every sync sends them. Empty if the engine has no draft model."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By checkpoint name. Sharded by rows as the trainer's, or plain if those are."""
    views: tuple[TensorView, ...] = ()
    copies: frozenset[str] = frozenset()
    """Names in the checkpoint that are not sent, see COPIES."""

    def after(self, trained: Converter) -> Converter:
        """Return what sends the trainer's tensors, and then these."""
        return _WithDraftLayer(trained, self) if self.tensors else trained


@dataclass(frozen=True, slots=True)
class _WithDraftLayer:
    trained: Converter
    draft: DraftLayer

    @property
    def renames_only(self) -> bool:
        return self.trained.renames_only

    def layout(self) -> tuple[TensorView, ...]:
        return (*self.trained.layout(), *self.draft.views)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {**self.trained.tensors(), **self.draft.tensors}


NO_DRAFT_LAYER = DraftLayer()


def draft_layer_of(config: Config, model: str, trained: Converter, device: torch.device) -> DraftLayer:
    """Return the layer that the run's engine serves as its draft model, see read_draft_layer; NO_DRAFT_LAYER if it
    serves none.
    """
    return read_draft_layer(model, trained, device) if sends_mtp_layer(config.engine.args) else NO_DRAFT_LAYER


def read_draft_layer(model: str, trained: Converter, device: torch.device) -> DraftLayer:
    """Read this rank's rows of the MTP layers in a checkpoint: model.layers.N, numbered on from the decoder layers.

    model: a folder, or a hub id in the cache. trained: what is sent of the trainer. A tensor gets the dtype of its
    counterpart in the last decoder layer, else that of the embedding. Raise ConfigError if the checkpoint has no such
    layer.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    prefixes = tuple(f"model.layers.{number}." for number in range(first, first + count))
    files = {name: file for name, file in files_in_checkpoint(model).items() if prefixes and name.startswith(prefixes)}
    copies = frozenset(name for name in files if name.endswith(COPIES))
    if not files.keys() - copies:
        raise ConfigError(
            f"the checkpoint in {model} must have the layer that SGLang's draft model serves, model.layers.{first}.*, and has"
            " none; use a complete checkpoint, or remove engine.args.speculative_algorithm"
        )
    dtypes = {view.name: view.dtype for view in trained.layout()}
    usual = next(dtype for name, dtype in dtypes.items() if name.endswith("embed_tokens.weight"))
    mesh = next((each.device_mesh for each in trained.tensors().values() if isinstance(each, DTensor)), None)
    tensors, views = {}, []
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in set(files.values())}
        for name in sorted(files.keys() - copies):
            _, _, rest = name.removeprefix("model.layers.").partition(".")
            dtype = dtypes.get(f"model.layers.{first - 1}.{rest}", usual)
            saved = opened[files[name]].get_slice(name)
            shape = tuple(saved.get_shape())
            stride = torch.empty(shape, device="meta").stride()
            if mesh is None:
                tensors[name] = saved[:].to(device, dtype)
            else:
                rows = RowShards(shape[0], 1, mesh.size()).rows_of(mesh.get_local_rank())
                local = saved[rows.start : rows.stop].to(device, dtype).contiguous()
                tensors[name] = DTensor.from_local(
                    local, mesh, (Shard(0),), run_check=False, shape=torch.Size(shape), stride=stride
                )
            views.append(TensorView(name=name, of=name, dtype=dtype, shape=shape, stride=tuple(stride)))
    return DraftLayer(tensors=tensors, views=tuple(views), copies=copies)
