"""What leaves the device between uses, and what stays; whole updates with offload are in test_whole_update.py."""

import pytest
import torch

from harness.trainer.offload import Offload, storages_of


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
