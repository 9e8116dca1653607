"""Choose the interface and address by which other hosts reach this one, and the variables that set them.

Without these variables gloo uses the address that the hostname resolves to (127.0.1.1 on Debian), NCCL uses the first
interface that is up, and SGLang uses the one that routes to 8.8.8.8.
"""

import ipaddress
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
ADDRESS_VARIABLES = ("SGLANG_HOST_IP", "HOST_IP")
"""The address that SGLang's schedulers publish for each other. HOST_IP is the older name."""

Interfaces = Mapping[str, Sequence[str]]
"""Name -> its IPv4 and IPv6 addresses, without link-local ones."""


class NetworkError(ValueError):
    """The interface that was asked for does not exist here, or no interface has a usable address."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """How other hosts reach this one."""

    interface: str
    address: str
    why: str
    """Why it was chosen, as the end of a sentence."""


def own_interfaces() -> dict[str, list[str]]:
    """Return this host's interfaces that have an address."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        inet = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [address for address in inet if not ipaddress.ip_address(address.partition("%")[0]).is_link_local]
        if usable:
            found[name] = usable
    return found


def route_to_master(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return (own address on the route to MASTER_ADDR, the address that MASTER_ADDR resolves to here)."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent, the kernel picks the route
        return str(probe.getsockname()[0]), str(address[0])


def own_address(environment: Mapping[str, str]) -> str:
    """Return this host's address for other hosts: of GLOO_SOCKET_IFNAME if set, or on the route to MASTER_ADDR.

    Of several addresses of the interface, the one that the hosts have agreed on (SGLANG_HOST_IP) or that has the route.
    """
    route, _ = route_to_master(environment)
    name = environment.get(INTERFACE_VARIABLE, "").partition(",")[0]
    for address in (environment.get(ADDRESS_VARIABLES[0], ""), route):
        if name and address in own_interfaces().get(name, ()):
            return address
    return choose(name, "", own_interfaces(), route, []).address if name else route


def choose(wanted: str, variable: str, interfaces: Interfaces, route: str, reached: Sequence[str]) -> HostAddress:
    """Choose the host's address, if possible of the same family (IPv4 or IPv6) as `route`.

    wanted: network.interface, a name or a network. variable: the value of GLOO_SOCKET_IFNAME. Both may be empty. route:
    the host's own address on the route to MASTER_ADDR. reached: what MASTER_ADDR resolves to on the other hosts, used
    if it is a loopback address here. Raise NetworkError if no interface fits.
    """
    if wanted or variable:
        key = f"network.interface = {wanted}" if wanted else f"{INTERFACE_VARIABLE} = {variable}"
        return _named(wanted or variable.partition(",")[0], key, interfaces, ipaddress.ip_address(route).version)
    owners = {address: name for name, addresses in reversed(list(interfaces.items())) for address in addresses}
    if not _is_loopback(route):
        if route not in owners:
            raise NetworkError(f"the route to MASTER_ADDR starts at {route}, which no interface of this host has")
        return HostAddress(owners[route], route, "it routes to MASTER_ADDR")
    for address in reached:
        if address in owners and not _is_loopback(address):
            return HostAddress(owners[address], address, "the other hosts reach MASTER_ADDR by it")
    # All of 127.0.0.0/8 belongs to the loopback interface, which lists only one address.
    loopback = next((name for name, each in interfaces.items() if any(map(_is_loopback, each))), "lo")
    return HostAddress(owners.get(route, loopback), route, "MASTER_ADDR is a loopback address")


def agree(store: "Store", rank: int, world_size: int, identity: str, wanted: str) -> dict[str, HostAddress]:
    """Return every host's address, by identity, in the order of their first ranks. A collective call of all ranks.

    store: open on every rank and used for nothing else. Raise NetworkError, on every rank, if network.interface does
    not fit on some, and TimeoutError if ranks are missing.
    """
    route, master = route_to_master(os.environ)
    store.set(f"route/{rank}", json.dumps([identity, master]))
    routes = [json.loads(value) for value in of_all(store, "route", world_size)]
    reached = [address for other, address in routes if other != identity]
    variable = os.environ.get(INTERFACE_VARIABLE, "")
    try:
        chosen = choose(wanted, variable, own_interfaces(), route, list(dict.fromkeys(reached)))
        store.set(f"address/{rank}", json.dumps(asdict(chosen)))
    except NetworkError as error:
        store.set(f"address/{rank}", json.dumps(str(error)))
    hosts: dict[str, HostAddress] = {}
    for other, ((host, _), value) in enumerate(zip(routes, of_all(store, "address", world_size), strict=True)):
        found = json.loads(value)
        if isinstance(found, str):
            raise NetworkError(f"rank {other}: {found}")
        hosts.setdefault(host, HostAddress(**found))
    return hosts


def variables(own: HostAddress, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job on several hosts must set, without those that the user has set."""
    # Without the equals sign NCCL would read the name as a prefix.
    wanted = {INTERFACE_VARIABLE: own.interface, "NCCL_SOCKET_IFNAME": f"={own.interface}"}
    wanted |= dict.fromkeys(ADDRESS_VARIABLES, own.address)
    if ":" in own.address:
        wanted["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in wanted.items() if name not in environment}


def bracketed(address: str) -> str:
    """Return an address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


def _named(wanted: str, key: str, interfaces: Interfaces, family: int) -> HostAddress:
    """Return the interface with that name, or one with an address in that network.

    The address family decides between two.
    """
    pairs = [(name, address) for name, addresses in interfaces.items() for address in addresses]
    try:
        network = ipaddress.ip_network(wanted, strict=False)
        fitting = [pair for pair in pairs if ipaddress.ip_address(pair[1]) in network]
    except ValueError:
        fitting = [pair for pair in pairs if pair[0] == wanted]
    if not fitting:
        there = "; ".join(f"{name} ({', '.join(addresses)})" for name, addresses in interfaces.items())
        raise NetworkError(
            f"{key} must be an interface of host {socket.gethostname()} or a network that one of its addresses is in:"
            f" it has {there}"
        )
    return HostAddress(*min(fitting, key=lambda pair: ipaddress.ip_address(pair[1]).version != family), key)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def of_all(store: "Store", what: str, world_size: int) -> list[bytes]:
    """Return the value that each rank stored under a key, by rank."""
    keys = [f"{what}/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys)
    except RuntimeError as error:  # DistStoreError: its timeout
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(f"these of {world_size} ranks did not report in time: {missing}") from error
    return [bytes(value) for value in store.multi_get(keys)]
