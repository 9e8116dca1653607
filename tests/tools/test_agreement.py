from pathlib import Path

from harness.cluster.world import WorldError
from harness.tools.agreement import check_agreement
from tests.cluster.gloo import on_ranks

SAME = {"NCCL_DEBUG": "INFO", "SGLANG_X": "1", "PATH": "/bin"}
ODD_RANK = {
    "NCCL_CUMEM_ENABLE": "0",  # only here
    "NCCL_DEBUG": "WARN",  # another value
    "PATH": "/usr/bin",  # changes nothing that is compared
    "CUDA_VISIBLE_DEVICES": "1",  # differs by design
    "TORCHELASTIC_ERROR_FILE": "1.json",
}


def _agree(rank: int, digests: list[str]) -> list[str] | str:
    environment = SAME | (ODD_RANK if rank == 1 else {"CUDA_VISIBLE_DEVICES": str(rank)})
    try:
        return check_agreement(digests[rank], environment)
    except WorldError as error:
        return str(error)


def test_one_rank_with_other_variables_is_named_on_every_rank(tmp_path: Path) -> None:
    sentences = [
        "NCCL_CUMEM_ENABLE differs between ranks: unset on ranks 0, 2; 0 on rank 1",
        "NCCL_DEBUG differs between ranks: INFO on ranks 0, 2; WARN on rank 1",
    ]
    assert on_ranks(_agree, 3, tmp_path, ["aa"] * 3) == [sentences] * 3


def test_one_rank_with_another_config_fails_every_rank(tmp_path: Path) -> None:
    (sentence,) = set(on_ranks(_agree, 3, tmp_path, ["0123456789", "0123456789", "fedcba98"]))
    assert sentence.startswith(
        "the resolved config differs between ranks (01234567 on ranks 0, 1; fedcba98 on rank 2);"
    )
