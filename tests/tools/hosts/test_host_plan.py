import sys
from pathlib import Path

import pytest

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.hosts.host_plan import (
    TORCHRUN,
    EmulationPlan,
    HostsOptions,
    environment,
    hosts_file,
    interfaces,
    make_plan,
    split_gpus,
    torchrun,
)
from launch import hosts

SCRIPT = (__file__, "--parallel.tp", "4")


def plan(options: HostsOptions, refusal: str = "", visible: tuple[str, ...] = ()) -> EmulationPlan:
    return make_plan(options, SCRIPT, refusal, visible)


def test_a_host_has_a_rank_for_each_of_its_gpus_or_one() -> None:
    assert plan(HostsOptions()).ranks_per_host == plan(HostsOptions(), visible=("0",)).ranks_per_host == 1
    assert plan(HostsOptions(), visible=("0", "1", "2", "3")).ranks_per_host == 2


def test_torchrun_finds_the_others_over_a_rendezvous_or_by_a_master_and_ranks_of_nodes() -> None:
    made = plan(HostsOptions(ranks_per_host=2))
    assert torchrun(made, made.hosts[1], 29500) == (
        sys.executable, str(TORCHRUN), "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=hosts", *SCRIPT,
    )  # fmt: skip
    made = plan(HostsOptions(network="ipv6"))
    assert "--rdzv-endpoint=[fd77::1]:7" in torchrun(made, made.hosts[0], 7)
    made = plan(HostsOptions(rendezvous="static", master="hostname", network="both"))
    words = torchrun(made, made.hosts[1], 29500)
    assert words[4:7] == ("--node-rank=1", "--master-addr=host0", "--master-port=29500")


def test_without_namespaces_hosts_differ_by_variables_and_loopback_addresses() -> None:
    made = plan(HostsOptions(), refusal="no", visible=("0", "1", "2", "3"))
    assert not made.namespaces
    assert made.ranks_per_host == 2
    changes = environment(made, made.hosts[1], Path("folder"))
    assert changes == {
        "TMPDIR": "folder/tmp",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "HARNESS_HOST": "host1",
        "NCCL_HOSTID": "host1",
    }
    words = torchrun(made, made.hosts[1], 4000)
    assert {"--rdzv-endpoint=127.0.0.1:4000", "--local-addr=127.0.0.2"} <= set(words)
    assert interfaces(1, HostsOptions(network="ipv6"), namespaces=False) == {"lo": ("::1",)}


def test_phases_are_reported_only_where_something_happens_at_one() -> None:
    timed, phased = plan(HostsOptions(kill=("host1@3s",))), plan(HostsOptions(cut=("host0@sync",)))
    assert "HARNESS_EMULATOR" not in environment(timed, timed.hosts[0], Path("f"))
    assert environment(phased, phased.hosts[0], Path("f"))["HARNESS_EMULATOR"] == "f/phases"


def test_the_last_interface_joins_the_hosts_and_the_others_are_decoys() -> None:
    assert interfaces(1, HostsOptions(interfaces=2, network="both"), namespaces=True) == {
        "eth0": ("10.78.0.2/24", "fd78::2/64"),
        "eth1": ("10.77.0.2/24", "fd77::2/64"),
    }
    assert interfaces(0, HostsOptions(network="ipv6"), namespaces=True) == {"eth0": ("fd77::1/64",)}


def test_hosts_file_names_every_host() -> None:
    made = plan(HostsOptions(network="both"))
    assert hosts_file(made, made.hosts[0]).splitlines()[2:] == [
        "10.77.0.1 host0", "fd77::1 host0", "10.77.0.2 host1", "fd77::2 host1",
    ]  # fmt: skip
    debian = plan(HostsOptions(debian_hosts=True))
    assert hosts_file(debian, debian.hosts[1]).splitlines()[0] == "127.0.1.1 host1"


@pytest.mark.parametrize(
    ("visible", "split"),
    [((), (None, None)), (("0", "1", "3", "2"), ("0,1", "3,2")), (("4", "5", "6"), ("4", "5")), (("0",), ("", ""))],
)
def test_gpus_are_split_evenly_and_in_order(visible: tuple[str, ...], split: tuple[str | None, ...]) -> None:
    assert split_gpus(2, visible) == split


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (HostsOptions(hosts=0), ("--hosts", "1 to 250", "got 0")),
        (HostsOptions(interfaces=9), ("--interfaces", "1 to 8", "9")),
        (HostsOptions(ranks_per_host=-1), ("--ranks-per-host", "0 to 1024", "-1")),
        (HostsOptions(isolation="processes", cut=("host1@sync",)), ("--cut needs hosts in namespaces",)),
        (HostsOptions(isolation="processes", interfaces=2), ("--interfaces needs hosts in namespaces",)),
        (HostsOptions(kill=("nobody@sync",)), ("--kill", "nobody")),
    ],
)
def test_a_mistake_is_named(options: HostsOptions, facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        plan(options)
    assert all(fact in str(raised.value) for fact in facts)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (HostsOptions(isolation="namespaces"), ("--isolation namespaces", "(no rights)")),
        (HostsOptions(cut=("host1@sync",)), ("--cut needs hosts in namespaces", "(no rights)")),
    ],
)
def test_what_this_machine_refuses_is_no_mistake(options: HostsOptions, facts: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedEnvironment) as raised:
        plan(options, refusal="no rights")
    assert all(fact in str(raised.value) for fact in facts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch/doctor.py",), "put -- before launch/doctor.py"),
        (
            ("--isolation", "processes", "--cut", "host7@sync", "--", __file__),
            "error: --cut must name one of the hosts host0, host1",
        ),
        (("--isolation", "processes", "--"), "there is no script to run; give one after --"),
        (("--isolation", "processes", "--", "launch/none.py"), "launch/none.py"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hosts.main(list(words)) == 2
    output, errors = capfd.readouterr()
    assert said in errors and len(errors.splitlines()) == 1 and output == ""
