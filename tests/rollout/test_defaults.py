from harness.rollout.defaults import engine_defaults


def test_piecewise_capture_is_off_on_every_device() -> None:
    """0.5.13 captures on CPU too where nothing forbids it, and dies."""
    assert all(engine_defaults(device)["disable_piecewise_cuda_graph"] for device in ("cpu", "cuda"))
