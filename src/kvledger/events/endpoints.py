"""Addresses of sockets: which are right, who reaches them, and what becomes of them in a rank of its own."""

from ipaddress import ip_address
from typing import Final

from kvledger.errors import wrong_value

LAST_PORT: Final = 65_535


def require_endpoint(name: str, endpoint: str) -> None:
    """ConfigError for what ZeroMQ knows no transport for, or a tcp address without its port."""
    transport, _, address = endpoint.partition("://")
    is_right = transport in ("tcp", "ipc", "inproc") and address != ""
    if transport == "tcp":
        host, _, port = address.rpartition(":")
        is_right = host != "" and port.isascii() and port.isdigit() and int(port) <= LAST_PORT
    if not is_right:
        fix = "give one like tcp://127.0.0.1:5557, tcp://*:5557 (for every host) or ipc:///tmp/events"
        raise wrong_value(name, endpoint, "no address of a socket", fix)


def is_public(endpoint: str) -> bool:
    """Whether other machines can reach a socket that is bound there. What is no loopback address for sure is."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        # "*", the name of an interface or of a host.
        return True


def is_ipv6(endpoint: str) -> bool:
    return endpoint.startswith("tcp://[")


def is_bound_in_vllm(endpoint: str) -> bool:
    """vLLM's rule for its publisher: it binds these, and connects to all others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def shifted(endpoint: str, rank: int) -> str:
    """The endpoint of that data parallel rank, where every rank has its own."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{host}:{int(port) + rank}"
