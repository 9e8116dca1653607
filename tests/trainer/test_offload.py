"""Offload changes where memory is, and no bit of a result; measured by two ranks."""

from typing import Any

import pytest
import torch

from harness.trainer.offload import Offload, storages_of

OFFLOADED = ("parameters", "optimizer", "everything")


@pytest.mark.slow
@pytest.mark.parametrize("case", OFFLOADED)
def test_results_are_the_same_bits(offloads: list[dict[str, Any]], case: str) -> None:
    for rank in offloads:
        assert rank[case]["rounds"] == rank["nothing"]["rounds"]
        first, second = rank["nothing"]["rounds"]
        assert first[4] != second[4], "the updates did something"
        assert first[2]["grad_norm"] > 0.3, "clipping took part"


@pytest.mark.slow
@pytest.mark.parametrize("case", OFFLOADED)
def test_what_is_offloaded_has_no_memory_between_uses_and_stays_the_same_object(
    offloads: list[dict[str, Any]], case: str
) -> None:
    for rank in offloads:
        parameters, states = rank["nothing"]["busy"]
        assert rank[case]["busy"] == [parameters, states] and states > parameters > 0
        for shards, moments, value_shards in rank[case]["idle"]:
            assert shards == (0 if case in ("parameters", "everything") else parameters)
            assert moments == (0 if case in ("optimizer", "everything") else states)
            assert (value_shards == 0) == (case in ("parameters", "everything"))
        assert rank[case]["same_objects"] and rank[case]["gradients"] == 0


@pytest.mark.slow
def test_an_offloaded_reference_computes_the_same(offloads: list[dict[str, Any]]) -> None:
    for rank in offloads:
        assert rank["reference"]["idle"] == 0
        assert rank["reference"]["log_probs"] == rank["nothing"]["rounds"][0][0]


def test_tensors_that_share_a_storage_move_once_and_keep_their_views() -> None:
    whole = torch.arange(12.0)
    view = whole[4:].view(2, 4)
    assert len(storages_of([whole, view, torch.empty(0)])) == 1
    offload = Offload(lambda: [whole, view], wanted=True)
    assert whole.untyped_storage().nbytes() == 0
    with offload.on_device():
        view += 1
    with offload.on_device(), offload.on_device():
        assert whole.tolist() == [0, 1, 2, 3, *range(5, 13)]
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_tensors_stay_after_an_error_and_leave_with_the_next_use_and_new_ones_with_them() -> None:
    tensors = [torch.ones(3)]
    offload = Offload(lambda: tensors, wanted=True)
    with pytest.raises(ArithmeticError), offload.on_device():
        tensors.append(torch.ones(5))
        raise ArithmeticError
    assert tensors[0].untyped_storage().nbytes() == 12
    with offload.on_device():
        pass
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    with offload.on_device():
        assert all(tensor.sum() == len(tensor) for tensor in tensors)


def test_what_is_not_wanted_never_moves() -> None:
    tensor = torch.ones(3)
    offload = Offload(lambda: [tensor], wanted=False)
    with offload.on_device():
        pass
    assert tensor.untyped_storage().nbytes() == 12


def test_what_schedulers_have_mapped_on_the_cpu_keeps_its_memory() -> None:
    """A pull moves a storage into shared memory in place, and torch cannot resize it there."""
    mapped, other = torch.arange(3.0), torch.arange(5.0)
    offload = Offload(lambda: [mapped, other], wanted=True)
    with offload.on_device():
        mapped.untyped_storage()._share_fd_cpu_()
        address = mapped.data_ptr()
        assert storages_of([mapped, other]) == [other.untyped_storage()]
    assert (mapped.data_ptr(), mapped.tolist()) == (address, [0, 1, 2])
    assert other.untyped_storage().nbytes() == 0
    with offload.on_device():
        assert mapped.data_ptr() == address and other.tolist() == [0, 1, 2, 3, 4]
