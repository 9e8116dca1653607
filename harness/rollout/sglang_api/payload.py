"""What travels from a trainer rank to the schedulers: serialized tensors and flattened buckets.

On a GPU a payload is a CUDA IPC handle: the sender's memory must live until the engine has answered. On CPU it names
shared memory through a file descriptor that can be fetched once: each scheduler process needs a payload of its own.
"""

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import BUCKET, MODEL_RUNNER, PATCHES, SGLangApi

WEIGHT_UPDATER = "srt/model_executor/model_runner_components/weight_updater.py"


def serialize(obj: object) -> bytes:
    """Return what sglang's MultiprocessingSerializer.serialize(obj) returns: a pickle by ForkingPickler.

    torch.multiprocessing has registered with it how tensors share memory. As bytes; its base64 form (output_str=True)
    is for HTTP alone, and returns bytes in 0.5.4 by mistake. The receiver reads it with ForkingPickler.loads until
    0.5.4, then with an unpickler that allows only torch, sglang and builtin classes.
    """
    import torch.multiprocessing  # noqa: F401 - registers the reducers of tensors

    return bytes(ForkingPickler.dumps(obj))


def serialize_by_value(tensor: Any) -> bytes:
    """Return a CPU tensor with its bytes, not a handle: any process of any host may open it, any number of times."""
    return pickle.dumps(tensor)


def deserialize(payload: bytes) -> Any:
    """Return what `serialize` was given; for payloads of our own trainer, since a pickle may do anything."""
    return pickle.loads(payload)


def local_serialized_tensor(api: SGLangApi, values: Sequence[bytes]) -> Any:
    """Return what stands for one tensor of which TP rank r opens values[r], serialized by the trainer rank beside it."""
    has_class = api.tree.find_class("LocalSerializedTensor", WEIGHT_UPDATER) is not None
    return source.load(WEIGHT_UPDATER if has_class else MODEL_RUNNER, "LocalSerializedTensor")(values=list(values))


def flattened_bucket(api: SGLangApi, named_tensors: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what load_format="flattened_bucket" wants: a copy of all tensors in one, on their device, and metadata.

    Raises ValueError where SGLang has no buckets, for no tensors, and for several dtypes where a bucket holds one.
    """
    if not api.flattened_bucket:
        raise ValueError(f"weights.transport = bucket: sglang {api.version} has no flattened buckets; use tensor.")
    dtypes = sorted({str(tensor.dtype) for _, tensor in named_tensors})
    if len(dtypes) > 1 and not api.bucket_mixes_dtypes:
        raise ValueError(f"bucket of {', '.join(dtypes)}: sglang {api.version} takes one dtype a bucket; split it.")
    bucket = source.load(BUCKET, "FlattenedTensorBucket")(named_tensors=list(named_tensors))
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def tensors_of_bucket(bucket: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the named tensors of what `flattened_bucket` returned: views of its one tensor."""
    flattened = source.load(BUCKET, "FlattenedTensorBucket")
    whole = flattened(flattened_tensor=bucket["flattened_tensor"], metadata=bucket["metadata"])
    return list(whole.reconstruct_tensors())


def patch_reductions(api: SGLangApi) -> None:
    """Make CUDA IPC handles carry the GPU's UUID, not its index: sender and scheduler may number GPUs differently.

    Call before `serialize` on every rank that sends GPU tensors; twice does no harm. Raises ValueError before
    0.4.4.post3, where trainer and scheduler must see the same CUDA_VISIBLE_DEVICES.
    """
    path = next((path for path in PATCHES if api.tree.has(path)), None)
    if path is None:
        raise ValueError(f"patch_reductions: sglang {api.version} has no patch_torch module; use 0.4.4.post3 or newer.")
    source.load(path, "monkey_patch_torch_reductions")()
