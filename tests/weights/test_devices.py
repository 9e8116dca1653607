import pytest

from harness.weights.devices import check_devices


def test_shared_is_each_on_its_own() -> None:
    check_devices(["a", "b"], {0: "a", 1: "b"}, True)
    check_devices(["a", "b"], {1: "b"}, True)
    check_devices(["a", "b"], {}, True)
    with pytest.raises(ValueError, match=r"^rank 1 trains on GPU b but its engine rank runs on GPU a; check CUDA_VIS"):
        check_devices(["a", "b"], {1: "a"}, True)


def test_apart_is_on_no_trainers_gpu() -> None:
    check_devices(["a", "b"], {0: "c", 1: "d"}, False)
    check_devices(["a", "b"], {}, False)
    with pytest.raises(ValueError, match=r"^parallel\.colocate = false, but .* rank 0 runs on GPU b, on which rank 1"):
        check_devices(["a", "b"], {0: "b"}, False)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 both run on GPU c, but each needs its own"):
        check_devices(["a", "b"], {0: "c", 1: "c"}, False)
