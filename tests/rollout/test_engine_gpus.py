import pytest

from harness.rollout.engine_ranks import check_devices


def test_shared_is_each_on_its_own() -> None:
    check_devices(["a", "b"], {0: "a", 1: "b"}, True)
    check_devices(["a", "b"], {1: "b"}, True)
    check_devices(["a", "b"], {}, True)
    with pytest.raises(ValueError, match=r"rank 1 runs on GPU a, but its trainer is on GPU b .* check CUDA_VIS"):
        check_devices(["a", "b"], {1: "a"}, True)


def test_apart_is_on_no_trainers_gpu() -> None:
    check_devices(["a", "b"], {0: "c", 1: "d"}, False)
    check_devices(["a", "b"], {}, False)
    with pytest.raises(ValueError, match=r"rank 0 runs on GPU b, but rank 1 trains there \(parallel\.colocate = false"):
        check_devices(["a", "b"], {0: "b"}, False)
    with pytest.raises(ValueError, match=r"rank 1 runs on GPU c, but so does the engine rank of rank 0"):
        check_devices(["a", "b"], {0: "c", 1: "c"}, False)
