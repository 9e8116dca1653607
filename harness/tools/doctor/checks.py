"""All checks, and the verdict on a job: pure functions from what was learned to what is wrong."""

from harness.tools.doctor import checks_of_gpus, checks_of_hosts, checks_of_links, checks_of_software
from harness.tools.doctor.examination import Check, Examination, Finding, merged

# Causes before consequences: a reader mends the first and runs again.
CHECKS: tuple[Check, ...] = (
    checks_of_hosts.configs,
    checks_of_hosts.routes,
    checks_of_hosts.socket_interfaces,
    checks_of_hosts.host_ids,
    checks_of_hosts.clocks,
    checks_of_software.needed_packages,
    checks_of_software.versions,
    checks_of_software.environment,
    checks_of_software.expandable_segments,
    checks_of_software.preload,
    checks_of_software.renamed_variables,
    checks_of_gpus.devices,
    checks_of_gpus.own_gpus,
    checks_of_hosts.locations,
    checks_of_gpus.occupied,
    checks_of_gpus.balance,
    checks_of_gpus.models,
    checks_of_gpus.nvlink,
    checks_of_hosts.limits,
    checks_of_hosts.shared_memory,
    checks_of_hosts.temp_folder,
    checks_of_hosts.host_memory,
    checks_of_hosts.ports,
    checks_of_hosts.leftovers,
    checks_of_hosts.folders,
    checks_of_hosts.inputs,
    checks_of_links.reached,
    checks_of_links.silent,
    checks_of_links.all_reduced,
    checks_of_links.slow,
    checks_of_gpus.ipc,
)


def findings(view: Examination) -> list[Finding]:
    """Faults first, then warnings."""
    return merged(finding for check in CHECKS for finding in check(view))


def missing(ranks: tuple[int, ...], world_size: int, seconds: float) -> Finding:
    """When ranks never came, nothing between ranks can be measured."""
    told = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return Finding(
        check="missing",
        fault=True,
        ranks=(),
        what=f"rank {told} of {world_size} never came (waited {seconds:.0f} s)",
        remedy="look at what torchrun printed on its host: the rank died at its start, or its host does not reach MASTER_ADDR",
    )
